"""The network interfaces of this machine, and the one on which ranks meet the other nodes.

gloo takes the interface that the host's name resolves to, often loopback; NCCL takes the first that
is up, which may be a container bridge. The other nodes reach this one by its Ray address: ranks use
the interface that has that address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

import psutil

LOOPBACK = "lo"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def rank_interfaces(address: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that name gloo's and NCCL's interface, except those that `environment` sets.

    `address` is this node's, by which the gang's other nodes reach it; None for a gang on one node:
    then gloo stays on loopback, and NCCL needs no network. Empty if no interface has the address,
    as behind a translation of addresses.
    """
    if address is None:
        return {} if GLOO_VARIABLE in environment else {GLOO_VARIABLE: LOOPBACK}
    name = interface_of(address)
    if name is None:
        return {}
    # With "=" NCCL takes this interface alone, not every one whose name begins so.
    wanted = {GLOO_VARIABLE: name, NCCL_VARIABLE: f"={name}"}
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def interface_of(address: str) -> str | None:
    """The interface that has an address, IPv4 or IPv6; None also for a host name."""
    try:
        wanted = str(ipaddress.ip_address(address))
    except ValueError:
        return None
    for name, found in psutil.net_if_addrs().items():
        # A link-local address ends in its interface, `fe80::1%eth0`.
        if any(one.address.partition("%")[0] == wanted for one in found):
            # A second address may have a label, `eth0:1`.
            return str(name).partition(":")[0]
    return None

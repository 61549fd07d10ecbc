"""The network interfaces of this machine, by the addresses that they hold, and which of them ranks shall meet the other nodes on.

gloo takes the interface that the host's name resolves to, often loopback; NCCL the first that is up, a container bridge among them.
Ray's address of the node is one that the other nodes do reach: the interface that holds it is the one to use.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "lo"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFCONF = 0x8912  # linux/sockios.h
_IFREQ_BYTES, _NAME_BYTES = 40, 16  # struct ifreq of a 64-bit machine: a name, and a socket address
_MAX_ADDRESSES = 1024


def rank_interfaces(address: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell gloo and NCCL their interface, as far as `environment` leaves it to us.

    `address` is this node's, as the gang's other nodes reach it; None where there are none: then gloo stays on loopback, and NCCL
    needs no network. Empty where no interface holds the address, as behind a translation of addresses.
    """
    if address is None:
        return {} if GLOO_VARIABLE in environment else {GLOO_VARIABLE: LOOPBACK}
    name = interface_of(address)
    if name is None:
        return {}
    wanted = {
        GLOO_VARIABLE: name,
        NCCL_VARIABLE: f"={name}",
    }  # "=": this one, not all whose names begin so
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def interface_of(address: str) -> str | None:
    """The interface that holds an address, IPv4 or IPv6."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:  # a name; what it resolves to on another node is not known here
        return None
    held = _ipv6_addresses() if wanted.version == 6 else _ipv4_addresses()
    return next((name for name, other in held if other == wanted), None)


def _ipv4_addresses() -> list[tuple[str, ipaddress.IPv4Address]]:
    buffer = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ_BYTES))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, struct.pack("iP", size, place))
    (used,) = struct.unpack_from("i", answer)
    found = []
    for start in range(0, used, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        name = os.fsdecode(entry[:_NAME_BYTES].split(b"\0", 1)[0])
        # After the name: family and port, two bytes each, then the address. A second address may bear a label, `eth0:1`.
        found.append(
            (
                name.partition(":")[0],
                ipaddress.IPv4Address(entry[_NAME_BYTES + 4 : _NAME_BYTES + 8]),
            )
        )
    return found


def _ipv6_addresses() -> list[tuple[str, ipaddress.IPv6Address]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    return [
        (words[5], ipaddress.IPv6Address(bytes.fromhex(words[0])))
        for words in map(str.split, lines)
    ]

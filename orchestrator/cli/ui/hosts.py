"""The addresses at which the pages are served, and the names that a request may call them by."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Set
from dataclasses import dataclass

from orchestrator.core.errors import UsageInvalid

LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The names of one server. With `is_open` it can be reached from other machines."""

    names: Set[str]
    is_open: bool
    # Bound to all addresses: a request may name any of them.
    takes_addresses: bool = False

    def allow(self, header: str) -> bool:
        """Return whether a header `Host` names this server: no other site's name may lead here.

        Any port: a tunnel such as `ssh -L` has its own.
        """
        found = _HOST.fullmatch(header)
        if found is None:
            return False
        name = found["name"].strip("[]").lower()
        return name in self.names or (self.takes_addresses and _address(name) is not None)


def hosts_of(host: str) -> Hosts:
    """The names of a server that listens on a host, an address or a name."""
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return Hosts(names=_LOCAL_NAMES | {host.lower()}, is_open=False)
    named = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    is_any = address is not None and address.is_unspecified
    return Hosts(names=_LOCAL_NAMES | named, is_open=True, takes_addresses=is_any)


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address. Raises UsageInvalid if that cannot be done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as exc:
        # `strerror` of create_server repeats the address.
        why = str(getattr(exc, "strerror", None) or exc).split(" (while")[0]
        raise UsageInvalid(
            f"cannot listen on {host} port {port}: {why[:1].lower()}{why[1:]}; another --port, or"
            " none, takes a free one"
        ) from None


def url_of(host: str, port: int) -> str:
    """The address that a person opens."""
    address = _address(host)
    name = socket.gethostname() if address is not None and address.is_unspecified else host
    return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None

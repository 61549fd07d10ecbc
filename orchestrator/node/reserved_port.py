"""A port that is kept free for rank 0's store until its attempt has ended."""

from __future__ import annotations

import socket


class ReservedPort:
    """At most one port at a time. A new one takes the place of the one before."""

    def __init__(self) -> None:
        self._port: socket.socket | None = None

    def take(self) -> int:
        """Reserve another free port, and return its number."""
        self.release()
        self._port = reserve_port()
        return int(self._port.getsockname()[1])

    def release(self) -> None:
        """Let the port go, if one is reserved."""
        port, self._port = self._port, None
        if port is not None:
            port.close()


def reserve_port() -> socket.socket:
    """Bind a free port for a program that will listen on it while this socket reserves it.

    Both sockets allow the reuse of addresses, and this one does not listen: so Linux lets the
    program in. The kernel gives no bound port to anybody who asks for a free one.
    """
    try:
        bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("::", 0))
    except OSError:  # no IPv6 here
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.bind(("", 0))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound

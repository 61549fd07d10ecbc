"""A port that is kept free for rank 0's store until its attempt has ended."""

from __future__ import annotations

import socket


class HeldPort:
    """Holds at most one port. A new one takes the place of the one before."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None

    def take(self) -> int:
        """Hold another free port, and return its number."""
        self.release()
        self._held = hold_port()
        return int(self._held.getsockname()[1])

    def release(self) -> None:
        """Hold no port any more."""
        held, self._held = self._held, None
        if held is not None:
            held.close()


def hold_port() -> socket.socket:
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

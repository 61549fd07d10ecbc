"""Checks from a node every few seconds whether the head of the cluster can be reached.

Ray does nothing on a node that is cut off: its processes continue, and ranks that wait for ranks on
other nodes keep their GPUs for hours.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

logger = logging.getLogger(__name__)

# As long as an orchestrator's lease: after that, its attempts belong to another orchestrator.
CUT_SECONDS = 30.0
CHECK_SECONDS = 5.0  # between checks, and for each


class HeadWatch:
    """Tells when HOST:PORT could not be reached for `cut_seconds`."""

    def __init__(
        self,
        address: str,
        *,
        cut_seconds: float = CUT_SECONDS,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._address = address
        self._cut_seconds, self._check_seconds = cut_seconds, check_seconds
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the wait, in another thread."""
        self._stop.set()

    def wait_until_cut(self) -> bool:
        """Wait until the address is out of reach. False: `stop` was called before."""
        reached_at = time.monotonic()
        while not self._stop.wait(self._check_seconds):
            # Check before deciding: this process may have been stopped for an hour.
            unreachable = why_unreachable(self._address, timeout_seconds=self._check_seconds)
            now = time.monotonic()
            if unreachable is None:
                reached_at = now
            elif now - reached_at > self._cut_seconds:
                logger.warning(
                    "%s has been unreachable for %.0f s (%s): the ranks on this node are ended",
                    self._address,
                    now - reached_at,
                    unreachable,
                )
                return True
        return False


def why_unreachable(address: str, *, timeout_seconds: float) -> str | None:
    """Return why nothing answers at HOST:PORT, or None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds).close()
    except OSError as exc:
        return exc.strerror or str(exc)
    except UnicodeError:
        # The name cannot be encoded: a part of it is empty, or longer than 63 characters.
        return "it is no name of a host"
    return None

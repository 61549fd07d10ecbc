"""A look at the head of the cluster every few seconds, from a node of it, and what follows when nobody answers there for long.

Ray leaves a node that is cut off as it is: its processes go on, and ranks that wait for ranks elsewhere hold their GPUs for hours.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

CUT_SECONDS = 30.0  # as long as an orchestrator's lease: by then its attempts are others'
KNOCK_SECONDS = 5.0  # between two looks, and for one of them


class HeadWatch:
    """Calls `on_cut` once, from a thread of its own, when nobody has answered at `address` (HOST:PORT) for too long."""

    def __init__(
        self,
        address: str,
        on_cut: Callable[[], None],
        *,
        cut_seconds: float = CUT_SECONDS,
        knock_seconds: float = KNOCK_SECONDS,
    ) -> None:
        self._address = address
        self._on_cut = on_cut
        self._cut_seconds, self._knock_seconds = cut_seconds, knock_seconds
        self._let_go = threading.Event()
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def let_go(self) -> None:
        """Look no more."""
        self._let_go.set()

    def _watch(self) -> None:
        reached_at = time.monotonic()
        while not self._let_go.wait(self._knock_seconds):
            # A look comes before the verdict: who was stopped for an hour, and wakes, finds out first whether anything is wrong.
            unreachable = why_unreachable(self._address, patience_seconds=self._knock_seconds)
            now = time.monotonic()
            if unreachable is None:
                reached_at = now
            elif now - reached_at > self._cut_seconds:
                logger.warning(
                    "No way to %s for %.0f s (%s): what runs here is ended",
                    self._address,
                    now - reached_at,
                    unreachable,
                )
                self._on_cut()
                return


def why_unreachable(address: str, *, patience_seconds: float) -> str | None:
    """Why nobody answers at HOST:PORT, or None where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience_seconds).close()
    except OSError as exc:
        return exc.strerror or str(exc)
    return None

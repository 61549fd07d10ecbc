"""Bounds calls of Ray that have no time limit of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CHECK_SECONDS = 0.5  # between two checks of `should_give_up`


def within(
    seconds: float,
    call: Callable[[], object],
    *,
    should_give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Return whether the call ends in time; if not, it continues in a thread.

    `should_give_up` returns whether there is no point in waiting any longer.
    """
    thread = threading.Thread(target=call, name="bounded-ray-call", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, CHECK_SECONDS))
        if thread.is_alive() and should_give_up():
            break
    return not thread.is_alive()


def first_line(exc: BaseException) -> str:
    """Return the kind of an error and its first line, without a full stop."""
    text = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {text[0].rstrip('. ') if text else ''}"

"""The time that torch.compile takes in this process, as torch's own hooks tell it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._dynamo.callback import callback_handler


class CompileTime:
    """The seconds of compilations, those of backward passes and later steps included.

    Torch calls `start` and `end` once for compilations inside of each other.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._began = clock, 0.0

    def start(self, *_: object) -> None:
        """Note that a compilation begins."""
        self._began = self._clock()

    def end(self, *_: object) -> None:
        """Add the seconds of the compilation that ends."""
        self.seconds += self._clock() - self._began


@contextmanager
def timed_compilations() -> Iterator[CompileTime]:
    """Time the compilations until the end of the context."""
    found = CompileTime()
    start = callback_handler.register_start_callback(found.start)
    end = callback_handler.register_end_callback(found.end)
    try:
        yield found
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)

"""The signals that stop a sweep, and what each asks for. Like its callers, it imports within functions: `sweep --help` loads little."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.progress import Stop


class Signals:
    """Ctrl-C drains, a second one cancels; SIGTERM cancels at once, since whoever sends it will kill soon."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, Any] = {}
        self.received: int | None = None
        self._level = 0

    def __enter__(self) -> Signals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Again, too, after something else has put handlers of its own in place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._receive)
            self._before.setdefault(number, before)

    def asked(self) -> Stop:
        from orchestrator.progress import Stop

        return Stop(self._level)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number
        if number == signal.SIGTERM or self._level:
            self._level = 2
            self._say("Cancelling: trials under way are ended and will be measured by the next `sweep run`.")
        else:
            self._level = 1
            self._say("Stopping: nothing new is started, trials under way may finish. Ctrl-C again to end them now.")

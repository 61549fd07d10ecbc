"""The signals that stop a command, and what each asks of a sweep. Like its callers, it imports within functions: `sweep --help` loads little."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.sweep.progress import Stop

UNHEARD_SECONDS = 3.0  # after which a command that hears no signal is ended
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """A signal ends this command. Not an Exception: nobody but `main` is to catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell says of a process that died of this signal."""
        return 128 + self.number


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated`, whatever the command is doing. Python itself raises KeyboardInterrupt for Ctrl-C."""
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        raise Terminated(number)

    replaced = (
        []
        if threading.current_thread() is not threading.main_thread()
        else [signal.SIGTERM, signal.SIGHUP]
    )
    replaced = [
        number for number in replaced if signal.getsignal(number) is signal.SIG_DFL
    ]  # `nohup` has SIGHUP ignored
    for number in replaced:
        signal.signal(number, receive)
    try:
        yield
    finally:
        # Where one came, a second one must find our handler until this process has ended.
        for number in replaced if not received else ():
            signal.signal(number, signal.SIG_DFL)


class Signals:
    """What signals ask of a sweep.

    Until it runs any of them ends the command at once (`Terminated`), also where the command waits in a library that lets Python handle
    no signal, as Ray does for a head that the same signal has ended. From `defer` on Ctrl-C drains, a second one cancels; SIGTERM
    and SIGHUP (a closed terminal) cancel at once, since whoever sends them will kill soon.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._is_deferred = False
        self._num_received = 0
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._has_ended = threading.Event()
        self.received: int | None = None
        self._level = 0

    def __enter__(self) -> Signals:
        self.install()
        os.set_blocking(self._wake_read, True)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        if self._num_received and not self._is_deferred:
            return  # the command ends, and a second signal must not end the end
        signal.set_wakeup_fd(-1)
        os.close(self._wake_write)  # and so ends the thread
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Again, too, after something else has put handlers of its own in place."""
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup`
            before = signal.signal(number, self._receive)
            self._before.setdefault(number, before)

    def defer(self) -> None:
        """From now on the sweep asks what it is to do."""
        self._is_deferred = True

    def asked(self) -> Stop:
        from orchestrator.sweep.progress import Stop

        return Stop(self._level)

    def _watch(self) -> None:
        """A thread of its own: it hears of a signal when the kernel delivers it, `_receive` only when Python runs."""
        while numbers := os.read(self._wake_read, 1):
            if numbers[0] in SIGNALS and not self._is_deferred and not self._num_received:
                self._has_ended.wait(UNHEARD_SECONDS)
                if not self._num_received:
                    os._exit(128 + numbers[0])
        os.close(self._wake_read)

    def _receive(self, number: int, _frame: object) -> None:
        self._let_go_of_closed_terminals()
        self.received = number
        self._num_received += 1
        if not self._is_deferred:
            self._level = 2
            if self._num_received == 1:
                raise Terminated(number)
            # What is under way ends without us: by the guard, the wardens and the next call.
            if self._num_received > 2:
                os._exit(128 + number)
        elif number != signal.SIGINT or self._level:
            self._level = 2
            self._tell(
                "Cancelling: trials under way are ended and will be measured by the next `sweep run`."
            )
        else:
            self._level = 1
            self._tell(
                "Stopping: nothing new is started, trials under way may finish. Ctrl-C again to end them now."
            )

    def _tell(self, text: str) -> None:
        with suppress(OSError):
            self._say(text)

    def _let_go_of_closed_terminals(self) -> None:
        """Write nowhere instead: a terminal that was closed refuses what is written to it, and there is work left to be done."""
        for stream in self._terminals:
            if not os.isatty(stream.fileno()):
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)

"""The signals that stop a command, and what each of them asks of a sweep."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from layout_sweep.start import end_at_once

if TYPE_CHECKING:
    from orchestrator.sweep.progress import Stop

# How long Python may take to handle a signal before the process is ended.
UNHANDLED_SECONDS = 3.0
# How long a command that has not begun to run its sweep may take to end after a signal.
CLEARING_UP_SECONDS = 8.0
# A signal that comes during an import is sent once more after so long.
AGAIN_SECONDS = 0.02
_IMPORTING = "<frozen importlib._bootstrap>"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a signal means for a sweep that has not begun to run.
BEFORE_IT_RAN = "nothing was running yet and nothing is lost: the same command continues"


class Terminated(BaseException):
    """A signal ends this command. Not an Exception, so that only `main` catches it."""

    def __init__(self, number: int, remark: str | None = None) -> None:
        """`remark`: what this means for what the command was to do."""
        how = "interrupted"
        if number != signal.SIGINT:
            how = f"ended by {signal.Signals(number).name}"
        super().__init__(f"{how}; {remark}" if remark is not None else how)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell reports for a process killed by this signal."""
        return 128 + self.number

    def end_process(self) -> NoReturn:
        """End this process at once, where Python would ignore an exception."""
        with suppress(OSError):  # stderr may be a closed terminal
            os.write(2, f"{self}\n".encode())
        os._exit(self.exit_code)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated`, as Ctrl-C raises KeyboardInterrupt.

    Until then `layout_sweep.start` ends this process at once when one of them comes. An error that
    takes the place of one of these exceptions becomes that exception again, and where Python
    ignores it the process ends at once.
    """
    received: list[int] = []
    process = os.getpid()

    def receive(number: int, frame: FrameType | None) -> None:
        _end_copy_of(process, number)
        if not received and comes_again(number, frame):
            return
        received.append(number)
        if len(received) > 1:
            os._exit(128 + number)
        raise Terminated(number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        _end_copy_of(process, number)
        if not comes_again(number, frame):
            signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: interrupt if number == signal.SIGINT else receive for number in SIGNALS}
    # Signals that are ignored already, as by `nohup`, stay ignored.
    replaced = {
        number: signal.getsignal(number)
        for number in (SIGNALS if is_main else ())
        if signal.getsignal(number) in (signal.SIG_DFL, end_at_once)
    }
    for number in replaced:
        signal.signal(number, handlers[number])
    show_ignored = sys.unraisablehook
    sys.unraisablehook = partial(_end_if_ignored, show_ignored)
    try:
        yield
    except Exception as exc:
        if received:
            raise Terminated(received[0]) from exc
        if (of_signal := _replaced_by(exc)) is not None:
            raise of_signal from None
        raise
    finally:
        sys.unraisablehook = show_ignored
        # After a signal our handler stays, for a second one, until this process has ended.
        for number, before in replaced.items() if not received else ():
            signal.signal(number, before)


def _end_copy_of(process: int, number: int) -> None:
    """End this process if it is a copy: `process` has forked it, and it has not called exec yet.

    If the copy raised an exception, `process` would take it for an error of the program.
    """
    if os.getpid() != process:
        os._exit(128 + number)


def _replaced_by(error: BaseException) -> BaseException | None:
    """Return the signal's exception that an error replaced; None: it replaced none."""
    before = error.__context__
    while before is not None and not isinstance(before, (Terminated, KeyboardInterrupt)):
        before = before.__context__
    return before


def _end_if_ignored(
    show: Callable[[sys.UnraisableHookArgs], object], ignored: sys.UnraisableHookArgs
) -> None:
    """End this process if Python ignores the exception of a signal, and show any other.

    Python ignores exceptions in callbacks, such as those of a fork. A callback that was cut short
    may have left a lock behind, so nothing can be cleared up here.
    """
    exc = ignored.exc_value
    if isinstance(exc, KeyboardInterrupt):
        end_at_once(signal.SIGINT, None)
    if isinstance(exc, SystemExit) and exc.code == signal.SIGTERM:
        # Ray's handler raises it, which is in place while Ray starts.
        exc = Terminated(signal.SIGTERM, BEFORE_IT_RAN)
    if isinstance(exc, Terminated):
        exc.end_process()
    show(ignored)


def comes_again(number: int, frame: FrameType | None) -> bool:
    """Return whether a module is being imported; then the signal comes again in a moment.

    An exception that a handler raises there may be lost: C code of a module takes it for its own
    and reports another one, and callbacks of imports ignore it. `frame`: the innermost.
    """
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    if frame is None:
        return False
    # A handler must not wait for the locks of `threading`.
    _thread.start_new_thread(_send_again, (number,))
    return True


def _send_again(number: int) -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), number)


class Signals:
    """The requests that signals make of a sweep.

    Before the sweep runs, each signal ends the command at once (`Terminated`). This works even if
    the command waits in a library in which Python handles no signal: Ray does so while it waits
    for a head that the same signal has ended. After `defer`, Ctrl-C drains and a second one
    cancels. SIGTERM and SIGHUP (a closed terminal) cancel at once, since a kill soon follows them.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._is_deferred = False
        self._num_received = 0
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._has_ended = threading.Event()
        self._process = os.getpid()
        self.received: int | None = None
        # By the thread that watches: other handlers than ours may lose it.
        self._seen: int | None = None
        self._level = 0

    def __enter__(self) -> Signals:
        self.install()
        os.set_blocking(self._wake_read, True)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        number = self.received or self._seen
        if number is not None and not self._is_deferred:
            # The command is ending, and a second signal must not interrupt that.
            if isinstance(error, Exception) and not isinstance(error, typer.Exit):
                # It took the place of `Terminated` on its way.
                raise Terminated(number, BEFORE_IT_RAN) from error
            return
        signal.set_wakeup_fd(-1)
        os.close(self._wake_write)  # this ends the thread
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers, also once more after a library has installed its own."""
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup`
            before = signal.signal(number, self._receive)
            self._before.setdefault(number, before)

    def defer(self) -> None:
        """From now on the sweep itself asks whether to stop.

        Raises `Terminated` if a signal has come whose exception was lost.
        """
        number = self.received or self._seen
        if number is not None:
            raise Terminated(number, BEFORE_IT_RAN)
        self._is_deferred = True

    def asked(self) -> Stop:
        from orchestrator.sweep.progress import Stop

        return Stop(self._level)

    def _watch(self) -> None:
        """A thread that learns of a signal from the kernel; `_receive` needs Python to run."""
        while numbers := os.read(self._wake_read, 1):
            # Python may have handled the signal before this thread learns of it.
            if numbers[0] in SIGNALS and not self._is_deferred:
                self._seen = numbers[0]
                has_ended = self._has_ended.wait(UNHANDLED_SECONDS)
                if self._num_received:
                    has_ended = self._has_ended.wait(CLEARING_UP_SECONDS)
                if not has_ended and not self._is_deferred:
                    Terminated(numbers[0], BEFORE_IT_RAN).end_process()
        os.close(self._wake_read)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        _end_copy_of(self._process, number)
        is_raised = not self._is_deferred and not self._num_received
        if is_raised and comes_again(number, frame):
            return
        self._replace_closed_terminals()
        self.received = number
        self._num_received += 1
        if not self._is_deferred:
            self._level = 2
            if self._num_received == 1:
                raise Terminated(number, BEFORE_IT_RAN)
            # This process need not end running trials: the guard, the wardens or the next call do.
            if self._num_received > 2:
                os._exit(128 + number)
        elif number != signal.SIGINT or self._level:
            self._level = 2
            self._tell("Cancelling: what runs is ended, and the next `sweep run` does it again.")
        else:
            self._level = 1
            self._tell(
                "Stopping: no new trial is started, running trials may finish. Ctrl-C again to end"
                " them now."
            )

    def _tell(self, text: str) -> None:
        with suppress(OSError):
            self._say(text)

    def _replace_closed_terminals(self) -> None:
        """Write to /dev/null instead of a closed terminal, which would refuse every write."""
        for stream in self._terminals:
            if not os.isatty(stream.fileno()):
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)

"""Signals stop a command at once before its sweep runs; later the sweep decides how."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from layout_sweep.start import end_at_once
from orchestrator.cli.terminal.signals import (
    BEFORE_IT_RAN,
    SIGNALS,
    Signals,
    Terminated,
    terminable,
)
from orchestrator.cli.terminal.streams import OutputLost
from orchestrator.sweep.progress import Stop


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_before_a_sweep_runs_each_signal_ends_the_command_with_its_code(
    number: signal.Signals, code: int
) -> None:
    said: list[str] = []
    with pytest.raises(Terminated) as raised, Signals(said.append):
        signal.raise_signal(number)
    assert raised.value.exit_code == code
    assert str(raised.value).endswith("nothing is lost: the same command continues")
    assert said == []
    # A second one disturbs no clearing up.
    signal.raise_signal(number)


def test_once_it_runs_ctrl_c_drains_a_second_one_cancels_and_nothing_is_raised() -> None:
    said: list[str] = []
    with Signals(said.append) as signals:
        signals.defer()
        signal.raise_signal(signal.SIGINT)
        assert signals.asked() is Stop.DRAIN
        signal.raise_signal(signal.SIGINT)
        assert (signals.asked(), signals.received) == (Stop.CANCEL, signal.SIGINT)
    assert len(said) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_once_it_runs_a_sigterm_or_a_closed_terminal_cancels(number: signal.Signals) -> None:
    def refuse(_: str) -> None:
        raise OSError(5, "Input/output error")  # as a terminal that was closed

    with Signals(refuse) as signals:
        signals.defer()
        signal.raise_signal(number)
        assert (signals.asked(), signals.received) == (Stop.CANCEL, number)


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable(), Signals(lambda _: None) as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.received is None


def test_the_handlers_of_before_are_back_where_no_signal_came() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with terminable():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_ends_an_importing_command_at_once_is_replaced_while_the_command_runs() -> None:
    signal.signal(signal.SIGINT, end_at_once)
    signal.signal(signal.SIGTERM, end_at_once)
    with terminable():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    for number in SIGNALS:
        signal.signal(number, end_at_once)
    with terminable():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is end_at_once


# A module that takes an exception of a signal for its own, as C code does.
_SWALLOWS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.001)
except BaseException:
    pass
"""


@pytest.mark.parametrize(
    ("name", "raised"),
    [("SIGINT", KeyboardInterrupt), ("SIGTERM", Terminated), ("SIGHUP", Terminated)],
)
@pytest.mark.parametrize("is_before_a_sweep", [False, True])
def test_a_signal_during_an_import_is_raised_after_it(
    name: str,
    raised: type[BaseException],
    is_before_a_sweep: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "swallows.py").write_text(_SWALLOWS.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swallows", raising=False)
    for number in SIGNALS:
        signal.signal(number, end_at_once)
    with ExitStack() as stack:
        # Signals raises Terminated for Ctrl-C, too.
        stack.enter_context(pytest.raises(Terminated if is_before_a_sweep else raised))
        stack.enter_context(terminable())
        if is_before_a_sweep:
            stack.enter_context(Signals(lambda _: None))
        import_module("swallows")
        time.sleep(5.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_error_that_takes_the_place_of_a_signal_is_that_signal_again(
    number: signal.Signals,
) -> None:
    with pytest.raises(Terminated) as raised, Signals(lambda _: None):
        _replace_exception(number, ValueError("unexpected input"))
    assert raised.value.number == number
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_error_in_place_of_a_signal_is_that_signal_without_a_sweep_too(
    number: signal.Signals,
) -> None:
    signal.signal(number, end_at_once)
    with pytest.raises(Terminated) as raised, terminable():
        _replace_exception(number, OutputLost(OSError(5, "Input/output error")))
    assert raised.value.number == number


def _replace_exception(number: int, error: Exception) -> None:
    """Receive a signal, and raise another error instead, as C code does."""
    try:
        signal.raise_signal(number)
    except Terminated:
        raise error from None


def test_an_error_in_place_of_ctrl_c_is_ctrl_c_again() -> None:
    signal.signal(signal.SIGINT, end_at_once)
    with pytest.raises(KeyboardInterrupt), terminable():
        _fail_after(lambda: signal.raise_signal(signal.SIGINT), ValueError("unexpected input"))


def test_so_is_an_error_after_the_signals_of_a_sweep() -> None:
    def begin() -> None:
        with Signals(lambda _: None):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Terminated) as raised, terminable():
        _fail_after(begin, OSError(5, "Input/output error"))  # as a store that closes
    assert raised.value.number == signal.SIGTERM
    assert str(raised.value).endswith(BEFORE_IT_RAN)


def test_an_error_after_another_stays_as_it_is() -> None:
    def look_up() -> None:
        raise KeyError("a")

    with pytest.raises(ValueError, match="its own"), terminable():
        _fail_after(look_up, ValueError("its own"))


def _fail_after(call: Callable[[], None], error: Exception) -> NoReturn:
    """Make a call, and raise an error while it ends, as a library does that clears up."""
    try:
        call()
    finally:
        raise error


def test_a_sweep_whose_start_has_lost_a_signal_does_not_begin() -> None:
    with Signals(lambda _: None) as signals:
        with suppress(Terminated):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated) as raised:
            signals.defer()
    assert raised.value.exit_code == 143


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False
    )


# A command that gets a signal in a callback of a fork. Python ignores exceptions of callbacks.
_INTERRUPTED_CALLBACK = """
import os, signal
from layout_sweep.start import end_at_signals
from orchestrator.cli.terminal.signals import Signals, terminable
end_at_signals()
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.{name}))
with terminable():
    {context}
        if os.fork() == 0:
            os._exit(0)
print("went on")
"""


@pytest.mark.parametrize("context", ["with Signals(print):", "if True:"])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_whose_exception_python_ignores_ends_the_command_all_the_same(
    context: str, name: str, code: int
) -> None:
    command = _run(_INTERRUPTED_CALLBACK.format(name=name, context=context))
    assert (command.returncode, command.stdout) == (code, "")
    assert "interrupted" in command.stderr or name in command.stderr
    assert "ignored" not in command.stderr


# A command whose fork callback gets SIGTERM while Ray's handler is installed.
_RAYS_HANDLER = """
import os, signal, sys, time
from orchestrator.cli.terminal.signals import Signals, Terminated, terminable
def lose_in_a_callback():
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
    if os.fork() == 0:
        os._exit(0)
def lose_in_a_library():
    try:
        signal.raise_signal(signal.SIGTERM)
    except SystemExit:
        time.sleep(0.5)
try:
    with terminable(), Signals(print) as signals:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        {lose}()
        signals.defer()
        print("went on")
except Terminated as exc:
    sys.exit(exc.exit_code)
"""


@pytest.mark.parametrize("lose", ["lose_in_a_callback", "lose_in_a_library"])
def test_a_sigterm_that_rays_handler_received_and_lost_ends_the_start(lose: str) -> None:
    command = _run(_RAYS_HANDLER.format(lose=lose))
    assert (command.returncode, command.stdout) == (143, "")


# A copy of a command by a fork that a signal reaches before it runs another program.
_FORKED = """
import os, signal
from orchestrator.cli.terminal.signals import Signals, Terminated, terminable
with terminable():
    {context}
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Terminated:
                os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("context", ["with Signals(print):", "if True:"])
def test_a_signal_in_a_copy_that_runs_no_program_yet_ends_the_copy_alone(context: str) -> None:
    command = _run(_FORKED.format(context=context))
    assert (command.returncode, command.stdout) == (0, "143\n")


# A command whose start swallows a signal, as a callback of a library does, and then hangs.
_DEAF = """
import time
from orchestrator.cli.terminal.signals import Signals, Terminated
with Signals(print) as signals:
    heard = 0
    while True:
        try:
            if not heard:
                print("ready", flush=True)
            while signals._num_received == heard:
                time.sleep(0.01)
        except Terminated:
            pass
        heard = signals._num_received
        print(f"{heard} heard", flush=True)
"""

# A command that waits in a library, where Python handles no signal.
_WAITING = """
import ctypes
from orchestrator.cli.terminal.signals import Signals, Terminated
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
with Signals(print):
    try:
        print("ready", flush=True)
        library.pthread_mutex_lock(mutex)
    except Terminated as exc:
        raise SystemExit(exc.exit_code)
"""


def test_a_signal_ends_a_start_that_waits_in_a_library_for_ever() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", _WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.readline()
    time.sleep(0.5)  # until it waits
    command.send_signal(signal.SIGHUP)
    _, told = command.communicate(timeout=20.0)
    assert command.returncode == 129
    assert told == f"ended by SIGHUP; {BEFORE_IT_RAN}\n"


# A command that has lost a signal, and waits.
_HAS_LOST_IT = """
import time
from orchestrator.cli.terminal import signals
signals.UNHANDLED_SECONDS = signals.CLEARING_UP_SECONDS = 0.2
with signals.Signals(print):
    try:
        print("ready", flush=True)
        time.sleep(60.0)
    except signals.Terminated:
        time.sleep(60.0)
"""


def test_a_start_that_does_not_end_after_a_signal_is_ended() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", _HAS_LOST_IT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    command.stdout.readline()
    command.send_signal(signal.SIGTERM)
    _, told = command.communicate(timeout=20.0)
    assert (command.returncode, told) == (143, f"ended by SIGTERM; {BEFORE_IT_RAN}\n")


def test_a_third_signal_ends_a_start_that_swallows_the_first() -> None:
    command = subprocess.Popen([sys.executable, "-c", _DEAF], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    command.stdout.readline()
    for number in (1, 2):
        command.send_signal(signal.SIGTERM)
        assert command.stdout.readline() == f"{number} heard\n"
    command.send_signal(signal.SIGTERM)
    assert command.wait(10.0) == 143
    command.stdout.close()

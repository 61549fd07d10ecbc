"""Forks of a process that has imported everything: each is an orchestrator."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.core.errors import SweepError


def start(work: Callable[[], object]) -> int:
    """Begin something in a fork, and return its id. Exit code: 0, a SweepError's, or 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # The collector would have every page that holds an object copied: a fork of a test session
        # has half a million of them
        gc.freeze()
        _end_with(work)
    return pid


def wait(pid: int) -> int:
    """The exit code of a fork, or minus the signal that it died of."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def has_ended(pid: int) -> bool:
    """Return whether it has; it can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def outcome(work: Callable[[], object]) -> int:
    """Do something in a fork, to its end."""
    return wait(start(work))


@contextmanager
def running(work: Callable[[], object]) -> Iterator[int]:
    """A fork that is gone afterwards, whatever happened."""
    pid = start(work)
    try:
        yield pid
    finally:
        if not _is_reaped(pid):
            os.kill(pid, signal.SIGKILL)
            wait(pid)


def _is_reaped(pid: int) -> bool:
    try:
        has_ended(pid)
    except ChildProcessError:
        return True
    return False


def _end_with(work: Callable[[], object]) -> None:
    code = 1
    try:
        work()
        code = 0
    except SweepError as exc:
        code = exc.exit_code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()  # the fork ends here
    finally:
        sys.stderr.flush()
        os._exit(code)

"""A program that leaves as much behind as it can: `python stubborn.py EVIDENCE [KIND ...]`.

Each of its processes first writes its id and start time into EVIDENCE, and keeps that open: so it
is found without environment, name or parent. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

# end: leave the others behind; stop: stop itself; nothing: run for ever.
THEN_VARIABLE = "STUBBORN_THEN"

_evidence = -1
_NOTHING: dict[str, str] = {}


def _record(kind: str) -> None:
    with open("/proc/self/stat") as file:  # noqa: PTH123  a program of somebody else
        started = file.read().rpartition(")")[2].split()[19]
    os.write(_evidence, f"{kind} {os.getpid()} {started}\n".encode())


def _fork(kind: str, then: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            _record(kind)
            then()
        finally:
            os._exit(0)


def _sleep() -> None:
    while True:
        time.sleep(3600)


def _become(environment: Mapping[str, str]) -> None:
    """Another program, which holds the evidence open still."""
    os.set_inheritable(_evidence, True)
    os.execve("/bin/sleep", ["sleep", "3600"], dict(environment))


def _plain() -> None:
    _fork("plain", _sleep)


def _own_session() -> None:
    def then() -> None:
        os.setsid()
        _become(os.environ)

    _fork("own_session", then)


def _daemon(kind: str, environment: Mapping[str, str]) -> None:
    """Forked twice: its parent has ended when it begins."""

    def again() -> None:
        os.setsid()
        _fork(kind, lambda: _become(environment))

    _fork(kind, again)


def _loader() -> None:
    """Workers like a data loader's, waiting at a pipe that their parent and siblings have open."""
    reader, _ = os.pipe()
    for _ in range(2):
        _fork("loader", lambda: (os.read(reader, 1), None)[1])


def _stopped() -> None:
    def then() -> None:
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)
        _sleep()

    _fork("stopped", then)


def _deaf() -> None:
    def then() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        _sleep()

    _fork("deaf", then)


def _restless() -> None:
    """A daemon without an environment that replaces itself every few milliseconds."""

    def then() -> None:
        os.setsid()
        while True:
            if os.fork() > 0:
                os._exit(0)
            _record("restless")
            time.sleep(0.02)

    _fork("restless", then)


KINDS: Mapping[str, Callable[[], None]] = {
    "plain": _plain,
    "own_session": _own_session,
    "double_fork": lambda: _daemon("double_fork", os.environ),
    "emptied": lambda: _daemon("emptied", _NOTHING),
    "loader": _loader,
    "stopped": _stopped,
    "deaf": _deaf,
    "restless": _restless,
}


def main() -> None:
    global _evidence
    _evidence = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _record("program")
    for kind in sys.argv[2:] or KINDS:
        KINDS[kind]()
    then = os.environ.get(THEN_VARIABLE)
    # With all steps it would be ended soon.
    num_steps = int(os.environ["SWEEP_NUM_STEPS"]) if then == "end" else 1
    # A program unlike ours.
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:  # noqa: PTH123
        for step in range(num_steps):
            file.write(json.dumps({"step_seconds": 0.001 + step / 1e6}) + "\n")
    match then:
        case "end":
            time.sleep(0.05)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            _sleep()


if __name__ == "__main__":
    main()

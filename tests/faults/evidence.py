"""What processes of a program of workload `command` (stubborn.py) leave: who of them is alive.

It knows nothing of campaigns, so that a launcher that is to be killed is up at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.node.processes import start_time
from tests.faults import stubborn

EVIDENCE = "evidence"  # a file in each attempt's folder
_PROGRAM = [sys.executable, "-I", "-S", stubborn.__file__]


def options(then: str) -> dict[str, object]:
    """Options of workload command."""
    return {"argv": [*_PROGRAM, f"{{run_dir}}/{EVIDENCE}"], "env": {stubborn.THEN_VARIABLE: then}}


def alive(evidence: Iterable[Path]) -> list[str]:
    """The living processes that wrote their id into a file, or have it open: KIND ID."""
    files = set(evidence)
    found = {}
    for file in files:
        with suppress(OSError):
            for line in file.read_text().splitlines():
                kind, pid, started = line.split()
                if str(start_time(int(pid))) == started:
                    found[int(pid)] = kind
    names = {str(file) for file in files}
    for process in Path("/proc").iterdir():
        if (
            process.name.isdigit()
            and int(process.name) not in found
            and names.intersection(_open_files(process))
        ):
            found[int(process.name)] = "unknown"
    return [f"{kind} {pid}" for pid, kind in sorted(found.items())]


def _open_files(process: Path) -> list[str]:
    found = []
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                found.append(str(link.readlink()))
    return found


def alive_within(seconds: float, evidence: Sequence[Path]) -> list[str]:
    """Return what is still alive after so many seconds; earlier, once nothing is."""
    until = time.monotonic() + seconds
    while (found := alive(evidence)) and time.monotonic() < until:
        time.sleep(0.02)
    return found

"""Describes the machine that a result was measured on: hardware, software, load and code.

Every result contains it; numbers of two machines are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from orchestrator.sweep.provenance import code_fingerprint

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("ray", "optuna", "sqlalchemy", "numpy", "pydantic", "torch")
_FOLDERS = ("--tables", "--warm", "--folder", "--before", "--after")  # options that take a folder
# Load average of the last minute before the benchmark starts. Above it the cores were shared, and
# times are upper bounds.
BUSY_LOAD = 1.0


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark with this docstring. It has `--out`."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the result and the machine here, as JSON")
    return parser


def describe_machine() -> dict[str, Any]:
    """Call this before anything is measured, so that the load is that of other programs."""
    code = code_fingerprint(PROJECT)
    load = os.getloadavg()[0]
    return {
        "date": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "git_sha": code.git_sha,
        "dirty_diff_digest": code.dirty_diff_digest,
        "load_before": round(load, 2),
        "busy": load > BUSY_LOAD,
    }


def write_result(
    path: Path | None, *, benchmark: str, machine: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Write a benchmark's result and its command; None: write nothing.

    The command has `DIR` for a folder of tables, because that path exists on this machine only.
    """
    if path is None:
        return
    command = " ".join(["python", "-m", f"benchmarks.{benchmark}", *_portable(sys.argv[1:])])
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"benchmark": benchmark, "command": command, "machine": dict(machine), **result}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _portable(arguments: Sequence[str]) -> Iterator[str]:
    previous = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if previous in _FOLDERS and Path(argument).is_dir():
            yield "DIR"
        elif equals and name in _FOLDERS and Path(value).is_dir():
            yield f"{name}=DIR"
        else:
            yield shlex.quote(_from_the_project(argument))
        previous = argument


def _from_the_project(argument: str) -> str:
    """A path relative to the project, so that no folder of this machine appears."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else "FILE"


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

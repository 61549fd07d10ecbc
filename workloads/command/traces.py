"""A profile of a user's program: it writes Chrome traces, and this splits the one of its rank.

The program is told the folder in SWEEP_PROFILE_DIR. With torch.profiler:

    profiler = profile(
        schedule=schedule(wait=5, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank-0.json"),
    )
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.core.trial.group_axis import single_axis
from orchestrator.core.trial.protocol import BadResult, Phase, RankResult
from orchestrator.core.trial.rank_profile import RankProfile
from orchestrator.core.trial.trace_events import BadTrace, read_trace
from orchestrator.core.trial.trace_split import split
from workloads.command.program import Program, reporting_rank
from workloads.command.stop import ask_to_end, wait_for_end
from workloads.rank import Rank

_HEARTBEAT_SECONDS = 1.0
# How long a program may go on once it has begun to write a trace. A large one takes half a minute.
PATIENCE_SECONDS = 60.0
# A trace of a few steps has some hundred megabytes at most.
_MOST_BYTES = 4 << 30


def follow_profiled(program: Program, rank: Rank) -> int:
    """Wait for the program's end, and report the profile of its trace. Returns the exit code.

    A program that runs on long after it has written its trace is ended.
    """
    folder, place = program.place.trace_folder, program.place
    written_at: float | None = None
    is_ended = False
    while (code := _code_within(program.process)) is None:
        rank.heartbeat(Phase.STEADY)
        if written_at is None and any(folder.rglob("*.json*")):
            written_at = time.monotonic()
        if written_at is not None and time.monotonic() - written_at > PATIENCE_SECONDS:
            ask_to_end(place.stop_file)
            wait_for_end(program.process, [], meanwhile=lambda: None)
            is_ended = True
            break
    if code:
        return code
    path, found = _trace_of(folder, rank.rank)
    if path is None:
        if rank.rank == reporting_rank(rank):
            _refuse(rank, f"the program wrote no trace into SWEEP_PROFILE_DIR ({folder})")
        else:
            rank.heartbeat(Phase.TEARDOWN)  # the profile is another rank's
        return 0
    try:
        trace = read_trace(found)
    except BadTrace as exc:
        _refuse(rank, f"{path.name}: {exc}")
        return 0
    profile = RankProfile.of(
        split(trace, single_axis=single_axis(rank.request.layout)), trace_path=str(path)
    )
    step_seconds = max(profile.step_seconds, 1e-9)
    result = RankResult(step_seconds=[step_seconds] * profile.num_steps, profile=profile)
    rank.finish(result, enough=is_ended)
    return 0


def _trace_of(folder: Path, rank: int) -> tuple[Path | None, Any]:
    """The trace of this rank, with its content; if no trace names its rank, the first by name."""
    first: tuple[Path | None, Any] = None, None
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.json.gz")]):
        content = _content(path)
        if content is None:
            continue
        info = content.get("distributedInfo")
        if isinstance(info, dict) and info.get("rank") == rank:
            return path, content
        if first[0] is None:
            first = path, content
    return first


def _content(path: Path) -> dict[str, Any] | None:
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, EOFError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "traceEvents" in found else None


def _refuse(rank: Rank, reason: str) -> None:
    sys.stderr.write(f"{reason}\n")
    rank.refuse(BadResult(reason))


def _code_within(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_HEARTBEAT_SECONDS)
    except subprocess.TimeoutExpired:
        return None

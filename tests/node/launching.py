"""Orders for launchers in tests, and a way to prove that what they started is gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from orchestrator.node.processes import LAUNCHER_VARIABLE, descendants, start_time

LIMITS = {
    "start": 30.0,
    "rendezvous": 30.0,
    "first_step": 30.0,
    "steady": 30.0,
    "teardown": 30.0,
    "total": 60.0,
}

_SYNTHETIC = "workloads.synthetic"


def order(
    program: str = _SYNTHETIC,
    *,
    trial_id: int = 1,
    attempt: int = 1,
    world_size: int = 2,
    options: dict[str, Any] | None = None,
    limits: dict[str, float] | None = None,
    one_rank_per_node: bool = False,
    **launch: Any,
) -> LaunchOrder:
    request = TrialRequest(
        sweep="test",
        trial_id=trial_id,
        attempt=attempt,
        workload=program.rpartition(".")[2],
        options=options or {},
        model=PRESETS["llama-tiny"],
        sequence_length=128,
        layout=Layout(data_parallel_size=world_size),
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=5, max_steps=8, relative_confidence=0.02
        ),
        limits=PhaseLimits(**(LIMITS | (limits or {}))),
        seed=7,
        one_rank_per_node=one_rank_per_node,
    )
    return LaunchOrder(
        **({"request": request, "program": program, "local_world_size": world_size} | launch)
    )


def faulty(
    fault: str, *, at: str = "forward", rank: int | None = None, **known: Any
) -> dict[str, Any]:
    """Options of the synthetic workload."""
    return {"faults": [{"fault": fault, "at": at, "rank": rank} | known]}


def tree_of(root: object) -> list[int]:
    """The processes of a launcher in this process, with this root: wardens, server, ranks and
    below.
    """
    warden = next((pid for pid in descendants(os.getpid()) if _carries_tag(pid, root)), None)
    return [warden, *descendants(warden)] if warden is not None else []


def with_start_times(pids: Iterable[int]) -> dict[int, int | None]:
    """Names that stay right when ids are used again."""
    return {pid: start_time(pid) for pid in pids}


def survivors(
    seen: Iterable[tuple[int, int | None]], *, root: object, patience_seconds: float = 5.0
) -> list[int]:
    """The living of these processes, and of all with the tag of this root, after some time."""
    deadline = time.monotonic() + patience_seconds
    seen = list(seen)
    while True:
        left = {pid for pid, start in seen if start is not None and start_time(pid) == start}
        left |= {
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and _carries_tag(int(path.name), root)
        }
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.02)


def _carries_tag(pid: int, root: object) -> bool:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(
        entry.startswith(f"{LAUNCHER_VARIABLE}=".encode()) and entry.endswith(f":{root}".encode())
        for entry in entries
    )

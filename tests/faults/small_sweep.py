"""A sweep of twelve trials with every kind of end, on a scheduler that follows a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from orchestrator.cluster.contract import Scheduler
from orchestrator.core.problem.layout import RecomputeMode
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep.progress import SweepResult
from orchestrator.sweep.run import run_sweep
from tests.faults.witness import WitnessedStore, witnessed
from tests.sweep.fake_scheduler import FakeScheduler

NAME = "small"
NUM_TRIALS = 12
CODE = Fingerprint(orchestrator_version="test")


def spec(**changes: Any) -> SweepSpec:
    """Two cells of six layouts."""
    return SweepSpec.model_validate(
        {
            "name": NAME,
            "model": "llama-tiny",
            "sequence_length": 64,
            "global_batch_size": 8,
            "precision": "fp32",
            "gpus": [1, 2],
            "axes": {"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]},
            "search": {"strategy": "exhaustive", "confirm": {"repeats": 1}},
        }
        | changes
    )


def ending(request: TrialRequest) -> float | FailureKind:
    """Seconds of a step that every layout gives again, or how it fails."""
    layout = request.layout
    keeps_all = layout.recompute.mode is RecomputeMode.NONE
    match layout.micro_batch_size, keeps_all:
        case (2 | 4, True):
            return FailureKind.OOM_GPU
        case 1, False:
            return FailureKind.NODE_LOST if request.attempt == 1 else 2.0 / layout.world_size
        case 2, False:
            return FailureKind.USER_ERROR
        case _:
            return 1.0 / layout.micro_batch_size / layout.world_size


def run(
    store: WitnessedStore,
    *,
    of: SweepSpec | None = None,
    open_scheduler: Callable[[], Scheduler] | None = None,
    **options: Any,
) -> SweepResult:
    """Work on it until all is known, as the same command does after whatever happened before."""

    def opened() -> Scheduler:
        return witnessed(
            open_scheduler()
            if open_scheduler is not None
            else FakeScheduler(ending, slots=3, device=Device.CUDA),
            store.log,
        )

    own = {"code": CODE, "hardware": lambda _: None, "clock": time.monotonic}
    return run_sweep(of or spec(), store=store, open_scheduler=opened, **own | options)

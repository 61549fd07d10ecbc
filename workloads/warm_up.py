"""Runs a rank once in the process that forks ranks, so that forks share what a first use sets up.

For `warm_up` of a workload.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.protocol import (
    Device,
    MeasurementPlan,
    PhaseLimits,
    RankResult,
    TrialRequest,
    decode_request,
    encode,
)
from workloads.rank import Rank


def run_once(main: Callable[[Rank], RankResult], workload: str) -> None:
    """Run the only rank of a small layout, and forget its result. It is in no process group."""
    request = TrialRequest(
        sweep="warm-up",
        trial_id=1,
        attempt=1,
        workload=workload,
        model=PRESETS["llama-tiny"],
        sequence_length=64,
        layout=Layout(),
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=2, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60.0, rendezvous=60.0, first_step=60.0, steady=60.0, teardown=60.0, total=60.0
        ),
        seed=0,
    )
    # tempfile.gettempdir() keeps its first answer, and a forked rank may have another TMPDIR.
    parent = os.environ.get("TMPDIR")
    if not parent or not Path(parent).is_dir():
        parent = "/tmp"
    with TemporaryDirectory(prefix="sweep-warm-up-", dir=parent) as folder:
        rank = Rank(
            request=decode_request(encode(request)),
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            run_dir=Path(folder),
        )
        try:
            result = main(rank)
            if not rank.finished:
                rank.finish(result)
        finally:
            rank.close()

"""A sweep of sixteen trials with every write about nodes, repeats and a spool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from orchestrator.cluster.contract import Finished, SchedulerEvent
from orchestrator.sweep.spool import FOLDER, Spool, Spooled
from tests.core.machines.test_node_health import node
from tests.faults import small_sweep
from tests.faults.crash_points import Play
from tests.faults.witness import WitnessedStore
from tests.sweep.test_node_pool import H100, ProbedScheduler, physics

OF = small_sweep.spec(
    gpus=[1],
    precision="bf16",
    global_batch_size=64,
    axes={
        "micro_batch_size": [1, 2, 4, 8],
        "recompute": ["none", "full", "selective_ops", "selective_attention"],
    },
)


class SlowNode(ProbedScheduler):
    """One of four nodes never answers, and another takes half as long again for everything."""

    def __init__(self) -> None:
        super().__init__(
            physics(lambda: self, {"n1": 0.5}),
            {"n3": "no answer", **{f"n{i}": node(f"n{i}") for i in range(3)}},
        )


class DiesWithAnEnd(SlowNode):
    """Its orchestrator dies with the first attempt that ends, once that is in the spool."""

    def __init__(self, spool: Spool) -> None:
        super().__init__()
        self._spool = spool

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        for event in super().poll(timeout_seconds):
            if isinstance(event, Finished):
                self._spool.keep(Spooled(attempt=1, end=event))
                os._exit(0)
        return []


def _die_with_an_end(store: WitnessedStore, runs: Path) -> None:
    _run(store, runs, scheduler=lambda: DiesWithAnEnd(Spool(runs / FOLDER)))


def _run(
    store: WitnessedStore, runs: Path, *, scheduler: Callable[[], SlowNode] = SlowNode
) -> None:
    small_sweep.run(
        store, of=OF, open_scheduler=scheduler, hardware=lambda _: H100, run_root=lambda _: runs
    )


AMONG_FAULTY_NODES = Play(
    of=OF,
    num_trials=16,
    before=_die_with_an_end,
    run=_run,
    within=("record_node_checks", "bench", "remeasure"),
    # Its first call writes what was in the spool. The others are those of every sweep.
    within_first_call=("record_ends",),
)

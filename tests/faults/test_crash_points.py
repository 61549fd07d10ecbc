"""An orchestrator that dies at any one of its statements: the same command goes on, and nothing is lost, doubled or stuck."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.gang import Finished, SchedulerEvent
from orchestrator.spool import FOLDER, Spool, Spooled
from tests.core.test_node_health import node
from tests.faults import small_sweep
from tests.faults.crash_points import Fresh, Play, die_everywhere, small_play
from tests.faults.witness import WitnessedStore
from tests.orchestrator.test_node_health import H100, ProbedScheduler, physics

pytestmark = pytest.mark.timeout(600)  # a quarter of a minute where nobody else uses the cores

# Four layouts in which every ending occurs once: measured, measured at the second attempt, failed, out of memory.
FOUR = small_sweep.spec(gpus=[1], axes={"micro_batch_size": [1, 2], "recompute": ["none", "full"]})
NUM_TRIALS = 4


def test_a_death_at_any_statement_loses_nothing_and_doubles_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """`make chaos` dies in all of twelve trials."""
    deaths = die_everywhere(small_play(FOUR, num_trials=NUM_TRIALS), fresh=fresh, folder=tmp_path)
    print(f"{deaths.num_points} points, {deaths.num_acknowledged} results acknowledged before a death")
    assert deaths.complaints == []
    assert deaths.num_points > 120  # of 4 launched trials, a retry and a repeat, with 20 statements and more each
    assert deaths.num_acknowledged > deaths.num_points  # otherwise nothing could have been lost


def test_a_death_in_the_middle_of_what_is_written_of_nodes_or_taken_from_a_spool_loses_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """One of its nodes never answers, one is slow and gets benched, and an earlier orchestrator died with an end in its spool."""
    deaths = die_everywhere(AMONG_SICK_NODES, fresh=fresh, folder=tmp_path)
    print(f"{deaths.num_points} points: {dict(deaths.within)}")
    assert deaths.complaints == []
    assert set(deaths.within) == set(AMONG_SICK_NODES.within), "each of them was died in"
    assert min(deaths.within.values()) >= 3  # a statement, and its commit before and after


OF = small_sweep.spec(
    gpus=[1],
    precision="bf16",
    global_batch_size=64,
    axes={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "full", "selective_ops", "selective_attention"]},
)


class SlowNode(ProbedScheduler):
    """Of four nodes one never answers, and one takes half as long again for everything."""

    def __init__(self) -> None:
        super().__init__(physics(lambda: self, {"n1": 0.5}), {"n3": "no answer", **{f"n{i}": node(f"n{i}") for i in range(3)}})


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


def _run(store: WitnessedStore, runs: Path, *, scheduler: Callable[[], SlowNode] = SlowNode) -> None:
    small_sweep.run(store, of=OF, open_scheduler=scheduler, hardware=lambda _: H100, run_root=lambda _: runs)


AMONG_SICK_NODES = Play(
    of=OF,
    num_trials=16,
    before=_die_with_an_end,
    run=_run,
    within=("record_node_checks", "bench", "remeasure", "record_measurement"),  # the last is what a spool is taken up by
)

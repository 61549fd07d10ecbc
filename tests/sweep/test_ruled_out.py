"""What a sweep concludes from layouts that run out of memory, whose memory is known and whose is
not; live and after a restart.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from db.store import Store
from orchestrator.cluster.simulated import simulated
from orchestrator.core.problem.layout import RecomputeMode
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.failure_kinds import FailureKind, MemoryShortage
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.sweep.progress import StopReason
from tests.sweep.fake_scheduler import MEMORY, FakeScheduler
from tests.sweep.test_loop import fast, run, spec

COMMAND = {"name": "command", "options": {"argv": ["train"]}}


@pytest.fixture
def store(sqlite_store: Store) -> Store:
    return sqlite_store


def rows(store: Store) -> dict[str, tuple[TrialState, str | None]]:
    """The state of each trial, and why, by recomputation and micro-batch."""
    trials = store.trials(store.sweep_named("t").id)
    return {
        f"{trial.layout.recompute} {trial.layout.micro_batch_size}": (trial.state, trial.why)
        for trial in trials
    }


def states(store: Store) -> dict[str, TrialState]:
    return {name: state for name, (state, _) in rows(store).items()}


def smallest_first(**changes: Any) -> SweepSpec:
    return spec(gpus=1, search={"strategy": "exhaustive", **changes.pop("search", {})}, **changes)


def a_bug_of_full(request: TrialRequest) -> float | FailureKind:
    is_full = request.layout.recompute.mode is RecomputeMode.FULL
    return (
        FailureKind.OOM_GPU if is_full and request.layout.micro_batch_size == 1 else fast(request)
    )


def too_large(request: TrialRequest) -> float | FailureKind:
    return FailureKind.OOM_GPU if request.layout.micro_batch_size > 1 else fast(request)


def test_one_mistake_of_a_foreign_program_rules_out_nothing(store: Store) -> None:
    run(store, a_bug_of_full, spec=smallest_first(workload=COMMAND))
    assert Counter(states(store).values()) == {TrialState.MEASURED: 5, TrialState.OUT_OF_MEMORY: 1}


def test_two_that_agree_do_and_both_are_named(store: Store) -> None:
    def only_the_smallest_runs(request: TrialRequest) -> float | FailureKind:
        return FailureKind.OOM_GPU if request.layout.micro_batch_size > 1 else fast(request)

    axes = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none"]}
    # Asks for 4, 2, 1 and 8.
    random = {"strategy": "random", "seed": 6}
    run(
        store,
        only_the_smallest_runs,
        spec=spec(gpus=1, workload=COMMAND, global_batch_size=16, axes=axes, search=random),
    )
    state, why = rows(store)["none 8"]
    ids = {
        trial.layout.micro_batch_size: trial.id for trial in store.trials(store.sweep_named("t").id)
    }
    assert state is TrialState.PRUNED
    assert why is not None
    assert why.startswith("needs at least the memory of trials ")
    assert f"{ids[2]} (" in why
    assert f"{ids[4]} (" in why
    assert why.endswith("search.dominance is confirmed")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workload": COMMAND}, Dominance.CONFIRMED),
        ({"workload": COMMAND, "trainer": "megatron"}, Dominance.TRUSTED),
        ({"workload": COMMAND, "search": {"dominance": "trusted"}}, Dominance.TRUSTED),
        ({"workload": COMMAND, "search": {"dominance": "off"}}, Dominance.OFF),
        ({}, Dominance.TRUSTED),
        ({"workload": {"name": "synthetic"}}, Dominance.TRUSTED),
        ({"search": {"dominance": "confirmed"}}, Dominance.CONFIRMED),
        (
            {"workload": {"name": "replay", "options": {"table": "t.csv", "table_id": "t"}}},
            Dominance.CONFIRMED,
        ),
    ],
)
def test_whose_memory_is_known_decides_unless_the_file_does(
    changes: dict[str, Any], expected: Dominance
) -> None:
    assert spec(**changes).dominance is expected


def test_a_simulation_concludes_what_the_real_sweep_does() -> None:
    for changes in ({"workload": COMMAND}, {}, {"search": {"dominance": "off"}}):
        real = spec(device="h100-sxm", precision="bf16", **changes)
        assert simulated(real).dominance is real.dominance


def test_a_file_that_does_not_ask_reads_as_before() -> None:
    assert "dominance" not in spec().model_dump_json()
    assert (
        SweepSpec.model_validate_json(spec(search={"dominance": "off"}).model_dump_json()).dominance
        is Dominance.OFF
    )


def test_what_is_ruled_out_says_by_which_rule(store: Store) -> None:
    run(store, too_large, spec=smallest_first(search={"strategy": "random", "seed": 2}))
    why = [why for state, why in rows(store).values() if state is TrialState.PRUNED]
    assert why
    assert all(
        one is not None and one.endswith("which ran out of it; search.dominance is trusted")
        for one in why
    )


def both_ways(request: TrialRequest) -> float | FailureKind:
    """Ours, and yet: with recomputation it runs out of memory where without it runs."""
    return (
        FailureKind.OOM_GPU
        if request.layout.recompute.mode is RecomputeMode.FULL
        else fast(request)
    )


def test_a_run_that_contradicts_a_proof_frees_what_it_ruled_out(store: Store) -> None:
    """Two at once: while `full` runs out of memory, `none` with a micro-batch as large is under
    way, and runs.
    """
    scheduler = FakeScheduler(both_ways, slots=6)
    wanted = spec(gpus=1, search={"strategy": "random", "seed": 5, "max_parallel_trials": 3})
    result, _ = run(store, both_ways, spec=wanted, scheduler=scheduler)
    found = states(store)
    assert {name for name, state in found.items() if state is TrialState.MEASURED} == {
        "none 1",
        "none 2",
        "none 4",
    }
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert not [name for name, state in found.items() if state is TrialState.QUEUED]


def test_a_restart_concludes_the_same_from_what_the_store_holds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An out-of-memory that proves nothing live proves nothing after a restart either."""
    monkeypatch.setitem(MEMORY, FailureKind.OOM_GPU, MemoryShortage())
    run(
        store,
        a_bug_of_full,
        spec=smallest_first(search={"max_trials": 4, "strategy": "random", "seed": 1}),
    )
    assert TrialState.OUT_OF_MEMORY in states(store).values()
    run(store, fast, spec=smallest_first(search={"strategy": "random", "seed": 1}))
    assert TrialState.PRUNED not in states(store).values()


def test_another_rule_takes_effect_at_the_next_call(store: Store) -> None:
    few = {"strategy": "random", "seed": 2}
    run(store, too_large, spec=smallest_first(search=few))
    ruled_out = {name for name, state in states(store).items() if state is TrialState.PRUNED}
    assert ruled_out
    result, _ = run(store, too_large, spec=smallest_first(search={"dominance": "off"}))
    assert Counter(states(store).values()) == {TrialState.MEASURED: 2, TrialState.OUT_OF_MEMORY: 4}
    assert result.counts == {TrialState.MEASURED: 2, TrialState.OUT_OF_MEMORY: 4} | {
        state: 0
        for state in result.counts
        if state not in (TrialState.MEASURED, TrialState.OUT_OF_MEMORY)
    }


def test_exhaustive_stops_at_no_plateau_and_says_so(store: Store) -> None:
    wanted = smallest_first(search={"plateau": {"trials": 1, "gain": 0.5}})
    result, scheduler = run(store, fast, spec=wanted)
    assert len(scheduler.started) == 6
    assert set(result.stopped.values()) == {StopReason.EXHAUSTED}
    assert wanted.remarks() == (
        "search.plateau is ignored: strategy exhaustive measures every layout;"
        " leave one of the two out",
    )
    assert spec(search={"plateau": {"trials": 1, "gain": 0.5}}).remarks() == ()

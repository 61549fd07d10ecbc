"""The parts of an attempt's reserved time add up to it, whatever its ranks report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import Phase, ProgramSeen, RankResult
from orchestrator.core.trial.reserved_time import (
    Outcome,
    ReservedGpuSeconds,
    of_attempt,
    outcome_of,
    step_seconds_within,
)

SECONDS = st.floats(1e-3, 1e5)


def result(step_seconds: list[float], warmup_seconds: list[float] | None = None) -> RankResult:
    return RankResult(step_seconds=step_seconds, warmup_seconds=warmup_seconds or [])


@given(
    reserved_seconds=st.floats(0, 1e5),
    num_gpus=st.integers(1, 512),
    timed=st.lists(SECONDS, min_size=1, max_size=20),
    warmup=st.lists(SECONDS, max_size=5),
    first_step=st.none() | SECONDS,
    outcome=st.sampled_from(Outcome),
)
def test_the_parts_add_up_to_what_was_held_and_none_is_negative(
    reserved_seconds: float,
    num_gpus: int,
    timed: list[float],
    warmup: list[float],
    first_step: float | None,
    outcome: Outcome,
) -> None:
    phases = {} if first_step is None else {Phase.FIRST_STEP: first_step}
    timed_seconds, warmup_seconds = step_seconds_within(
        reserved_seconds, timed=timed, results=[result(timed, warmup)] * 2, phases=phases
    )
    gpu_seconds = reserved_seconds * num_gpus
    found = of_attempt(
        gpu_seconds,
        num_gpus=num_gpus,
        outcome=outcome,
        timed_seconds=timed_seconds,
        warmup_seconds=warmup_seconds,
    )
    assert found.reserved == pytest.approx(gpu_seconds, rel=1e-9, abs=1e-9)
    # Rounding of a product and its factors.
    assert min(found.parts.values()) >= -1e-9 * gpu_seconds


def test_a_sample_that_stands_for_several_steps_counts_for_each_of_them() -> None:
    seen = ProgramSeen(seconds=60.0, every=10)
    told = result([0.5] * 4, [0.5]).model_copy(update={"seen": seen})
    memory = RankResult(step_seconds=[])  # of another rank
    assert step_seconds_within(60.0, timed=[0.5] * 4, results=[told, memory], phases={}) == (
        20.0,
        5.0,
    )


def test_timed_steps_are_useful_those_before_them_warmup_and_the_rest_startup() -> None:
    # Slowest rank of each step: 1 + 2 timed, 3 + 1 before; 10 s held by 4 GPUs.
    timed, warmup = step_seconds_within(
        10.0,
        timed=[1.0, 2.0],
        results=[result([1.0], [3.0, 0.5]), result([2.0], [2.0, 1.0])],
        phases={},
    )
    found = of_attempt(
        40.0, num_gpus=4, outcome=Outcome.COUNTS, timed_seconds=timed, warmup_seconds=warmup
    )
    assert (found.useful, found.warmup, found.startup) == (12.0, 16.0, 12.0)


def test_a_program_that_times_no_warmup_has_its_first_step_for_it_or_nothing() -> None:
    assert step_seconds_within(
        10.0, timed=[1.0], results=[result([1.0])], phases={Phase.FIRST_STEP: 2.5}
    ) == (1.0, 2.5)
    assert step_seconds_within(10.0, timed=[1.0], results=[result([1.0])], phases={}) == (1.0, None)


def test_ranks_that_timed_different_numbers_of_warmup_steps_tell_nothing_of_them() -> None:
    assert step_seconds_within(
        10.0, timed=[1.0], results=[result([1.0], [1.0]), result([1.0], [1.0, 1.0])], phases={}
    ) == (1.0, None)


@pytest.mark.parametrize("kind", [None, *FailureKind])
def test_a_measurement_that_counts_is_a_success_whatever_else_was_noted(
    kind: FailureKind | None,
) -> None:
    assert outcome_of(kind, counts=True) is Outcome.COUNTS


def test_out_of_memories_and_losses_are_told_from_other_failures() -> None:
    outcomes = {kind: outcome_of(kind, counts=False) for kind in FailureKind}
    assert {kind for kind, found in outcomes.items() if found is Outcome.OUT_OF_MEMORY} == {
        FailureKind.OOM_GPU,
        FailureKind.OOM_HOST,
    }
    assert {kind for kind, found in outcomes.items() if found is Outcome.LOST} == {
        FailureKind.NODE_LOST,
        FailureKind.ORCHESTRATOR_LOST,
        FailureKind.PREEMPTED,
    }
    assert outcome_of(None, counts=False) is Outcome.FAILED  # measured, and invalidated since


def test_all_that_is_reserved_costs_its_price() -> None:
    found = ReservedGpuSeconds(useful=1800.0, failed=3600.0, idle=1800.0)
    assert found.dollars(2.5) == 5.0


def test_sums_keep_each_part_apart() -> None:
    found = ReservedGpuSeconds(useful=1.0, idle=2.0) + ReservedGpuSeconds(useful=3.0, lost=4.0)
    assert found == ReservedGpuSeconds(useful=4.0, idle=2.0, lost=4.0)
    assert found.reserved == 10.0


def test_what_somebody_ended_did_not_fail() -> None:
    assert outcome_of(FailureKind.CANCELLED, counts=False) is Outcome.CANCELLED
    found = of_attempt(
        8.0, num_gpus=2, outcome=Outcome.CANCELLED, timed_seconds=None, warmup_seconds=None
    )
    assert (found.cancelled, found.failed, found.reserved) == (8.0, 0.0, 8.0)

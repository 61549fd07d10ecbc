"""The budget that another attempt would exceed, by what a sweep has spent and what runs."""

from __future__ import annotations

import pytest

from orchestrator.core.sweepfile.budget import Budget, Limit
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.sweep.progress import StopReason
from orchestrator.sweep.spending import Spending

HOUR = 3600.0


class World:
    """What a call has reserved, and its clock."""

    def __init__(self, *, reserved: float = 0.0, now: float = 100.0) -> None:
        self.reserved, self.now = reserved, now

    def spending(
        self,
        *,
        gpu_seconds: float | None = None,
        limit: Limit = Limit.GPU_HOURS,
        wall: float | None = None,
        earlier: float = 0.0,
    ) -> Spending:
        return Spending(
            None if gpu_seconds is None else Budget(gpu_seconds=gpu_seconds, limit=limit),
            max_wall_seconds=wall,
            earlier_gpu_seconds=earlier,
            leased=lambda: Leased(reserved=self.reserved, idle=0.0, capacity=None),
            clock=lambda: self.now,
            began=100.0,
        )


def test_without_budgets_nothing_is_ever_spent() -> None:
    world = World(reserved=1e12, now=1e12)
    free = world.spending()
    assert (free.spent(), free.passed_by(1e12, to_come=0.0), free.out_of_time(1e12)) == (None,) * 3
    assert (free.gpu_seconds_left, free.wall_seconds_left) == (None, None)
    assert not free.is_limited
    assert not free.is_shared


def test_what_earlier_calls_reserved_counts_and_is_spent_at_the_limit() -> None:
    world = World(reserved=39.0)
    both = world.spending(gpu_seconds=100.0, earlier=60.0)
    assert both.reserved_gpu_seconds == 99.0
    assert both.gpu_seconds_left == 1.0
    assert both.spent() is None
    world.reserved = 40.0
    assert both.spent() is StopReason.GPU_HOURS
    world.reserved = 55.0
    assert both.gpu_seconds_left == 0.0


@pytest.mark.parametrize(
    ("expected", "to_come", "is_passed"),
    [
        (30.0, 0.0, False),  # all that is left
        (30.5, 0.0, True),
        (20.0, 10.0, False),  # together with what runs
        (20.0, 10.5, True),
    ],
)
@pytest.mark.parametrize(
    ("limit", "reason"),
    [(Limit.GPU_HOURS, StopReason.GPU_HOURS), (Limit.COST, StopReason.COST)],
)
def test_an_attempt_has_to_fit_next_to_what_is_under_way(
    limit: Limit, reason: StopReason, expected: float, to_come: float, is_passed: bool
) -> None:
    spending = World(reserved=70.0).spending(gpu_seconds=100.0, limit=limit)
    found = spending.passed_by(expected, to_come=to_come)
    assert found is (reason if is_passed else None)


def test_the_time_of_a_call_begins_with_it_and_other_calls_have_their_own() -> None:
    world = World(now=130.0)
    timed = world.spending(wall=60.0, earlier=1e9)
    assert timed.wall_seconds_left == 30.0
    assert timed.out_of_time(30.0) is None
    assert timed.out_of_time(30.5) is StopReason.WALL_TIME
    assert timed.spent() is None
    world.now = 160.0
    assert timed.spent() is StopReason.WALL_TIME
    world.now = 200.0
    assert timed.wall_seconds_left == 0.0
    # Cells share it, though it is no budget of GPU time.
    assert timed.is_shared
    assert not timed.is_limited


def test_of_two_spent_budgets_that_of_gpu_time_is_named() -> None:
    world = World(reserved=100.0, now=1e6)
    assert world.spending(gpu_seconds=100.0, wall=1.0).spent() is StopReason.GPU_HOURS


def test_people_are_told_what_is_expected_and_left_in_gpu_hours() -> None:
    spending = World(reserved=9.5 * HOUR).spending(gpu_seconds=10 * HOUR, limit=Limit.COST)
    said = "expected to reserve 0.75 GPU-hours, and search.max_cost leaves 0.50"
    assert spending.why(0.75 * HOUR).endswith(said)
    kept = spending.why(0.75 * HOUR, kept=0.25 * HOUR)
    assert kept.endswith(f"{said}, of which 0.25 are kept for first trials and repeats")

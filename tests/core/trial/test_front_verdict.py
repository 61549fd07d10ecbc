"""The front of a cell, by all runs of its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import pytest

from orchestrator.core.trial.front_verdict import FrontVerdict, judge_front
from orchestrator.core.trial.merit import Merit, OtherMerits
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run

BOTH = (Merit.SPEED, Merit.HEADROOM)


def runs(*seconds: float, at: float = 0.0) -> Sequence[Run]:
    return [
        Run(
            step_seconds=one,
            relative_confidence=0.002,
            at=at + 300.0 * number,
            nodes=("here",),
            purpose=Purpose.CONFIRMATION if number else Purpose.NEW,
        )
        for number, one in enumerate(seconds)
    ]


def free(share: float | None) -> OtherMerits:
    return OtherMerits(headroom=share)


def judged(**layouts: tuple[Sequence[Run], OtherMerits]) -> FrontVerdict:
    keyed = {int(name.removeprefix("t")): both for name, both in layouts.items()}
    return judge_front(
        {key: both[0] for key, both in keyed.items()},
        {key: both[1] for key, both in keyed.items()},
        BOTH,
    )


def test_single_runs_vary_as_published_ones_do() -> None:
    found = judged(t1=(runs(1.0), free(0.3)), t2=(runs(1.04), free(0.3)), t3=(runs(2.0), free(0.5)))
    assert (found.front.on, found.front.possible) == ([1, 3], [2])
    low, high = found.interval(1)
    assert log(high / low) == pytest.approx(2 * 1.96 * 0.02)


def test_repeats_tell_apart_what_single_runs_do_not() -> None:
    # In turn, so that a drift of the machine does not explain the difference.
    found = judged(
        t1=(runs(1.0, 1.001, 1.0), free(0.3)),
        t2=(runs(1.04, 1.041, 1.04, at=100.0), free(0.3)),
        t3=(runs(2.0, 2.002, at=200.0), free(0.5)),
    )
    assert (found.front.on, found.front.possible) == ([1, 3], [])
    low, high = found.interval(1)
    assert log(high / low) < 2 * 1.96 * 0.02


@pytest.mark.parametrize(("seconds", "is_looked_at"), [(1.14, True), (1.16, False)])
def test_a_layout_that_is_dominated_by_far_is_not_looked_at(
    seconds: float, *, is_looked_at: bool
) -> None:
    """Two step times are 5 % uncertain each: by 1.96 * 0.0707, or 14.9 %."""
    found = judged(t1=(runs(1.0, 1.0), free(0.3)), t2=(runs(seconds, at=100.0), free(0.3)))
    assert (2 in found.log_seconds) is is_looked_at


def test_a_layout_that_ran_on_the_machine_once_it_was_slower_is_looked_at() -> None:
    """A third slower than before: what then took 1.3 s had taken 1.0 s."""

    def at(when: float, seconds: float) -> Run:
        (one,) = runs(seconds, at=when)
        return one

    found = judged(
        t1=([at(0.0, 1.0), at(60.0, 1.0), at(1200.0, 1.3)], free(0.3)),
        t2=([at(1260.0, 1.3)], free(0.3)),
        t3=([at(30.0, 1.1), at(90.0, 1.1), at(1230.0, 1.43)], free(0.3)),
    )
    assert found.log_seconds[2][0] - found.log_seconds[1][0] == pytest.approx(0.0, abs=0.02)
    assert (found.front.on, found.front.possible) == ([1], [2])


def test_a_layout_whose_memory_was_not_read_is_left_out() -> None:
    found = judged(t1=(runs(1.0), free(None)), t2=(runs(2.0), free(0.3)))
    assert found.front.on == [2]
    assert found.left_out == [1]
    by_speed = judge_front({1: runs(1.0)}, {}, [Merit.SPEED])
    assert by_speed.front.on == [1]


def test_energy_is_compared_per_token() -> None:
    joules = {1: 2.0, 2: 1.0, 4: 0.0}
    energies = {key: OtherMerits(joules_per_token=one) for key, one in joules.items()}
    found = judge_front(
        {1: runs(1.0), 2: runs(1.5), 3: runs(1.2), 4: runs(1.2)},
        energies,
        [Merit.SPEED, Merit.EFFICIENCY],
    )
    assert found.front.on == [1, 2]
    assert found.left_out == [3, 4]


def test_nothing_measured_is_no_front() -> None:
    assert judge_front({}, {}, BOTH).front.on == []

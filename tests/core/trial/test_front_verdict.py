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


def test_a_layout_whose_memory_was_not_read_is_left_out() -> None:
    found = judged(t1=(runs(1.0), free(None)), t2=(runs(2.0), free(0.3)))
    assert found.front.on == [2]
    assert found.left_out == [1]
    by_speed = judge_front({1: runs(1.0)}, {}, [Merit.SPEED])
    assert by_speed.front.on == [1]


def test_energy_is_compared_per_token() -> None:
    energies = {1: OtherMerits(joules_per_token=2.0), 2: OtherMerits(joules_per_token=1.0)}
    found = judge_front(
        {1: runs(1.0), 2: runs(1.5), 3: runs(1.2)}, energies, [Merit.SPEED, Merit.EFFICIENCY]
    )
    assert found.front.on == [1, 2]
    assert found.left_out == [3]


def test_nothing_measured_is_no_front() -> None:
    assert judge_front({}, {}, BOTH).front.on == []

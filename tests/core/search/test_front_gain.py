"""The expected gain of a row over the front of what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.hypervolume import hypervolume
from orchestrator.core.search.front_gain import FrontGain
from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.outcome import Measured
from orchestrator.core.search.proposer import ExpectedOutcome, Proposer
from orchestrator.core.search.smoothness import Smoothness
from orchestrator.core.search.surrogate import Surrogate
from orchestrator.core.trial.merit import Merit

LIMIT = 80.0
BOTH = (Merit.SPEED, Merit.HEADROOM)
ALL = tuple(Merit)


def lattice(seconds: Floats, memory: Floats) -> Lattice:
    num = len(seconds)
    return Lattice(
        axes=(LatticeAxis.of("size", range(num)),),
        seconds=Belief(
            mean=np.log(seconds),
            basis=np.ones((num, 1)),
            covariance=np.array([[0.01]]),
            residual_sd=0.05,
        ),
        memory=Belief(
            mean=np.log(memory),
            basis=np.ones((num, 1)),
            covariance=np.array([[0.01]]),
            residual_sd=0.05,
        ),
        memory_limit_bytes=LIMIT,
    )


def memory_of(space: Lattice) -> Surrogate:
    assert space.memory is not None
    return Surrogate(space, space.memory, guess=Smoothness.guess(space, residual_sd=0.05))


def ran(seconds: float, memory: float, joules: float | None = None) -> Measured:
    return Measured.of_step(seconds, peak_memory_bytes=memory, joules_per_token=joules)


def test_the_expected_gain_is_the_mean_over_what_the_row_may_be() -> None:
    space = lattice(np.array([1.0, 1.5, 0.9]), np.array([60.0, 30.0, 40.0]))
    memory = memory_of(space)
    known = {0: ran(1.0, 60.0), 1: ran(1.5, 30.0)}
    mean, sd = np.log([1.0, 1.5, 0.9]), np.full(3, 0.2)
    found = FrontGain(space, BOTH).expected(known, mean=mean, sd=sd, memory=memory)
    front = np.array([[1.0, 0.25], [1 / 1.5, 0.625]])
    before, random = hypervolume(front), np.random.default_rng(0)
    gains = []
    for _ in range(4000):
        speed = np.exp(-random.normal(mean[2], sd[2]))
        peak = np.exp(random.normal(memory.mean[2], memory.sd[2]))
        new = np.array([[speed, max(1 - peak / LIMIT, 0.0)]])
        gains.append(hypervolume(np.vstack([front, new])) / before - 1)
    # 4,000 draws: the error of their mean is about 1 %.
    assert found[2] == pytest.approx(np.mean(gains), rel=0.05)


def test_a_row_that_something_beats_in_both_gains_hardly_anything() -> None:
    space = lattice(np.array([1.0, 2.0, 2.0]), np.array([40.0, 60.0, 10.0]))
    known = {0: ran(1.0, 40.0)}
    found = FrontGain(space, BOTH).expected(
        known, mean=np.log([1.0, 2.0, 2.0]), sd=np.full(3, 0.05), memory=memory_of(space)
    )
    assert found[1] < 1e-3
    assert found[2] > 0.2


def test_energy_counts_once_a_row_has_told_of_it() -> None:
    seconds = np.array([1.0, 1.0, 1.2, 1.2])
    space = lattice(seconds, np.full(4, 40.0))
    gain, memory = FrontGain(space, (Merit.EFFICIENCY,)), memory_of(space)
    mean, sd = np.log(seconds), np.full(4, 0.05)
    unknown = gain.expected({0: ran(1.0, 40.0)}, mean=mean, sd=sd, memory=memory)
    by_speed = FrontGain(space, (Merit.SPEED,)).expected(
        {0: ran(1.0, 40.0)}, mean=mean, sd=sd, memory=memory
    )
    assert unknown == pytest.approx(by_speed)
    frugal = {0: ran(1.0, 40.0, joules=5.0), 2: ran(1.2, 40.0, joules=2.0)}
    known = gain.expected(frugal, mean=mean, sd=sd, memory=memory)
    # The last row is expected to be as frugal as the one next to it; those before it are not.
    assert known[3] > 0.01
    assert known[:2] == pytest.approx(0.0, abs=1e-6)


def test_a_search_for_the_front_launches_its_rows_first() -> None:
    # Each size takes more memory and less time than the one before; odd rows are slower by half.
    sizes = np.arange(24)
    seconds = (2.0 - sizes / 24) * np.where(sizes % 2, 1.5, 1.0)
    memory = 10.0 + 2.8 * sizes
    space = lattice(seconds, memory)
    proposer, open_rows = Proposer(space, seed=0, merits=BOTH), np.ones(24, dtype=np.bool_)
    points = np.stack([1 / seconds, 1 - memory / LIMIT], axis=1)
    rows: list[int] = []
    while hypervolume(points[rows]) < 0.95 * hypervolume(points):
        row = proposer.choose(open_rows)[0]
        rows.append(row)
        open_rows[row] = False
        proposer.tell(row, ran(float(seconds[row]), float(memory[row])))
    assert len(rows) <= 9
    assert not any(row % 2 for row in rows)


def test_a_choice_says_how_much_the_front_should_grow() -> None:
    space = lattice(np.array([1.0, 2.0]), np.array([60.0, 20.0]))
    proposer = Proposer(space, seed=0, merits=ALL)
    _, choice = proposer.choose(np.array([True, True]))
    assert isinstance(choice, ExpectedOutcome) and choice.front_gain is None
    proposer.tell(0, ran(1.0, 60.0, joules=3.0))
    _, choice = proposer.choose(np.array([False, True]))
    assert isinstance(choice, ExpectedOutcome)
    assert choice.front_gain is not None and choice.front_gain > 0.1
    gain = proposer.expected_gain(np.array([False, True]))
    assert gain is not None and 0 < gain <= choice.front_gain


def test_a_row_that_may_be_twice_as_fast_doubles_the_front_below_a_second_too() -> None:
    space = lattice(np.array([0.1, 0.05]), np.array([40.0, 40.0]))
    found = FrontGain(space, (Merit.SPEED,)).expected(
        {0: ran(0.1, 40.0)},
        mean=np.log([0.1, 0.05]),
        sd=np.full(2, 0.01),
        memory=memory_of(space),
    )
    # From 10 steps a second to 20; half of the 1 % of noise of the row itself is a gain.
    assert found[1] == pytest.approx(1.0, rel=0.01)
    assert found[0] < 0.01


@pytest.mark.parametrize("peak", [None, 0.0, float("inf"), 20.0])
def test_a_peak_that_was_read_counts_and_else_the_one_that_is_expected(peak: float | None) -> None:
    """At a limit of 80: of the expected 40, half is free; of 20, three quarters."""
    space = lattice(np.array([1.0, 1.0]), np.array([40.0, 30.0]))
    score = Measured(score=0.0, peak_memory_bytes=peak)
    found = FrontGain(space, (Merit.HEADROOM,)).expected(
        {0: score}, mean=np.zeros(2), sd=np.full(2, 0.05), memory=memory_of(space)
    )
    # Row 1 should need 30: 0.625 free is more than a half, and less than three quarters.
    if peak == 20.0:
        assert found[1] < 0.02
    else:
        assert found[1] == pytest.approx(0.625 / 0.5 - 1, abs=0.05)


def test_a_row_is_on_the_front_if_nothing_beats_it_in_both() -> None:
    space = lattice(np.array([1.0, 2.0, 3.0]), np.array([40.0, 30.0, 50.0]))
    gain, memory = FrontGain(space, BOTH), memory_of(space)
    first, second, third = ran(1.0, 40.0), ran(2.0, 30.0), ran(3.0, 50.0)
    assert gain.would_be_on_it(1, second, {0: first}, memory)
    assert not gain.would_be_on_it(2, third, {0: first, 1: second}, memory)


Z = np.linspace(-9.0, 9.0, 200_001)
DENSITY = np.exp(-Z * Z / 2) / np.exp(-Z * Z / 2).sum()


@pytest.mark.parametrize("sd", [0.1, 0.6])
def test_a_gain_of_free_memory_is_the_mean_of_what_is_more_than_the_best(sd: float) -> None:
    """By numeric integration: 0.25 of the memory is free so far."""
    space = lattice(np.ones(2), np.array([60.0, 50.0]))
    assert space.memory is not None
    wide = replace(space, memory=replace(space.memory, covariance=np.array([[sd**2]])))
    memory = memory_of(wide)
    found = FrontGain(wide, (Merit.HEADROOM,)).expected(
        {0: ran(1.0, 60.0)}, mean=np.zeros(2), sd=np.full(2, 0.05), memory=memory
    )
    free = 1.0 - np.exp(memory.mean[1] + memory.sd[1] * Z) / LIMIT
    assert found[1] == pytest.approx(float(DENSITY @ np.maximum(free - 0.25, 0.0)) / 0.25, rel=1e-3)


@pytest.mark.parametrize("sd", [0.1, 0.6, 1.5])
def test_a_gain_of_speed_is_of_at_most_three_times_the_best(sd: float) -> None:
    """The best that ran or is expected: 1.25 steps a second; before, none ran."""
    space = lattice(np.array([1.0, 0.8]), np.full(2, 40.0))
    mean, sds, memory = np.log([1.0, 0.8]), np.full(2, sd), memory_of(space)
    gain = FrontGain(space, (Merit.SPEED,))
    speeds = np.minimum(1.25 * np.exp(sd * Z), 3 * 1.25)
    found = gain.expected({0: ran(1.0, 40.0)}, mean=mean, sd=sds, memory=memory)
    assert found[1] == pytest.approx(float(DENSITY @ np.maximum(speeds - 1.0, 0.0)), rel=1e-3)
    found = gain.expected({}, mean=mean, sd=sds, memory=memory)
    assert found[1] == pytest.approx(float(DENSITY @ speeds), rel=1e-3)
    # A hundred times as long: still three times the best that is expected.
    found = gain.expected({}, mean=mean + np.log(100.0), sd=sds, memory=memory)
    assert found[1] == pytest.approx(float(DENSITY @ speeds) / 100.0, rel=1e-3)


@pytest.mark.parametrize("merit", [Merit.SPEED, Merit.HEADROOM])
def test_what_is_four_standard_deviations_behind_gains_nothing(merit: Merit) -> None:
    space = lattice(np.ones(3), np.ones(3))
    assert space.memory is not None
    sd = float(memory_of(space).sd[1])
    logs = np.log(40.0) + sd * np.array([0.0, 3.9, 4.1])
    space = replace(space, memory=replace(space.memory, mean=logs))
    found = FrontGain(space, (merit,)).expected(
        {0: ran(40.0, 40.0)}, mean=logs, sd=np.full(3, sd), memory=memory_of(space)
    )
    assert found[1] > 0.0
    assert found[2] == 0.0


@pytest.mark.parametrize(("seconds", "is_on_it"), [(0.9, True), (1.1, False)])
def test_energy_that_was_not_read_is_that_of_the_power_of_its_like(
    seconds: float, *, is_on_it: bool
) -> None:
    """At the same power, the faster row takes less energy for a token."""
    space = lattice(np.ones(2), np.full(2, 40.0))
    gain, memory = FrontGain(space, (Merit.EFFICIENCY,)), memory_of(space)
    read, unread = ran(1.0, 40.0, joules=5.0), ran(seconds, 40.0)
    gain.expected({0: read}, mean=np.zeros(2), sd=np.full(2, 0.05), memory=memory)
    assert gain.would_be_on_it(1, unread, {0: read}, memory) is is_on_it
    assert gain.would_be_on_it(0, read, {1: unread}, memory) is not is_on_it


def test_energy_that_was_read_and_is_forgotten_is_not_compared_any_more() -> None:
    space = lattice(np.array([1.0, 0.8]), np.full(2, 40.0))
    mean, sd, memory = np.log([1.0, 0.8]), np.full(2, 0.1), memory_of(space)
    unread = {0: ran(1.0, 40.0)}
    gain = FrontGain(space, (Merit.EFFICIENCY,))
    gain.expected({0: ran(1.0, 40.0, joules=5.0)}, mean=mean, sd=sd, memory=memory)
    found = gain.expected(unread, mean=mean, sd=sd, memory=memory)
    fresh = FrontGain(space, (Merit.EFFICIENCY,))
    assert found == pytest.approx(fresh.expected(unread, mean=mean, sd=sd, memory=memory))


@pytest.mark.parametrize("joules", [0.0, float("inf"), None])
def test_energy_that_was_not_read_is_not_compared(joules: float | None) -> None:
    space = lattice(np.array([1.0, 0.8]), np.full(2, 40.0))
    mean, sd, memory = np.log([1.0, 0.8]), np.full(2, 0.1), memory_of(space)
    some = {0: ran(1.0, 40.0, joules=joules)}
    by_energy = FrontGain(space, (Merit.EFFICIENCY,)).expected(
        some, mean=mean, sd=sd, memory=memory
    )
    by_speed = FrontGain(space, (Merit.SPEED,)).expected(some, mean=mean, sd=sd, memory=memory)
    assert by_energy == pytest.approx(by_speed)


def test_a_gain_of_energy_is_nearly_the_same_in_any_unit() -> None:
    seconds = np.array([1.0, 1.0, 1.2, 1.2])
    space = lattice(seconds, np.full(4, 40.0))
    mean, sd, memory = np.log(seconds), np.full(4, 0.05), memory_of(space)

    def gains(unit: float) -> Floats:
        some = {0: ran(1.0, 40.0, joules=5.0 * unit), 2: ran(1.2, 40.0, joules=2.0 * unit)}
        gain = FrontGain(space, (Merit.EFFICIENCY,))
        return gain.expected(some, mean=mean, sd=sd, memory=memory)

    assert gains(0.1) == pytest.approx(gains(1.0), rel=0.05, abs=1e-6)

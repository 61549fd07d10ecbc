"""The hypotheses of drift: their probabilities sum to 1, and those of steps lie between runs."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.trial import drift_prior
from orchestrator.core.trial.drift_prior import evenly, prior

# Values with their probabilities: what is believed of machines that nobody has measured.
BELIEFS = {
    "DRIFT_SDS": ((0.003, 0.40), (0.01, 0.33), (0.03, 0.14), (0.1, 0.08), (0.3, 0.04), (0.6, 0.01)),
    "LENGTHS": ((0.05, 0.25), (0.3, 0.35), (2.0, 0.40)),
    "SWING_SDS": ((0.03, 0.50), (0.1, 0.30), (0.3, 0.20)),
    "SWING_LENGTHS": ((0.04, 0.35), (0.12, 0.35), (0.4, 0.30)),
    "NODE_SDS": ((0.0, 0.70), (0.05, 0.18), (0.2, 0.12)),
    "LOAD_SCALES": ((0.03, 0.20), (0.3, 0.35), (1.0, 0.45)),
    "RUN_SDS": ((0.005, 0.30), (0.012, 0.50), (0.03, 0.20)),
}
QUIET = 0.40 + 0.33 + 0.14  # drifts of at most 3 %


@pytest.mark.parametrize("name", BELIEFS)
def test_a_belief_is_a_distribution(name: str) -> None:
    values = getattr(drift_prior, name)
    assert values == BELIEFS[name]
    assert sum(probability for _, probability in values) == pytest.approx(1.0)


def hypotheses(
    times: list[float], repeated: set[float], *, one_place: bool = True
) -> drift_prior.Hypotheses:
    return prior(times, repeated=repeated, is_one_place=one_place, is_load_repeated=False)


@pytest.mark.parametrize("times", [[], [5.0], [0.0, 1.0], [0.0, 1.0, 2.0, 6.0, 8.0]])
@pytest.mark.parametrize("one_place", [True, False])
def test_all_hypotheses_together_are_certain(times: list[float], one_place: bool) -> None:
    found = hypotheses(times, {0.0, 2.0, 8.0}, one_place=one_place)
    assert found.weights.sum() == pytest.approx(1.0)
    assert found.span == ((times[0], times[-1]) if times else (0.0, 0.0))


def test_without_two_times_drift_is_the_usual() -> None:
    found = hypotheses([], set())
    assert found.drift_sd.tolist() == [0.01] * 3
    assert found.length.tolist() == [1.0] * 3
    assert found.is_smooth.tolist() == [0.0] * 3
    assert found.step_at.tolist() == found.next_step_at.tolist() == [-1.0] * 3
    assert found.weights.tolist() == pytest.approx([0.30, 0.50, 0.20])
    assert found.load_scale.tolist() == [1.0] * 3


def test_a_machine_wanders_swings_or_steps_with_these_probabilities() -> None:
    """Two of the gaps lie between repeats: 0 to 2 and 2 to 8."""
    found = hypotheses([0.0, 1.0, 2.0, 6.0, 8.0], {0.0, 2.0, 8.0})
    steps, twice = found.step_at >= 0, found.next_step_at >= 0
    swings = found.is_smooth > 0
    assert found.weights[swings].sum() == pytest.approx(0.08)
    assert found.weights[steps & ~twice].sum() == pytest.approx(0.20)
    assert found.weights[twice].sum() == pytest.approx(0.06)
    assert found.weights[~steps & ~swings].sum() == pytest.approx(0.66)
    # A step is as likely at each place between two runs: two places are in each interval.
    places = sorted(set(found.step_at[steps & ~twice].tolist()))
    assert places == [pytest.approx(1.5 / 8), pytest.approx(7.0 / 8)]
    for place in places:
        at = steps & ~twice & (found.step_at == place)
        assert found.weights[at].sum() == pytest.approx(0.10)
        quietest = at & (found.drift_sd == 0.003)
        assert found.weights[quietest].sum() == pytest.approx(0.10 * 0.40 / QUIET)
        assert set(found.drift_sd[at].tolist()) == {0.003, 0.01, 0.03}
    assert set(found.length[steps].tolist()) == {0.3}
    assert set(found.drift_sd[twice].tolist()) == {0.01}
    assert found.intervals[places[0]] == [0.5 / 8, 1.5 / 8]


def test_without_repeats_between_them_two_steps_are_not_told_apart() -> None:
    found = hypotheses([0.0, 1.0, 2.0], set())
    assert not (found.next_step_at >= 0).any()
    # One interval: what two steps would have is left to wandering.
    wanders = (found.step_at < 0) & (found.is_smooth == 0)
    assert found.weights[wanders].sum() == pytest.approx(1 - 0.08 - 0.20)
    two_runs = hypotheses([0.0, 1.0], set())
    assert not (two_runs.step_at >= 0).any()


def test_nodes_and_load_are_believed_to_matter_only_where_they_can_be_seen() -> None:
    here = prior([], repeated=set(), is_one_place=True, is_load_repeated=True)
    assert set(here.node_sd.tolist()) == {0.0}
    for scale, probability in BELIEFS["LOAD_SCALES"]:
        assert here.weights[here.load_scale == scale].sum() == pytest.approx(probability)
    apart = hypotheses([], set(), one_place=False)
    for sd, probability in BELIEFS["NODE_SDS"]:
        assert apart.weights[apart.node_sd == sd].sum() == pytest.approx(probability)


def test_some_hypotheses_alone_are_certain_again() -> None:
    found = hypotheses([], set()).take(np.array([0, 2]))
    assert found.weights.tolist() == pytest.approx([0.6, 0.4])
    assert found.run_sd.tolist() == [0.005, 0.03]


def test_a_likely_step_gets_each_place_of_its_interval() -> None:
    whole = hypotheses([0.0, 1.0, 2.0], set())
    likely = whole.take(np.flatnonzero((whole.step_at >= 0) & (whole.drift_sd == 0.01)))
    found = likely.placed()
    # Two places, each with half of what the interval had.
    assert len(found.weights) == 2 * len(likely.weights)
    assert sorted(set(found.step_at.tolist())) == [0.25, 0.75]
    assert found.weights.sum() == pytest.approx(1.0)
    assert found.weights[found.step_at == 0.25].sum() == pytest.approx(0.5)
    # An unlikely one stays one place.
    rare = whole.take(np.arange(len(whole.weights)))
    few = rare.placed()
    stays = (whole.step_at >= 0) & (whole.weights < 0.01)
    spread = (whole.step_at >= 0) & (whole.weights >= 0.01)
    assert len(few.weights) == len(whole.weights) + spread.sum()
    assert stays.any()
    assert spread.any()


def test_some_of_many_are_the_first_the_last_and_those_between() -> None:
    assert evenly([1, 2, 3], 3) == [1, 2, 3]
    assert evenly(list(range(9)), 3) == [0, 4, 8]
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]


def test_places_of_steps_are_shares_of_the_time_from_the_first_run_to_the_last() -> None:
    """A clock need not begin at 0. Between runs: 125 and 175 s; the second is a repeat."""
    found = hypotheses([100.0, 150.0, 200.0, 300.0], {150.0, 300.0})
    places = sorted({place for some in found.intervals.values() for place in some})
    assert places == pytest.approx([0.125, 0.375, 0.75])
    assert sorted(map(len, found.intervals.values())) == [1, 2]
    assert found.span == (100.0, 300.0)

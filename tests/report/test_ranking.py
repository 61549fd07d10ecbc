"""The words about how sure a ranking is."""

from __future__ import annotations

import re

import pytest

from db.store import Store
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import judge
from orchestrator.report.ranking import (
    OTHER_LEAD,
    Ranking,
    assumed_text,
    difference_text,
    rank_cell,
    varies_text,
)
from tests.db.builders import measure_runs


def run(seconds: float, load_sd: float = 0.0, at: float | None = None) -> Run:
    return Run(step_seconds=seconds, relative_confidence=0.001, load_sd=load_sd, at=at)


def test_the_difference_of_the_first_two_is_given_only_if_they_are_tied_with_each_other() -> None:
    tied = judge({1: [run(1.0)], 2: [run(1.01)]}, contenders=0, repeats=0)
    assert tied is not None
    text = difference_text(tied, lambda _: 1)
    assert text.startswith(". Trials 1 and 2 differ by 1.0% (95 % interval: -")
    with_a_disturbed_third = {1: [run(1.0)] * 4, 2: [run(1.05)] * 4, 3: [run(1.06, load_sd=0.3)]}
    others = judge(with_a_disturbed_third, contenders=0, repeats=0)
    assert others is not None and list(others.tied) == [1, 3]
    assert difference_text(others, lambda _: 1) == ""


def test_a_difference_of_which_nothing_is_known_has_no_interval() -> None:
    unknown = judge({1: [run(1.0, load_sd=1.0)], 2: [run(1.01)]}, contenders=0, repeats=0)
    assert unknown is not None and unknown.margin is not None and unknown.margin.high > 2
    assert "differ by 1.0% (95 % interval unknown, from 1 and 1 runs)" in difference_text(
        unknown, lambda _: 1
    )


@pytest.mark.parametrize(("seconds", "is_said"), [(1.015, False), (1.025, True)])
def test_a_tie_though_the_interval_excludes_no_difference_is_explained(
    seconds: float, is_said: bool
) -> None:
    runs = {
        trial_id: [run(median * one) for one in (1.0, 1.01, 0.99)]
        for trial_id, median in ((1, 1.0), (2, seconds))
    }
    tied = judge(runs, contenders=0, repeats=0)
    assert tied is not None and tied.margin is not None and (tied.margin.low > 0) is is_said
    text = difference_text(tied, lambda _: 3)
    assert text.startswith(f". Trials 1 and 2 differ by {seconds - 1:.1%} (95 % interval: ")
    assert text.endswith("at 99.6%, which a winner needs, it includes 0") is is_said


def test_a_variation_that_is_larger_than_repeats_show_is_said_to_be_assumed() -> None:
    alike = judge({1: [run(1.0), run(1.0001)]}, contenders=0, repeats=0)
    assert alike is not None
    assert assumed_text(alike).endswith("% is assumed, since other runs may vary more")
    apart = judge({1: [run(1.0), run(1.1)]}, contenders=0, repeats=0)
    assert apart is not None and assumed_text(apart) == ""


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        # Every run differs from the one before.
        ((1.0, 1.4, 0.8, 1.2, 1.5, 0.9), r"; 1\.[456]% is assumed"),
        # The machine became faster once, and runs are alike before and after.
        ((1.5, 1.501, 1.499, 1.0, 1.001, 0.999), r", and by 0\.5%"),
    ],
    ids=["noise", "step"],
)
def test_a_variation_without_drift_is_assumed_unless_repeats_show_it(
    speeds: tuple[float, ...], said: str
) -> None:
    runs = {
        key: [run(key * one, at=60.0 * (2 * place + key)) for place, one in enumerate(speeds)]
        for key in (1, 2)
    }
    verdict = judge(runs, contenders=0, repeats=0)
    assert verdict is not None
    text = varies_text(verdict)
    assert re.search(rf"\(10 repeats\){said} without drift and the load of others$", text), text


def test_a_line_about_drift_says_that_all_runs_of_a_layout_are_compared(store: Store) -> None:
    """Besides the correction, the mean of all runs differs from the run that a table shows."""
    measure_runs(store, {1: [(1.6, 0), (1.0, 10), (1.005, 12)], 2: [(1.92, 1)], 4: [(1.2, 9)]})
    drift = _ranked(store).drift
    assert drift is not None and "layouts are compared by all of their runs, and without" in drift


def test_a_lead_that_the_measured_speeds_do_not_show_has_a_column(store: Store) -> None:
    """The lead rests on both runs of a trial; its numbers are those of the slower one."""
    apart = measure_runs(store, {1: [(1.0, 0), (1.05, 2)], 2: [(2.0, 1), (2.0, 3)]})
    found = _ranked(store)
    assert found.drift is None and found.margin is not None
    assert found.margin.value == pytest.approx(2.0 / (1.0 * 1.05) ** 0.5 - 1, rel=0.02)
    shown = found.without_drift(found.leading)
    assert shown is not None and shown.remark == OTHER_LEAD
    rate, _ = shown.texts[apart[1]]
    # The runs had 1,000 and 952 tokens/s.
    assert rate == "972"


def test_a_lead_of_other_digits_than_the_table_s_has_a_column(store: Store) -> None:
    """The table's lead is 2 / 1.015 - 1 = 97 %, that of all runs 98.5 %."""
    measure_runs(store, {1: [(1.0, 0), (1.015, 2)], 2: [(2.0, 1), (2.0, 3)]})
    found = _ranked(store)
    shown = found.without_drift(found.leading)
    assert found.drift is None and shown is not None and shown.remark == OTHER_LEAD


def test_a_lead_that_the_measured_speeds_show_has_no_column(store: Store) -> None:
    measure_runs(store, {1: [(1.0, 0), (1.002, 2)], 2: [(2.0, 1), (2.0, 3)]})
    found = _ranked(store)
    assert found.without_drift(found.leading) is None


def _ranked(store: Store) -> Ranking:
    (sweep,) = store.sweeps()
    ((cell_id, leading),) = store.best(sweep.id).items()
    return rank_cell(store, sweep.id, cell_id, leading)

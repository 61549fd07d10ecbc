"""Repeats show how a machine drifts, and what layouts take without that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from orchestrator.core.trial.drift import MOST_OF_ONE, _newest, fit
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import Run
from orchestrator.core.trial.winner import judge

TRUTH = {1: 1.00, 2: 1.04, 3: 1.10, 4: 1.15, 5: 1.20, 6: 1.30, 7: 1.45, 8: 1.60}


def run(seconds: float, at: float, **fields: Any) -> Run:
    return Run(step_seconds=seconds, relative_confidence=0.01, at=at, **fields)


def settle(
    slowness: Callable[[float], float], *, seed: int = 0, truth: dict[int, float] = TRUTH
) -> tuple[dict[int, list[Run]], int]:
    """Measure each once, then an anchor, then what the judge asks for; a run per minute.

    Returns the runs and the number of repeats.
    """
    random, at = Random(seed), 0.0
    runs: dict[int, list[Run]] = {}

    def measure(key: int, purpose: Purpose) -> None:
        nonlocal at
        seconds = truth[key] * slowness(at) * (1 + random.gauss(0, 0.008))
        runs.setdefault(key, []).append(run(seconds, at, purpose=purpose))
        at += 60.0

    for key in truth:
        measure(key, Purpose.NEW)
    measure(next(iter(truth)), Purpose.ANCHOR)
    while (
        verdict := judge(runs, contenders=3, repeats=2)
    ) is not None and verdict.repeat is not None:
        measure(verdict.repeat, Purpose.CONFIRMATION)
        assert at < 6000
    return runs, sum(len(some) - 1 for some in runs.values())


def test_a_layout_that_was_measured_on_a_slow_machine_still_wins() -> None:
    for seed in range(10):
        runs, _ = settle(lambda at: 1.6 if at < 110 else 1.0, seed=seed)
        verdict = judge(runs, contenders=3, repeats=0)
        assert verdict is not None
        assert verdict.best == 1
        assert verdict.change is not None
        # Both were measured on the slow machine.
        assert verdict.change.key in (1, 2)
        assert verdict.change.first_seconds / verdict.change.then_seconds == pytest.approx(
            1.6, rel=0.05
        )


def test_the_order_of_a_machine_that_becomes_slower_is_not_that_of_time() -> None:
    for seed in range(5):
        runs, _ = settle(
            lambda at: 1.0 if at < 200 else 1.5, seed=seed, truth=dict(reversed(TRUTH.items()))
        )
        verdict = judge(runs, contenders=3, repeats=0)
        assert verdict is not None
        assert TRUTH[verdict.tied[0]] <= 1.03 if verdict.is_settled else 1 in verdict.tied


def test_a_quiet_machine_pays_for_the_anchor_and_the_winner_alone() -> None:
    taken = [settle(lambda at: 1.0, seed=seed)[1] for seed in range(10)]
    assert max(taken) <= 5
    assert sorted(taken)[5] <= 3


def test_repeats_alternate_where_more_than_one_layout_contends() -> None:
    runs, _ = settle(lambda at: 1.6 if at < 110 else 1.0)
    last = sorted((one.at or 0.0, key) for key, some in runs.items() for one in some[1:])
    assert all(first != second for (_, first), (_, second) in pairwise(last))


def test_what_was_measured_before_a_change_is_corrected_and_less_sure() -> None:
    runs = {1: [run(1.6, 0), run(1.0, 600)], 2: [run(1.9, 60)], 3: [run(1.2, 540)]}
    drift = fit(runs)
    found = drift.estimate(runs, (2, 3))
    early, late = drift.corrections([runs[2][0], runs[3][0]])
    assert early < -0.25  # 1.9 would be about 1.2 now
    assert abs(late) < 0.2
    sds = dict(zip(found.keys, found.sd(), strict=True))
    assert sds[2] > 3 * sds[1]


def test_without_times_nothing_is_called_drift() -> None:
    verdict = judge(
        {1: [Run(step_seconds=1.0), Run(step_seconds=1.5)], 2: [Run(step_seconds=1.2)]},
        contenders=3,
        repeats=2,
    )
    assert verdict is not None
    assert verdict.change is None


def test_a_slow_node_is_no_reason_to_call_a_layout_slow() -> None:
    """The anchor is 30 % slower on node b, where layout 2 ran once."""
    runs = {
        1: [
            run(1.00, 0, nodes=("a",)),
            run(1.30, 300, nodes=("b",)),
            run(1.005, 360, nodes=("a",)),
        ],
        2: [run(1.25, 60, nodes=("b",))],
    }
    verdict = judge(runs, contenders=3, repeats=2)
    assert verdict is not None
    assert set(verdict.tied) == {1, 2}
    assert verdict.repeat == 2


def test_the_load_of_others_makes_a_run_count_for_less() -> None:
    quiet = {1: [run(1.0, 0), run(1.01, 120)], 2: [run(1.06, 60), run(1.07, 180)]}
    loaded = {1: quiet[1], 2: [run(1.06, 60, load_sd=0.2), run(1.07, 180, load_sd=0.2)]}
    sure, unsure = (judge(runs, contenders=3, repeats=0) for runs in (quiet, loaded))
    assert sure is not None
    assert unsure is not None
    assert sure.tied == (1,)
    assert unsure.tied == (1, 2)


def test_what_the_load_does_is_shown_by_repeats_on_a_busy_machine_alone() -> None:
    def scale(*seconds: float, load_sd: float) -> float:
        runs = [run(one, 60.0 * i, load_sd=load_sd) for i, one in enumerate(seconds)]
        return fit({1: runs, 2: [run(1.3, 30, load_sd=1.0)]}).load_scale

    assert scale(1.0, load_sd=1.0) == 1.0, "nothing was repeated"
    assert scale(1.0, 1.001, load_sd=0.0) == pytest.approx(1.0), "the repeats were not disturbed"
    assert scale(1.0, 1.001, load_sd=1.0) < 0.4
    assert scale(1.0, 1.001, 0.999, 1.002, load_sd=1.0) < 0.1
    assert scale(1.0, 2.0, load_sd=1.0) > 0.6


@pytest.mark.parametrize("num", [1, 40, 300])
def test_any_number_of_layouts_and_runs_is_judged(num: int) -> None:
    random = Random(num)
    runs = {key: [run(1 + random.random(), key * 60.0)] for key in range(num)}
    for key in range(0, num, 2):
        runs[key] += [run(runs[key][0].step_seconds, (num + key) * 60.0) for _ in range(2)]
    verdict = judge(runs, contenders=3, repeats=2)
    assert verdict is not None
    assert all(np.isfinite(bounds).all() for bounds in verdict.intervals.values())


def test_an_anchor_of_a_long_sweep_still_tells_of_the_machine() -> None:
    anchor = [
        run(1.0 if at < 3000 else 1.5, float(at), purpose=Purpose.ANCHOR)
        for at in range(0, 6000, 60)
    ]
    found = fit({1: anchor, 2: [run(2.0, 6010.0), run(2.0, 6020.0)]})
    assert found.change is not None
    assert found.change.key == 1
    early, late = found.corrections([run(3.0, 600.0), run(3.0, 5400.0)])
    assert np.exp(early) == pytest.approx(1.5, rel=0.02)
    assert np.exp(late) == pytest.approx(1.0, rel=0.02)


def test_a_machine_that_became_six_times_as_fast_at_once_is_corrected_for_all_of_it() -> None:
    anchor = [run(1.0 if at > 1000.0 else 6.0, at) for at in (0.0, 300.0, 600.0, 900.0, 1200.0)]
    single = run(12.0, 30.0)
    found = fit({1: anchor, 2: [single]})
    assert np.exp(found.corrections([single])) == pytest.approx(1 / 6, rel=0.02)


def test_where_between_two_looks_the_machine_changed_is_not_known() -> None:
    """Seven layouts ran between two runs of the first, while the machine became faster.

    Any of them may have run before or after the change. The machine became faster again between
    runs of repeated layouts.
    """
    runs = {1: [run(1.50, 0.0), run(1.25, 480.0), run(1.0, 960.0)]}
    runs |= {key: [run(1.42, 60.0 * (key - 1))] for key in range(2, 9)}
    levels = {9: 1.25, 10: 1.25, 11: 1.25, 12: 1.0, 13: 1.0, 14: 1.0}
    truth = {key: 1.0 + 0.02 * (key - 8) for key in levels}
    runs |= {
        key: [run(truth[key] * levels[key], 60.0 * key), run(truth[key], 1000.0 + 60.0 * key)]
        for key in levels
    }
    found = fit(runs).estimate(runs, list(runs))
    faster = dict(zip(found.keys, found.faster()[1].tolist(), strict=True))
    # What took 1.42 s before the first change would take 0.95 s now, and is the best; after it,
    # 1.14 s.
    assert all(faster[key] > 0.05 for key in range(2, 8))


def test_of_too_many_runs_those_of_unknown_times_are_left_out_first() -> None:
    unknown = [Run(step_seconds=1.0, relative_confidence=0.01, at=None)] * MOST_OF_ONE
    runs = {1: unknown, 2: unknown, 3: [run(1.0, 0.5)] * MOST_OF_ONE}
    assert list(_newest(runs)) == [1, 3]

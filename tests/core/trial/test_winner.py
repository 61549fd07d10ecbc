"""Which layout wins, which are tied, and which is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log, sqrt
from random import Random

import pytest

from orchestrator.core.trial.drift import fit
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import USUAL_SD, Run
from orchestrator.core.trial.winner import (
    CONSIDERED,
    WIDTH,
    Verdict,
    ended_early_that_could_win,
    judge,
    median_run,
    most_repeats_with_drift,
)


def run(seconds: float, confidence: float | None = 0.01) -> Run:
    return Run(step_seconds=seconds, relative_confidence=confidence)


def settle(
    runs: dict[int, list[Run]],
    truth: Mapping[int, float],
    *,
    noise: float,
    seed: int,
    contenders: int = 4,
    repeats: int = 3,
) -> int:
    """Repeat what the judge asks for, with noise between runs; return the number of repeats."""
    random, taken = Random(seed), 0
    while (
        verdict := judge(runs, contenders=contenders, repeats=repeats)
    ) is not None and verdict.repeat is not None:
        runs[verdict.repeat].append(run(truth[verdict.repeat] * (1 + random.gauss(0, noise))))
        taken += 1
        assert taken < 100
    return taken


def test_a_run_on_a_busy_machine_is_not_told_from_one_that_is_slower_by_less() -> None:
    quiet = {1: [run(1.0)] * 3, 2: [run(1.2)]}
    assert tied(quiet) == [1]
    slowed = {1: [run(1.0)] * 3, 2: [Run(step_seconds=1.2, relative_confidence=0.01, load_sd=0.3)]}
    assert tied(slowed) == [1, 2]


def test_tied_layouts_have_the_order_of_their_speeds_also_where_another_is_likelier() -> None:
    """The third ran once beside others, so it could be the fastest sooner than the second."""
    busy = Run(step_seconds=1.03, relative_confidence=0.001, load_sd=0.3)
    verdict = judged({1: [run(1.0, 0.001)] * 3, 2: [run(1.01, 0.001)] * 3, 3: [busy]})
    assert list(verdict.tied) == [1, 3, 2]
    assert list(verdict.order) == list(verdict.tied_by_speed) == [1, 2, 3]


def tied(runs: Mapping[int, Sequence[Run]]) -> list[int]:
    return list(judged(runs).tied)


def judged(
    runs: Mapping[int, Sequence[Run]], *, repeats: int = 3, under_way: Sequence[int] = ()
) -> Verdict:
    verdict = judge(runs, contenders=4, repeats=repeats, under_way=under_way)
    assert verdict is not None
    return verdict


def test_the_margin_is_that_of_the_speeds_and_excludes_zero_where_one_layout_wins() -> None:
    """Single runs are computed by hand; repeats narrow it; tied layouts may change places."""
    once = judge({1: [run(1.0)], 2: [run(1.2)]}, contenders=0, repeats=0)
    assert once is not None and once.margin is not None and once.margin.runner_up == 2
    assert once.margin.value == pytest.approx(0.2)
    assert once.margin.high == pytest.approx(1.2 * exp(WIDTH * sqrt(2) * USUAL_SD) - 1)
    assert once.margin.low == pytest.approx(1.2 / exp(WIDTH * sqrt(2) * USUAL_SD) - 1)
    often = judge({1: [run(1.0), run(1.001)] * 4, 2: [run(1.2)] * 4}, contenders=0, repeats=0)
    assert often is not None and often.margin is not None
    assert 0 < once.margin.low < often.margin.low < 0.2 < often.margin.high < once.margin.high
    close = judge({1: [run(1.0), run(1.01)], 2: [run(1.004)]}, contenders=0, repeats=0)
    assert close is not None and close.margin is not None and len(close.tied) == 2
    assert close.margin.low < 0 < close.margin.high
    for num in (1, 2):
        alone = judge({1: [run(1.0)] * num}, contenders=0, repeats=0)
        assert alone is not None and alone.margin is None


def test_the_margin_is_the_less_sure_the_more_the_runner_up_was_disturbed() -> None:
    disturbed = Run(step_seconds=1.5, relative_confidence=0.01, load_sd=0.3)
    sure, unsure = (judged({1: [run(1.0)], 2: [second]}) for second in (run(1.5), disturbed))
    assert sure.margin is not None and unsure.margin is not None
    assert unsure.margin.low < 0 < sure.margin.low


def test_steps_of_milliseconds_are_judged_as_those_of_seconds() -> None:
    of_seconds, of_milliseconds = (
        judged({1: [run(unit)], 2: [run(1.08 * unit)], 3: [run(1.03 * unit)]}) for unit in (1, 1e-3)
    )
    assert of_milliseconds.tied == of_seconds.tied == (1, 3)
    assert of_milliseconds.margin is not None and of_seconds.margin is not None
    assert of_milliseconds.margin.value == pytest.approx(of_seconds.margin.value)


def test_the_interval_of_a_step_time_reaches_as_far_down_as_up_by_its_logarithm() -> None:
    low, high = judged({1: [run(0.5)]}).intervals[1]
    assert high == pytest.approx(0.5 * exp(WIDTH * USUAL_SD))
    assert low * high == pytest.approx(0.5**2)


def test_a_tie_says_about_how_often_the_first_two_must_run() -> None:
    """Single runs are computed by hand: 2.652 is the normal quantile of 1 - 0.004."""
    once = judge({1: [run(1.0)], 2: [run(1.02)]}, contenders=0, repeats=0)
    assert once is not None and len(once.tied) == 2
    assert once.runs_to_decide == ceil(2 * (2.652 * USUAL_SD / log(1.02)) ** 2)
    few = judge({1: [run(1.0)] * 3, 2: [run(1.01)] * 3}, contenders=0, repeats=0)
    assert few is not None and len(few.tied) == 2 and few.runs_to_decide is not None
    assert few.runs_to_decide > 3
    num = 2 * few.runs_to_decide
    assert tied({1: [run(1.0)] * num, 2: [run(1.01)] * num}) == [1]
    equal = judge({1: [run(1.0)], 2: [run(1.0)]}, contenders=0, repeats=0)
    assert equal is not None and equal.runs_to_decide is None
    won = judge({1: [run(1.0)] * 3, 2: [run(1.5)]}, contenders=0, repeats=0)
    assert won is not None and won.runs_to_decide is None


@pytest.mark.parametrize(("num", "num_of_second"), [(2, 2), (4, 4), (8, 2), (2, 8), (8, 8)])
def test_a_tie_needs_as_many_runs_however_many_there_are_by_now(
    num: int, num_of_second: int
) -> None:
    """They are 3 % apart, and every other run is 6 % slower: 8 runs leave a tie, 16 leave none."""
    first, second = [run(1.0), run(1.06)], [run(1.03), run(1.03 * 1.06)]

    def after(num: int, num_of_second: int) -> Verdict:
        return judged({1: first * (num // 2), 2: second * (num_of_second // 2)})

    assert (len(after(8, 8).tied), len(after(16, 16).tied)) == (2, 1)
    needed = after(num, num_of_second).runs_to_decide
    assert needed is not None and 8 < needed <= 16


def test_no_number_of_runs_is_given_for_a_second_layout_that_is_not_tied() -> None:
    disturbed = Run(step_seconds=1.06, relative_confidence=0.01, load_sd=0.3)
    third = {1: [run(1.0)] * 4, 2: [run(1.05)] * 4, 3: [disturbed]}
    verdict = judge(third, contenders=0, repeats=0)
    assert verdict is not None and verdict.margin is not None
    assert (verdict.margin.runner_up, list(verdict.tied)) == (2, [1, 3])
    assert verdict.runs_to_decide is None


def test_nothing_measured_has_no_winner() -> None:
    assert judge({}, contenders=3, repeats=2) is None


def test_the_best_is_measured_twice_even_where_nothing_comes_near_it() -> None:
    runs = {1: [run(1.0)], 2: [run(2.0)]}
    first = judge(runs, contenders=3, repeats=2)
    assert first is not None
    assert (first.best, first.repeat) == (1, 1)
    runs[1].append(run(1.005))
    second = judge(runs, contenders=3, repeats=2)
    assert second is not None
    assert (second.tied, second.repeat, second.is_settled) == ((1,), None, True)


def test_where_every_layout_ran_twice_the_slower_run_counts_as_well() -> None:
    verdict = judged({1: [run(1.0), run(1.3)], 2: [run(1.1), run(1.1)]}, repeats=0)
    assert verdict.best == 2


def test_the_median_of_an_even_number_of_runs_is_the_slower_one() -> None:
    assert median_run([run(1.0), run(1.2)]).step_seconds == 1.2
    assert median_run([run(1.4), run(1.0), run(1.3), run(1.1), run(1.2)]).step_seconds == 1.2


def test_layouts_within_their_noise_are_repeated_before_one_is_called_the_winner() -> None:
    truth = {1: 1.00, 2: 1.04, 3: 1.5}
    runs = {
        1: [run(1.03)],
        2: [run(1.01)],
        3: [run(1.5)],
        # The first runs have them the wrong way round.
    }
    settle(runs, truth, noise=0.004, seed=1)
    assert len(runs[3]) == 1
    assert tied(runs)[0] == 1


def test_what_cannot_be_told_apart_is_shown_as_tied() -> None:
    runs = {1: [run(1.0)], 2: [run(1.001)], 3: [run(1.3)]}
    settle(runs, {1: 1.0, 2: 1.001, 3: 1.3}, noise=0.01, seed=2)
    assert sorted(tied(runs)) == [1, 2]


@pytest.mark.parametrize(
    ("contenders", "num_runs"),
    [(4, [4, 4, 2, 2, 1, 1, 1, 1]), (7, [4, 4, 3, 3, 2, 2, 2])],
    ids=["4, 2, 2", "7, 4, 2"],
)
def test_half_of_the_contenders_stay_in_each_round(contenders: int, num_runs: list[int]) -> None:
    truth = {key: 1.0 + key / 10_000 for key in range(len(num_runs))}
    runs = {key: [run(seconds)] for key, seconds in truth.items()}
    settle(runs, truth, noise=0.0, seed=0, contenders=contenders, repeats=3)
    assert sorted((len(some) for some in runs.values()), reverse=True) == num_runs


def test_a_lucky_first_run_is_found_out() -> None:
    """The slower median counts: one fast run of a slow layout does not make it the winner."""
    wins = 0
    for seed in range(40):
        # The first is 5 % slower in truth.
        runs = {1: [run(0.93)], 2: [run(1.0)]}
        settle(runs, {1: 1.05, 2: 1.0}, noise=0.01, seed=seed)
        wins += tied(runs)[0] == 2
    assert wins >= 38


def test_a_change_of_speed_that_repeats_would_show_needs_no_runs_of_its_own() -> None:
    """2.5 % apart, the first repeated within 0.2 %: fewer than ten runs are needed, not 110."""
    runs = {
        5: [replace(run(0.8036), at=100.0), replace(run(0.8022), at=124.0)],
        4: [replace(run(0.8231), at=80.0)],
    }
    found = judge(runs, contenders=3, repeats=2)
    assert found is not None and sorted(found.tied) == [4, 5]
    assert found.runs_to_decide is not None and found.runs_to_decide < 10
    # 25 % apart, one more run of the second one should do.
    runs[4] = [replace(run(1.0), at=80.0)]
    found = judge(runs, contenders=3, repeats=2)
    assert found is not None and sorted(found.tied) == [4, 5]
    assert found.runs_to_decide == 2


def test_the_wider_the_interval_of_single_runs_the_more_runs_are_needed() -> None:
    """13 % apart on a machine with others' load; the normal quantile of 1 - 0.004 is 2.652."""
    needed = []
    for load_sd in (0.05, 0.1, 0.2, 0.4):
        once = {
            key: [Run(step_seconds=seconds, relative_confidence=0.01, load_sd=load_sd)]
            for key, seconds in ((1, 1.0), (2, 1.13))
        }
        found = judge(once, contenders=3, repeats=2)
        assert found is not None and len(found.tied) == 2
        least = 2 * (2.652 * load_sd / log(1.13)) ** 2
        assert found.runs_to_decide is not None and found.runs_to_decide >= least
        needed.append(found.runs_to_decide)
    assert needed == sorted(needed) and needed[0] < 4 and needed[-1] > 100


def test_a_second_layout_that_ran_once_needs_as_many_runs_as_one_that_ran_twice() -> None:
    """Repeats vary by a quarter: a single run is not taken to vary by less."""
    others = {3: [at(2.0, 10.0), at(2.9, 30.0), at(1.9, 60.0), at(2.4, 80.0)]}
    first = [at(1.0, 0.0), at(1.4, 40.0)]
    needed = []
    for second in ([at(1.35, 20.0)], [at(1.2, 20.0), at(1.5, 50.0)]):
        found = judged({1: first, 2: second, **others})
        assert found.tied_by_speed[:2] == (1, 2) and found.margin is not None
        # In the unit of each lead, which the estimate takes as it is.
        assert found.runs_to_decide is not None
        needed.append(found.runs_to_decide * log(1 + found.margin.value) ** 2)
    once, twice = needed
    assert twice / 2 < once < 2 * twice


def test_two_layouts_that_differ_by_less_than_the_noise_are_seldom_called_decided() -> None:
    wrong = 0
    for seed in range(200):
        random = Random(seed)
        truth = {1: 1.0, 2: 1.002, 3: 1.01}
        runs = {key: [run(seconds * (1 + random.gauss(0, 0.02)))] for key, seconds in truth.items()}
        settle(runs, truth, noise=0.02, seed=seed + 1000)
        decided = tied(runs)
        wrong += 1 not in decided
    # The true best is shut out in at most a tenth.
    assert wrong <= 20


def test_runs_that_vary_widen_all_intervals() -> None:
    calm = judge({1: [run(1.0), run(1.0)], 2: [run(1.05)]}, contenders=3, repeats=2)
    wild = judge({1: [run(1.0), run(1.2)], 2: [run(1.05)]}, contenders=3, repeats=2)
    assert calm is not None
    assert wild is not None
    assert wild.intervals[2][1] - wild.intervals[2][0] > calm.intervals[2][1] - calm.intervals[2][0]


def test_one_contender_is_confirmed_alone() -> None:
    runs = {1: [run(1.0)], 2: [run(1.001)], 3: [run(1.002)]}
    settle(runs, {1: 1.0, 2: 1.001, 3: 1.002}, noise=0.0, seed=0, contenders=1, repeats=2)
    assert [len(some) for some in runs.values()] == [3, 1, 1]


def test_where_each_ran_once_it_rests_on_what_is_usual() -> None:
    """Published repeats differ by 1 to 4 %: of single runs 8 % is no tie, 3 % is one."""
    apart, near = ({1: [run(1.0, None)], 2: [run(gap, None)]} for gap in (1.08, 1.03))
    assert tied(apart) == [1]
    assert tied(near) == [1, 2]
    verdict = judge(apart, contenders=4, repeats=3)
    assert verdict is not None
    assert verdict.num_repeats == 0
    # It is not the winner before a second run has said so.
    assert verdict.repeat is not None


# The spread of a program that may have been slowed down fourfold: log(4) / sqrt(12)
BUSY_SD = 0.4


def busy(seconds: float, at: float) -> Run:
    return Run(
        step_seconds=seconds, relative_confidence=0.001, load_sd=BUSY_SD, at=at, nodes=("a",)
    )


def test_repeats_that_agree_on_a_busy_machine_show_that_its_load_did_little() -> None:
    """A program that waits rather than computes cannot win if it is 2.7 times slower."""
    once = {
        1: [busy(0.04226, 0)],
        3: [busy(0.0524, 10)],
        4: [busy(0.0728, 15)],
        5: [busy(0.1143, 20)],
    }
    verdict = judge(once, contenders=3, repeats=2)
    assert verdict is not None
    assert len(verdict.tied) > 1, "nothing was repeated, and the load may have done anything"
    repeated = {
        **once,
        1: [*once[1], busy(0.04224, 30), busy(0.04226, 60)],
        4: [*once[4], busy(0.0729, 40)],
    }
    verdict = judge(repeated, contenders=3, repeats=2)
    assert verdict is not None
    assert verdict.tied == (1,)


def test_repeats_that_differ_on_a_busy_machine_show_that_its_load_did_much() -> None:
    runs = {
        1: [busy(1.0, 0), busy(1.9, 30), busy(1.4, 60)],
        2: [busy(1.7, 10), busy(1.1, 40), busy(1.5, 70)],
        3: [busy(1.6, 20)],
    }
    verdict = judge(runs, contenders=3, repeats=2)
    assert verdict is not None
    assert len(verdict.tied) > 1
    assert verdict.spread is not None
    assert verdict.spread > 0.2


def test_repeats_still_to_come_are_counted_layout_by_layout() -> None:
    # Five for each of two contenders, two for the others; what was done more often counts once.
    assert most_repeats_with_drift([0, 0, 0], contenders=2, repeats=2) == 12
    assert most_repeats_with_drift([1, 5, 4], contenders=2, repeats=2) == 4
    assert most_repeats_with_drift([0] * 40, contenders=2, repeats=2) == 5 * 2 + 2 * 14


def test_the_spread_is_that_of_the_logarithms_of_repeats_pooled_over_layouts() -> None:
    # Deviations of log 1.2 / 2 from two means, twice each, and none of a single run: of 1 + 1
    # degrees of freedom.
    runs = {1: [run(1.0), run(1.2)], 2: [run(2.0), run(2.4)], 3: [run(9.0)]}
    verdict = judge(runs, contenders=3, repeats=2)
    assert verdict is not None
    assert verdict.spread == pytest.approx(sqrt(4 * (log(1.2) / 2) ** 2 / 2))


def test_a_repeat_that_is_under_way_is_not_asked_for_again() -> None:
    runs = {1: [run(1.0)], 2: [run(2.0)]}
    found = judge(runs, contenders=3, repeats=2, under_way=[1])
    assert found is not None
    assert found.repeat is None
    both_tied = {1: [run(1.0)], 2: [run(1.001)]}
    assert judged(both_tied, repeats=1, under_way=[1]).repeat == 2
    assert judged(both_tied, repeats=1, under_way=[1, 2]).repeat is None


def test_a_layout_that_cannot_be_repeated_is_not_asked_for() -> None:
    runs = {1: [run(1.0)], 2: [run(1.001)], 3: [run(2.0)]}
    asked = [
        None if found is None else found.repeat
        for given_up in ([1], [2], [1, 2], [3])
        for found in [judge(runs, contenders=3, repeats=2, given_up=given_up)]
    ]
    assert asked == [2, 1, None, 1]


def at(seconds: float, when: float, node: str = "a", purpose: Purpose | None = None) -> Run:
    return Run(
        step_seconds=seconds, relative_confidence=0.01, at=when, nodes=(node,), purpose=purpose
    )


def confirmed(seconds: float, when: float) -> Run:
    return at(seconds, when, purpose=Purpose.CONFIRMATION)


def test_of_two_contenders_the_one_that_ran_last_is_not_repeated_next() -> None:
    assert judged({1: [at(1.0, 100.0)], 2: [at(1.001, 0.0)]}).repeat == 2
    assert judged({1: [at(1.0, 0.0)], 2: [at(1.001, 100.0)]}).repeat == 1


def test_a_layout_that_drift_may_have_slowed_is_repeated_though_it_is_not_tied() -> None:
    verdict = judged({1: [at(1.0, 0.0)], 2: [at(1.1, 3600.0)]}, under_way=[1])
    assert (verdict.tied, verdict.repeat) == ((1,), 2)


def test_a_winner_that_an_anchor_has_shown_since_the_machine_changed_is_not_repeated() -> None:
    runs = {
        1: [at(1.0, 700.0), at(1.0, 1200.0, purpose=Purpose.ANCHOR)],
        2: [at(7.5, 0.0), at(5.0, 600.0), at(5.0, 900.0)],
    }
    verdict = judged(runs)
    assert verdict.change is not None
    assert (verdict.tied, verdict.repeat) == ((1,), None)


def test_a_winner_is_repeated_until_its_median_run_is_of_the_machine_as_it_is_now() -> None:
    """The machine became 1.6 times as fast at 350 s."""
    runs = {
        1: [confirmed(1.6, 0.0), confirmed(1.6, 200.0)],
        2: [at(4.8, 100.0), at(4.8, 300.0), at(3.0, 400.0), at(3.0, 500.0)],
    }
    while (verdict := judged(runs)).repeat is not None:
        assert (verdict.tied, verdict.repeat) == ((1,), 1)
        runs[1].append(confirmed(1.0, 600.0 + 60.0 * len(runs[1])))
    assert [one.step_seconds for one in runs[1]] == [1.6, 1.6, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("repeats", [1, 2])
def test_once_the_machine_has_changed_the_contenders_have_more_rounds_than_the_others(
    repeats: int,
) -> None:
    """Five layouts are equal; an anchor shows that the machine became 1.6 times as fast."""
    runs = {9: [at(4.8, 0.0), at(4.8, 10.0), at(3.0, 20.0), at(3.0, 30.0)]}
    runs |= {key: [at(1.0, 40.0 + key)] for key in range(5)}
    now = 100.0
    expected = most_repeats_with_drift([0] * 5, contenders=2, repeats=repeats)
    for _ in range(expected + 1):
        verdict = judge(runs, contenders=2, repeats=repeats)
        assert verdict is not None and verdict.change is not None
        if verdict.repeat is None:
            break
        runs[verdict.repeat].append(confirmed(1.0, now))
        now += 10.0
    assert sum(len(runs[key]) - 1 for key in range(5)) == expected


def test_more_layouts_are_compared_once_the_machine_has_changed() -> None:
    """The machine became 1.6 times as fast before the last 70 layouts ran."""
    steady = {1: [at(1.0, 0.0), at(1.0, 700.0)]}
    changed = {1: [at(1.6, 0.0), at(1.6, 20.0), at(1.0, 40.0), at(1.0, 700.0)]}
    singles = {key: [at(1.2 + key / 1000, 50.0 + key)] for key in range(10, 80)}
    # It is the slowest as measured, and would take 0.94 s now.
    slowed = {2: [at(1.5, 10.0)]}
    assert len(judged(steady | singles | slowed, repeats=0).order) == CONSIDERED == 16
    verdict = judged(changed | singles | slowed, repeats=0)
    assert len(verdict.order) > CONSIDERED
    assert 2 in verdict.tied


def test_what_was_ended_early_on_a_node_that_proved_slow_could_win() -> None:
    """Node b takes 1.5 times as long."""
    runs = {
        1: [at(1.0, 0.0), at(1.5, 100.0, "b"), at(1.0, 200.0)],
        2: [at(1.1, 50.0), at(1.65, 250.0, "b")],
    }
    ended_early = {
        3: at(1.35, 120.0, "b"),  # 0.9 elsewhere
        4: at(2.4, 130.0, "b"),  # 1.6 elsewhere
        5: at(1.35, 140.0),
    }
    assert ended_early_that_could_win(runs, ended_early, fit(runs)) == [3]


def test_what_was_ended_early_while_the_machine_was_slow_could_win() -> None:
    times = {0.0: 1.6, 100.0: 1.6, 200.0: 1.6, 300.0: 1.0, 400.0: 1.0, 500.0: 1.0}
    runs = {1: [at(seconds, when) for when, seconds in times.items()], 2: [at(1.2, 450.0)]}
    ended_early = {3: at(1.5, 150.0), 4: at(1.5, 350.0), 5: at(3.0, 150.0)}
    assert ended_early_that_could_win(runs, ended_early, fit(runs)) == [3]


def test_on_a_machine_that_stays_as_it_is_what_was_ended_early_stays_so() -> None:
    runs = {1: [at(1.0, when) for when in (0.0, 100.0, 300.0, 600.0)], 2: [at(1.05, 200.0)]}
    ended_early = {key: at(1.26 + 0.1 * key, 50.0 * key) for key in range(3, 9)}
    assert ended_early_that_could_win(runs, ended_early, fit(runs)) == []


def test_of_many_that_were_ended_early_the_nearest_without_the_machine_s_drift_are_compared() -> (
    None
):
    """Node b takes 1.5 times as long; the layout that ended there was the slowest but for that."""
    runs = {
        1: [at(1.0, 0.0), at(1.5, 100.0, "b"), at(1.0, 200.0)],
        2: [at(1.1, 50.0), at(1.65, 250.0, "b")],
    }
    ended_early = {key: at(1.3 + key / 1000, 120.0 + key) for key in range(10, 10 + 2 * CONSIDERED)}
    ended_early[3] = at(1.4, 120.0, "b")
    assert ended_early_that_could_win(runs, ended_early, fit(runs)) == [3]

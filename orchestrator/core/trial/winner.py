"""Finds the winner among a cell's fastest layouts: the only one that could be the fastest.

Step times are compared without the machine's drift (drift.py). The contenders are the layouts that
could be the fastest, considering when and where they ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, hypot, log, log1p, sqrt
from statistics import NormalDist

import numpy as np

from orchestrator.core.trial.drift import MOST_CORRECTED, Drift, SpeedChange, fit
from orchestrator.core.trial.drift_prior import SEEN
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.run import USUAL_SD, Run

WIDTH = 1.96  # standard deviations for 95 %
# A layout is tied with the best if it is faster with at least this probability.
COULD_WIN = 0.004
USUAL_VARIATION = "1 to 4 %"  # of published repeats of one layout
# Fastest layouts of a cell that are compared, in addition to the repeated ones.
CONSIDERED = 16
# The same three once the machine has changed, since the measured order shows less then. The rounds
# come after the repeats of the file, for as many contenders as the file says.
CONSIDERED_WITH_DRIFT = 64
# The fastest of the layouts that were ended early; the others were far too slow.
MOST_ENDED_EARLY = 1024
MOST_CONTENDERS = 16
MORE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Margin:
    """The lead of the best over the next in speed, relative, with its 95 % interval."""

    runner_up: int
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, runner_up: int, mean: float, sd: float) -> Margin:
        """Return the margin of a difference of logarithms of step times."""
        value, low, high = (exp(mean + side * WIDTH * sd) - 1 for side in (0, -1, 1))
        return cls(runner_up=runner_up, value=value, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The order of a cell's fastest layouts, by trial id."""

    best: int  # smallest expected step time
    # The best and those that could be faster, the likeliest first. The best alone is the winner.
    tied: Sequence[int]
    order: Sequence[int]  # all considered, the fastest first
    # By considered layout: seconds of a step on the machine of the last run.
    intervals: Mapping[int, tuple[float, float]]
    run_sd: float  # relative, of consecutive runs
    # As measured, relative: with drift and the load of others. None: nothing was repeated.
    spread: float | None
    num_repeats: int  # 0: `run_sd` is the usual value
    change: SpeedChange | None  # of the machine; None: only noise
    repeat: int | None  # next; None: settled, or none left
    margin: Margin | None  # None: nothing else was measured
    # Each of the first two must run about so often until their difference shows. None: they are not
    # tied with each other, or they are equal.
    runs_to_decide: int | None

    @property
    def is_settled(self) -> bool:
        """True if one layout is the winner."""
        return len(self.tied) == 1

    @property
    def tied_by_speed(self) -> tuple[int, ...]:
        """The tied layouts as people see them, the fastest first, as in `order`."""
        return tuple(key for key in self.order if key in self.tied)


def judge(
    runs: Mapping[int, Sequence[Run]],
    *,
    contenders: int,
    repeats: int,
    under_way: Collection[int] = (),
    given_up: Collection[int] = (),
    drift: Drift | None = None,
) -> Verdict | None:
    """Judge the runs of a cell, and select the layout to repeat next. None: nothing was measured.

    Each layout that could be the best is repeated once per round; each round has half as many
    `contenders`. `repeats` is how often one layout is measured after its first run. The best is
    always repeated once, so that no single lucky run wins. Once the machine has changed, all that
    could be the best are contenders, only confirmations count as repeats, there are MORE_ROUNDS,
    and the winner is repeated until its median run is of the machine as it is now. `under_way` are
    being repeated; `given_up` cannot be repeated; `drift`: of these runs, if known.
    """
    if not runs:
        return None
    # With neither repeats nor a wish for any, the model of drift is not needed.
    if not repeats and all(len(some) == 1 for some in runs.values()):
        fastest = sorted(runs, key=lambda key: (runs[key][0].step_seconds, key))[:CONSIDERED]
        ranking = _rank_single_runs({key: runs[key][0] for key in fastest})
    else:
        ranking = _rank(runs, drift)
    repeat = None
    if repeats:
        repeat = _next(
            runs,
            ranking,
            contenders=contenders,
            repeats=repeats,
            under_way=under_way,
            given_up=given_up,
        )
    return Verdict(
        best=ranking.order[0],
        tied=tuple(ranking.tied),
        order=tuple(ranking.order),
        intervals=ranking.intervals,
        run_sd=ranking.run_sd,
        spread=_spread(runs),
        num_repeats=sum(len(some) - 1 for some in runs.values()),
        change=ranking.change,
        repeat=repeat,
        margin=ranking.margin,
        runs_to_decide=_runs_to_decide(runs, ranking),
    )


def ended_early_that_could_win(
    runs: Mapping[int, Sequence[Run]], ended_early: Mapping[int, Run], drift: Drift
) -> list[int]:
    """Return the layouts that were ended early and could be the fastest, the likeliest first.

    `ended_early`: the fastest step of each, as a run. A machine or a node that was slow then makes
    a fast layout look slow. `drift`: fitted to `runs`, which must not be empty.
    """
    fastest = sorted(ended_early, key=lambda key: (ended_early[key].step_seconds, key))
    fastest = fastest[:MOST_ENDED_EARLY]
    logs: dict[int, float] = {}
    for begin in range(0, len(fastest), MOST_CORRECTED):
        some = fastest[begin : begin + MOST_CORRECTED]
        corrections = drift.corrections([ended_early[key] for key in some])
        for key, correction in zip(some, corrections.tolist(), strict=True):
            logs[key] = log(ended_early[key].step_seconds) + correction
    nearest = sorted(fastest, key=lambda key: (logs[key], key))[:CONSIDERED]
    known = {**runs, **{key: [ended_early[key]] for key in nearest}}
    found = drift.estimate(known, [*_fastest(runs, drift), *nearest])
    _, faster = found.faster()
    chances = dict(zip(found.keys, faster.tolist(), strict=True))
    could_win = [key for key in nearest if chances[key] > COULD_WIN]
    return sorted(could_win, key=lambda key: (-chances[key], key))


def median_run(runs: Sequence[Run]) -> Run:
    """Return the run with the median step time; of an even number of runs the slower median."""
    return sorted(runs, key=lambda run: run.step_seconds)[len(runs) // 2]


def _runs_to_decide(runs: Mapping[int, Sequence[Run]], ranking: _RankedTrials) -> int | None:
    """Estimate how often each of the first two must run until their difference shows.

    This assumes that the difference stays as it is, and that the variance which its interval shows
    falls with the number of runs. One of them must run at least once more. If one of them has run
    only once, that variance is at most the one by which runs are known to vary, drift and the load
    of others included: more of it is a change of the machine's speed, which runs of both in turn
    will show. None: they are not tied with each other, or they are equal.
    """
    margin = ranking.margin
    if margin is None or margin.value <= 0 or margin.runner_up not in ranking.tied:
        return None
    compared = [runs[key] for key in (ranking.order[0], margin.runner_up)]
    nums = [len(some) for some in compared]
    sd = (log1p(margin.high) - log1p(margin.low)) / (2 * WIDTH)
    in_one_run = sd**2 / sum(1 / num for num in nums)
    if min(nums) == 1:
        own = max(run.variance for some in compared for run in some)
        in_one_run = min(in_one_run, ranking.run_sd**2 + (_spread(runs) or 0.0) ** 2 + own)
    needed_sd = log1p(margin.value) / NormalDist().inv_cdf(1 - COULD_WIN)
    return max(ceil(2 * in_one_run / needed_sd**2), min(nums) + 1)


def _spread(runs: Mapping[int, Sequence[Run]]) -> float | None:
    """The standard deviation of the logarithms of one layout's runs, pooled over layouts."""
    squares, degrees = 0.0, 0
    for some in runs.values():
        logs = [log(run.step_seconds) for run in some]
        mean = sum(logs) / len(logs)
        squares += sum((one - mean) ** 2 for one in logs)
        degrees += len(logs) - 1
    return sqrt(squares / degrees) if degrees else None


@dataclass(frozen=True, kw_only=True)
class _RankedTrials:
    order: Sequence[int]
    tied: Sequence[int]
    # As `tied`, allowing for drift that no repeat has shown yet.
    could_win: Sequence[int]
    intervals: Mapping[int, tuple[float, float]]
    run_sd: float
    change: SpeedChange | None
    # The median run of the best is at the machine's present speed.
    is_best_current: bool
    margin: Margin | None


def _rank(runs: Mapping[int, Sequence[Run]], drift: Drift | None) -> _RankedTrials:
    drift = fit(runs) if drift is None else drift
    found = drift.estimate(runs, _fastest(runs, drift))
    keys, (means, faster) = found.keys, found.faster()
    order = sorted(range(len(keys)), key=lambda place: (means[place], keys[place]))
    likeliest = sorted(order, key=lambda place: -faster[place])
    could_win = [keys[place] for place in likeliest if faster[place] > COULD_WIN]
    if all(len(some) == 1 for some in runs.values()):
        return replace(_rank_single_runs({key: runs[key][0] for key in keys}), could_win=could_win)
    sds, best = found.sd(), keys[order[0]]
    return _RankedTrials(
        order=[keys[place] for place in order],
        tied=could_win,
        could_win=could_win,
        intervals={keys[place]: _interval(means[place], sds[place]) for place in order},
        run_sd=drift.run_sd,
        change=drift.change,
        is_best_current=drift.change is None
        or abs(float(drift.corrections([median_run(runs[best])])[0])) < log(1 + SEEN),
        margin=Margin.of(keys[order[1]], *found.ahead(best, keys[order[1]]))
        if len(order) > 1
        else None,
    )


def _rank_single_runs(runs: Mapping[int, Run]) -> _RankedTrials:
    """Rank layouts that ran once; their runs vary as published repeats of one layout do."""
    order = sorted(runs, key=lambda key: (runs[key].step_seconds, key))
    logs = {key: log(run.step_seconds) for key, run in runs.items()}
    sds = {key: sqrt(max(run.variance, USUAL_SD**2)) for key, run in runs.items()}
    best = order[0]
    tied = [key for key in order if logs[key] - logs[best] <= WIDTH * hypot(sds[key], sds[best])]
    return _RankedTrials(
        order=order,
        tied=tied,
        could_win=tied,
        intervals={key: _interval(logs[key], sds[key]) for key in order},
        run_sd=USUAL_SD,
        change=None,
        is_best_current=True,
        margin=Margin.of(order[1], logs[order[1]] - logs[best], hypot(sds[order[1]], sds[best]))
        if len(order) > 1
        else None,
    )


def _interval(mean: float, sd: float) -> tuple[float, float]:
    """The 95 % interval of a step time, by its logarithm's mean and standard deviation."""
    return exp(mean - WIDTH * sd), exp(mean + WIDTH * sd)


def _fastest(runs: Mapping[int, Sequence[Run]], drift: Drift) -> list[int]:
    """The fastest by their median runs, on the machine of the last repeat."""
    medians = [median_run(some) for some in runs.values()]
    logs = np.log([run.step_seconds for run in medians])
    num = CONSIDERED
    if drift.change is not None:
        logs, num = logs + drift.corrections(medians), CONSIDERED_WITH_DRIFT
    return [key for _, key in sorted(zip(logs, runs, strict=True))[:num]]


def _next(
    runs: Mapping[int, Sequence[Run]],
    ranking: _RankedTrials,
    *,
    contenders: int,
    repeats: int,
    under_way: Collection[int],
    given_up: Collection[int],
) -> int | None:
    changed = ranking.change is not None
    best, could_win = ranking.order[0], ranking.could_win
    done = {
        key: _num_repeats(runs[key], only_confirming=changed) + (key in under_way)
        for key in could_win
    }
    rounds = repeats + (MORE_ROUNDS if changed else 0)
    done |= {key: rounds for key in given_up if key in done}
    if len(could_win) == 1 and (len(runs[best]) > 1 or done[best]) and ranking.is_best_current:
        return None
    times = {key: [run.at for run in runs[key] if run.at is not None] for key in could_win}
    timed = [key for key in could_win if times[key]]
    last = max(timed, key=lambda key: max(times[key]), default=None)
    num_staying = MOST_CONTENDERS if changed else contenders
    for number in range(1, rounds + 1):
        staying = could_win[:num_staying]
        behind = [key for key in staying if done[key] < number]
        if behind:
            # Not the same layout twice in a row: two consecutive runs share the hour's conditions.
            others = [key for key in behind if key != last and key not in under_way]
            return min(others or behind, key=lambda key: (done[key], staying.index(key)))
        if changed:
            num_staying = MOST_CONTENDERS if number < repeats else contenders
        else:
            # One contender alone could not be compared.
            num_staying = min(contenders, max(2, (num_staying + 1) // 2))
    return None


def most_repeats_with_drift(done: Sequence[int], contenders: int, repeats: int) -> int:
    """Return the most repeats that `judge` still asks for once the machine has changed.

    `done`: how often each layout that could win was repeated to confirm it, the likeliest first.
    """
    return sum(
        max(repeats + (MORE_ROUNDS if place < contenders else 0) - num, 0)
        for place, num in enumerate(done[:MOST_CONTENDERS])
    )


def _num_repeats(runs: Sequence[Run], *, only_confirming: bool) -> int:
    if not only_confirming:
        return len(runs) - 1
    return sum(run.purpose is Purpose.CONFIRMATION for run in runs)

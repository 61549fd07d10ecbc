"""Which of a cell's fastest layouts is the winner: told from repeated runs, and called one only where no other could be faster.

What a layout takes is judged with the machine's drift taken out (drift.py). The contenders are those that could be the fastest, given when and where they ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from orchestrator.core.trial.drift import SEEN, USUAL_SD, Drift, Run, SpeedChange, fit
from orchestrator.core.trial.purpose import Purpose

WIDTH = 1.96  # standard deviations to either side: 95 %
COULD_WIN = 0.004  # probability of being faster than the best, above which a layout is tied with it
USUAL_VARIATION = "1 to 4 %"  # of published repeats of one layout
CONSIDERED = 16  # of a cell's fastest, besides what was repeated, that are compared with each other
# The same once the machine was seen to change: the measured order tells less then.
CONSIDERED_WITH_DRIFT = 64
MOST_CONTENDERS = 16  # once the machine was seen to change
# Rounds beyond the repeats of the file once the machine was seen to change, for as many contenders as the file says.
MORE_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of the order at the top, of things named by integers (trial ids)."""

    best: int  # smallest expected step time
    # Those that could be faster than the best, the likeliest first, and the best itself: alone it is the winner.
    tied: Sequence[int]
    order: Sequence[int]  # all that was considered, the fastest first
    # By considered layout: seconds of a step, with the machine as it is at the last run.
    intervals: Mapping[int, tuple[float, float]]
    run_sd: float  # relative standard deviation of one layout's runs next to each other
    # As measured, relative: drift and the load of others included. None: nothing was repeated.
    spread: float | None
    num_repeats: int  # that it is told from; 0: it is what is usual
    change: SpeedChange | None  # how the machine changed; None: not by more than noise
    repeat: (
        int | None
    )  # to be measured once more next; None: it is settled, or the repeats are spent

    @property
    def is_settled(self) -> bool:
        """Whether one layout is the winner."""
        return len(self.tied) == 1


def judge(
    runs: Mapping[int, Sequence[Run]],
    *,
    contenders: int,
    repeats: int,
    under_way: Collection[int] = (),
    given_up: Collection[int] = (),
    drift: Drift | None = None,
) -> Verdict | None:
    """Judge, and say what to repeat next: of those that could be the best, each in turn, half of the `contenders` in each further round.

    `repeats` is how often one layout is measured beyond its first run. The best is always repeated once, so that no single lucky run wins. Once the
    machine was seen to change, all that could be the best are contenders, only runs that were made to confirm count as repeats, a few are granted more, and
    the winner is repeated until the run that stands for it is of the machine as it is.
    `under_way` are repeated now; `given_up` cannot be repeated; `drift` is what these runs tell of the machine, where that is known already.
    None: nothing was measured.
    """
    if not runs:
        return None
    # Without repeats, and where none is asked for, nothing needs the model of drift.
    is_usual = not repeats and all(len(some) == 1 for some in runs.values())
    standing = _by_what_is_usual(_leading(runs)) if is_usual else _standing(runs, drift)
    return Verdict(
        best=standing.order[0],
        tied=tuple(standing.tied),
        order=tuple(standing.order),
        intervals=standing.intervals,
        run_sd=standing.run_sd,
        spread=_spread(runs),
        num_repeats=sum(len(some) - 1 for some in runs.values()),
        change=standing.change,
        repeat=_next(
            runs,
            standing,
            contenders=contenders,
            repeats=repeats,
            under_way=under_way,
            given_up=given_up,
        )
        if repeats
        else None,
    )


def median_run(runs: Sequence[Run]) -> Run:
    """The run that stands for all; of an even number the slower in the middle: what one run promised, another has to keep."""
    return sorted(runs, key=lambda run: run.step_seconds)[len(runs) // 2]


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
class _Standing:
    order: Sequence[int]
    tied: Sequence[int]
    # As `tied`, allowing for drift that no repeat has shown yet.
    could_win: Sequence[int]
    intervals: Mapping[int, tuple[float, float]]
    run_sd: float
    change: SpeedChange | None
    stands_for_now: bool  # the run that stands for the best was measured on the machine as it is


def _standing(runs: Mapping[int, Sequence[Run]], drift: Drift | None) -> _Standing:
    drift = fit(runs) if drift is None else drift
    found = drift.estimate(runs, _fastest(runs, drift))
    means, faster = found.faster()
    order = sorted(range(len(found.keys)), key=lambda place: (means[place], found.keys[place]))
    could_win = [
        found.keys[place]
        for place in sorted(order, key=lambda place: -faster[place])
        if faster[place] > COULD_WIN
    ]
    if all(len(some) == 1 for some in runs.values()):
        return replace(
            _by_what_is_usual({key: runs[key][0] for key in found.keys}), could_win=could_win
        )
    sds, best = found.sd(), found.keys[order[0]]
    return _Standing(
        order=[found.keys[place] for place in order],
        tied=could_win,
        could_win=could_win,
        intervals={
            found.keys[place]: (
                exp(means[place] - WIDTH * sds[place]),
                exp(means[place] + WIDTH * sds[place]),
            )
            for place in order
        },
        run_sd=drift.run_sd,
        change=drift.change,
        stands_for_now=drift.change is None
        or abs(float(drift.corrections([median_run(runs[best])])[0])) < log(1 + SEEN),
    )


def _leading(runs: Mapping[int, Sequence[Run]]) -> dict[int, Run]:
    """The fastest of layouts that ran once."""
    order = sorted(runs, key=lambda key: (runs[key][0].step_seconds, key))
    return {key: runs[key][0] for key in order[:CONSIDERED]}


def _by_what_is_usual(runs: Mapping[int, Run]) -> _Standing:
    """Nothing was repeated: what runs of one layout vary by is not known, and taken from what was published."""
    order = sorted(runs, key=lambda key: (runs[key].step_seconds, key))
    best = runs[order[0]]
    sds = {key: sqrt(max(run.variance, USUAL_SD**2)) for key, run in runs.items()}
    tied = [
        key
        for key in order
        if log(runs[key].step_seconds / best.step_seconds)
        <= WIDTH * sqrt(sds[key] ** 2 + sds[order[0]] ** 2)
    ]
    return _Standing(
        order=order,
        tied=tied,
        could_win=tied,
        intervals={
            key: (
                runs[key].step_seconds * exp(-WIDTH * sds[key]),
                runs[key].step_seconds * exp(WIDTH * sds[key]),
            )
            for key in order
        },
        run_sd=USUAL_SD,
        change=None,
        stands_for_now=True,
    )


def _fastest(runs: Mapping[int, Sequence[Run]], drift: Drift) -> list[int]:
    """The fastest by their median runs, as the machine is at the last repeat."""
    standing = {key: median_run(some) for key, some in runs.items()}
    off = (
        drift.corrections(list(standing.values()))
        if drift.change is not None
        else [0.0] * len(standing)
    )
    seconds = {
        key: log(run.step_seconds) + float(one)
        for (key, run), one in zip(standing.items(), off, strict=True)
    }
    num = CONSIDERED if drift.change is None else CONSIDERED_WITH_DRIFT
    return sorted(seconds, key=lambda key: (seconds[key], key))[:num]


def _next(
    runs: Mapping[int, Sequence[Run]],
    standing: _Standing,
    *,
    contenders: int,
    repeats: int,
    under_way: Collection[int],
    given_up: Collection[int],
) -> int | None:
    changed = standing.change is not None
    best, could_win = standing.order[0], standing.could_win
    done = {
        key: _num_repeats(runs[key], only_confirming=changed) + (key in under_way)
        for key in could_win
    }
    rounds = repeats + (MORE_ROUNDS if changed else 0)
    done |= {key: rounds for key in given_up if key in done}
    newest = {
        key: max((run.at for run in runs[key] if run.at is not None), default=None)
        for key in could_win
    }
    last = max(
        (key for key in could_win if newest[key] is not None),
        key=lambda key: newest[key] or 0.0,
        default=None,
    )
    staying = MOST_CONTENDERS if changed else contenders
    for round_of in range(1, rounds + 1):
        still = could_win[: max(1, staying)]
        if (
            len(could_win) == 1
            and (len(runs[best]) > 1 or done[best])
            and (standing.stands_for_now or done[best] >= rounds)
        ):
            return None
        behind = [key for key in still if done[key] < round_of]
        if behind:
            # Not the same one twice in a row: what two runs next to each other agree on may be the hour's, not the layout's.
            others = [key for key in behind if key != last and key not in under_way]
            return min(others or behind, key=lambda key: (done[key], still.index(key)))
        if changed:
            staying = MOST_CONTENDERS if round_of < repeats else contenders
        else:
            # A single contender could not be told from the others.
            staying = min(contenders, max(2, (staying + 1) // 2))
    return None


def most_repeats_with_drift(num_tied: int, contenders: int, repeats: int) -> int:
    """The most repeats that `judge` asks for once the machine was seen to change."""
    return min(num_tied, MOST_CONTENDERS) * repeats + min(num_tied, contenders) * MORE_ROUNDS


def _num_repeats(runs: Sequence[Run], *, only_confirming: bool) -> int:
    if not only_confirming:
        return len(runs) - 1
    return sum(run.purpose is Purpose.CONFIRMATION for run in runs)

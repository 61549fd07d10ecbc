"""Which of a cell's fastest layouts is the winner: told from repeated runs, and called one only where its interval stands apart.

One run says how its own steps vary; how runs of one layout vary among themselves (another node, a busier network) only repeats say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

WIDTH = 1.96  # standard deviations to either side: 95 %
RUN_SD = 0.01  # relative, of runs of one layout, before any repeat has shown it: published repeats differ by 0.7 to 4 %
RUN_SD_WEIGHT = 4.0  # in runs: how long that is believed against what repeats show
STEP_SD = 0.02  # relative, of a run's median step time where the run itself cannot tell


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one attempt of a layout measured."""

    step_seconds: float  # median
    relative_confidence: float | None = None  # half the 95 % interval of that median, relative; None: too few steps to tell
    load_sd: float = 0.0  # relative standard deviation that the machine's load by others adds (core/machine_load.py)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of the order at the top, of things named by integers (trial ids)."""

    best: int  # smallest median of its runs
    tied: Sequence[int]  # with the best and among themselves, fastest first, the best included: alone it is the winner
    intervals: Mapping[int, tuple[float, float]]  # seconds of a step, of every one that was given
    run_sd: float  # relative standard deviation of one layout's runs, as the intervals take it
    repeat: int | None  # to be measured once more next; None: it is settled, or the repeats are spent

    @property
    def is_settled(self) -> bool:
        """Whether one layout is the winner."""
        return len(self.tied) == 1


def judge(runs: Mapping[int, Sequence[Run]], *, contenders: int, repeats: int) -> Verdict | None:
    """Judge by successive halving in repeats: of the `contenders` fastest that cannot be told apart, half stay in each further round.

    `repeats` is how often one layout is measured beyond its first run. The best is always repeated once, so that no single lucky run wins.
    None: nothing was measured.
    """
    if not runs:
        return None
    centres = {key: log(median_run(some).step_seconds) for key, some in runs.items()}
    run_variance = _run_variance(runs)
    half = {key: WIDTH * sqrt((_step_variance(some) + run_variance) / len(some)) for key, some in runs.items()}
    order = sorted(runs, key=lambda key: (centres[key], key))
    best = order[0]
    tied = [key for key in order if centres[key] - half[key] <= centres[best] + half[best]]
    return Verdict(
        best=best,
        tied=tuple(tied),
        intervals={key: (exp(centres[key] - half[key]), exp(centres[key] + half[key])) for key in order},
        run_sd=sqrt(run_variance),
        repeat=_next(runs, tied, contenders=contenders, repeats=repeats),
    )


def median_run(runs: Sequence[Run]) -> Run:
    """The run that stands for all; of an even number the slower in the middle: what one run promised, another has to keep."""
    return sorted(runs, key=lambda run: run.step_seconds)[len(runs) // 2]


def _next(runs: Mapping[int, Sequence[Run]], tied: Sequence[int], *, contenders: int, repeats: int) -> int | None:
    best = tied[0]
    staying = contenders
    for round_of in range(1, repeats + 1):
        still = tied[: max(1, staying)]
        if len(still) == 1 and len(tied) == 1 and len(runs[best]) > 1:
            return None
        behind = [key for key in still if len(runs[key]) <= round_of]
        if behind:
            return min(behind, key=lambda key: (len(runs[key]), still.index(key)))
        staying = min(contenders, max(2, (staying + 1) // 2))  # one alone could not be told from the others
    return None


def _run_variance(runs: Mapping[int, Sequence[Run]]) -> float:
    """Of log step times of one layout's runs, pooled over layouts, beside what is believed beforehand."""
    total, degrees = RUN_SD_WEIGHT * RUN_SD**2, RUN_SD_WEIGHT
    for some in runs.values():
        logs = [log(run.step_seconds) for run in some]
        mean = sum(logs) / len(logs)
        total += sum((x - mean) ** 2 for x in logs)
        degrees += len(logs) - 1
    return total / degrees


def _step_variance(some: Sequence[Run]) -> float:
    """Of one run's median, by what its steps and the load of its machine say; the mean over the runs."""
    known = [STEP_SD if run.relative_confidence is None else run.relative_confidence / WIDTH for run in some]
    return sum(sd**2 + run.load_sd**2 for sd, run in zip(known, some, strict=True)) / len(known)

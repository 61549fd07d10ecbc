"""Judges which measured layouts of a cell are on its front, by all their runs.

Step times are compared without the machine's drift (drift.py), as those of the winner are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from orchestrator.core.trial.drift import Drift, fit
from orchestrator.core.trial.front import Front, FrontPoint, front_of, minor_of
from orchestrator.core.trial.merit import Merit, OtherMerits
from orchestrator.core.trial.run import USUAL_SD, Run
from orchestrator.core.trial.winner import CONSIDERED_WITH_DRIFT, WIDTH, median_run

# Relative, of a step time before drift is known: layouts dominated by more are not looked at.
WIDE_SD = 0.05


@dataclass(frozen=True, kw_only=True)
class FrontVerdict:
    """The front of a cell, and the step times behind it."""

    front: Front
    # By layout: mean and standard deviation of the logarithm of its step time, as the machine is
    # now.
    log_seconds: Mapping[int, tuple[float, float]]
    # Layouts on the front that hardly add to its volume.
    minor: Collection[int]
    # Layouts that were measured without one of the merits: they are not compared.
    left_out: Sequence[int]

    def interval(self, key: int) -> tuple[float, float]:
        """Return the 95 % interval of a layout's seconds per step."""
        mean, sd = self.log_seconds[key]
        return exp(mean - WIDTH * sd), exp(mean + WIDTH * sd)


def judge_front(
    runs: Mapping[int, Sequence[Run]],
    others: Mapping[int, OtherMerits],
    merits: Sequence[Merit],
    *,
    drift: Drift | None = None,
) -> FrontVerdict:
    """Judge the layouts of a cell. `drift`: of these runs, if known."""
    known = {key: one for key in runs if (one := _known(others.get(key), merits)) is not None}
    left_out = [key for key in runs if key not in known]
    if all(len(some) == 1 for some in runs.values()):
        log_seconds = {key: _single(runs[key][0]) for key in known}
    else:
        drift = fit(runs) if drift is None else drift
        near = _near(runs, known, merits, drift)
        found = drift.estimate(runs, near)
        means, sds = (found.weights @ found.means).tolist(), found.sd().tolist()
        estimated = dict(zip(found.keys, zip(means, sds, strict=True), strict=True))
        log_seconds = {key: estimated[key] for key in near}
    points = [_point(key, log_seconds[key], known[key], merits) for key in log_seconds]
    front = front_of(points, merits)
    return FrontVerdict(
        front=front,
        log_seconds=log_seconds,
        minor=minor_of(front, points, merits),
        left_out=left_out,
    )


def _known(others: OtherMerits | None, merits: Sequence[Merit]) -> OtherMerits | None:
    """Return the merits of a layout if it has all of them."""
    others = others or OtherMerits()
    joules = others.joules_per_token
    if Merit.HEADROOM in merits and others.headroom is None:
        return None
    if Merit.EFFICIENCY in merits and (joules is None or joules <= 0):
        return None
    return others


def _single(run: Run) -> tuple[float, float]:
    return log(run.step_seconds), sqrt(max(run.variance, USUAL_SD**2))


def _near(
    runs: Mapping[int, Sequence[Run]],
    known: Mapping[int, OtherMerits],
    merits: Sequence[Merit],
    drift: Drift,
) -> list[int]:
    """Return the layouts that may be on the front, by their median runs."""
    medians = [median_run(runs[key]) for key in known]
    logs = np.log([run.step_seconds for run in medians])
    if drift.change is not None:
        logs = logs + drift.corrections(medians)
    times = {key: (mean, WIDE_SD) for key, mean in zip(known, logs.tolist(), strict=True)}
    found = front_of([_point(key, times[key], known[key], merits) for key in known], merits)
    return [*found.on, *found.possible][: max(CONSIDERED_WITH_DRIFT, len(found.on))]


def _point(
    key: int, log_seconds: tuple[float, float], others: OtherMerits, merits: Sequence[Merit]
) -> FrontPoint:
    mean, sd = log_seconds
    values: dict[str, float] = {Merit.SPEED: -mean}
    if Merit.HEADROOM in merits and others.headroom is not None:
        values[Merit.HEADROOM] = others.headroom
    if Merit.EFFICIENCY in merits and others.joules_per_token is not None:
        values[Merit.EFFICIENCY] = -log(others.joules_per_token)
    # Power is measured together with the time, and varies as much.
    return FrontPoint(key=key, values=values, sds={Merit.SPEED: sd, Merit.EFFICIENCY: sd})

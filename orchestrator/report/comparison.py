"""Compares layouts that were measured twice: in two sweeps, or with two fingerprints of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log, sqrt
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.core.trial.comparable import is_comparable
from orchestrator.core.trial.run import USUAL_SD
from orchestrator.core.trial.winner import WIDTH
from orchestrator.report import quantities as show
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, TrialDetail
    from orchestrator.core.trial.fingerprint import Fingerprint


# Below a table of such speeds. Those of `sweep best` are of the steps of one run.
INTERVALS = (
    "±: the 95 % interval of the mean of a layout's runs, which are taken to vary by at least"
    f" {USUAL_SD:.0%}. `sweep best` shows another: that of the steps within one run"
)


class SpeedDifference(StrEnum):
    """The verdict of the intervals of two speeds."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "noise"  # they overlap


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The tokens/s/GPU of a layout: the geometric mean of its runs, with its 95 % interval."""

    trial_id: int
    num_runs: int
    value: float
    low: float
    high: float


def change_of(before: Speed, after: Speed) -> SpeedDifference:
    """Noise, unless the intervals are apart."""
    if after.low > before.high:
        return SpeedDifference.FASTER
    return SpeedDifference.SLOWER if after.high < before.low else SpeedDifference.NOISE


@dataclass(frozen=True, kw_only=True)
class LayoutDifference:
    """A layout of one cell on both sides."""

    cell: str
    layout: str
    before: Speed
    after: Speed

    @property
    def ratio(self) -> float:
        """The speed after over that before."""
        return self.after.value / self.before.value

    @property
    def change(self) -> SpeedDifference:
        return change_of(self.before, self.after)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sides and the layouts that both have measured."""

    before: str
    after: str
    # The known differences between the software of both sides.
    changed: str
    layouts: Sequence[LayoutDifference]
    num_only_before: int
    num_only_after: int

    def text(self) -> str:
        """One sentence or two with the counts."""
        count = {kind: sum(one.change is kind for one in self.layouts) for kind in SpeedDifference}
        text = (
            f"{self.after} against {self.before}: of"
            f" {show.counted(len(self.layouts), 'layout')} that both measured,"
            f" {count[SpeedDifference.FASTER]:,} faster, {count[SpeedDifference.SLOWER]:,} slower,"
            f" {count[SpeedDifference.NOISE]:,} noise."
        )
        if self.num_only_before or self.num_only_after:
            text += (
                f" {self.num_only_before:,} were measured in {self.before} alone,"
                f" {self.num_only_after:,} in {self.after} alone."
            )
        return text


_Key = tuple[str, str]


def of_sweeps(before: SweepRows, after: SweepRows) -> Comparison:
    """Compare two sweeps by the layouts of cells that both have, each with its current software."""
    return _comparison(
        before.name,
        after.name,
        _speeds(before, _is_current),
        _speeds(after, _is_current),
        changed=_changes(before, after),
    )


def of_fingerprints(sweep: SweepRows) -> Comparison | None:
    """Compare what a sweep measured with its last two fingerprints; None: there is only one."""
    if len(sweep.fingerprints) < 2:
        return None
    from orchestrator.core.trial.fingerprint import changes  # pydantic

    old, new = _last_two(sweep)
    return _comparison(
        f"fingerprint {show.short_digest(old.digest)}",
        f"fingerprint {show.short_digest(new.digest)}",
        _speeds(sweep, lambda one, it: it.fingerprint == old and _still_counts(one, it)),
        _speeds(sweep, lambda one, it: it.fingerprint == new and _still_counts(one, it)),
        changed=changes(old, new),
    )


def _last_two(sweep: SweepRows) -> list[Fingerprint]:
    """The fingerprints of the newest measurements, as the query `changed` has them."""
    measured = [
        (attempt.started_at, attempt.fingerprint.digest)
        for _, attempt in sweep.attempts()
        if attempt.fingerprint is not None and attempt.measurement is not None
    ]
    places = {digest: place for place, (_, digest) in enumerate(sorted(measured))}
    # Those without a measurement come first.
    return sorted(sweep.fingerprints, key=lambda one: places.get(one.digest, -1))[-2:]


def _still_counts(one: TrialDetail, attempt: AttemptRow) -> bool:
    """False for measurements with the current fingerprint of the cell that a person took back."""
    is_of_cell = (
        attempt.fingerprint is not None
        and attempt.fingerprint.digest == one.cell.fingerprint_digest
    )
    return attempt.still_counts or not is_of_cell


def _changes(before: SweepRows, after: SweepRows) -> str:
    if not before.fingerprints or not after.fingerprints:
        return ""
    from orchestrator.core.trial.fingerprint import changes  # pydantic

    return changes(before.fingerprints[-1], after.fingerprints[-1])


def _comparison(
    before: str, after: str, old: Mapping[_Key, Speed], new: Mapping[_Key, Speed], *, changed: str
) -> Comparison:
    both = [key for key in old if key in new]
    layouts = [
        LayoutDifference(
            cell=cell, layout=layout, before=old[cell, layout], after=new[cell, layout]
        )
        for cell, layout in both
    ]
    return Comparison(
        before=before,
        after=after,
        changed=changed,
        layouts=sorted(layouts, key=lambda one: (one.cell, -abs(log(one.ratio)))),
        num_only_before=len(old) - len(both),
        num_only_after=len(new) - len(both),
    )


def _is_current(one: TrialDetail, attempt: AttemptRow) -> bool:
    """True for the runs that give a trial its numbers."""
    return bool(one.trial.is_current_fingerprint) and attempt.still_counts


def _speeds(
    sweep: SweepRows, is_wanted: Callable[[TrialDetail, AttemptRow], bool]
) -> dict[_Key, Speed]:
    """The speed of each layout by its runs that are wanted, and whose numbers can be ranked."""
    found = {}
    for one in sweep.trials:
        runs = [
            (it.measurement.tokens_per_second_per_gpu, it.measurement.step_time.relative_confidence)
            for it in one.attempts
            if it.measurement is not None and is_comparable(it.measurement) and is_wanted(one, it)
        ]
        if runs:
            found[one.cell.cell.key, one.trial.layout.key] = speed_of(one.trial.id, runs)
    return found


def speed_of(trial_id: int, runs: Sequence[tuple[float, float | None]]) -> Speed:
    """Return the mean speed of runs: each a speed and the relative half-width of its interval.

    Two runs in fresh processes differ more than the steps of one. So the interval is at least that
    of runs that vary as published repeats of one layout do.
    """
    logs = [log(speed) for speed, _ in runs]
    mean = fmean(logs)
    own = max((0.0 if it is None else it / WIDTH) for _, it in runs)
    spread = sqrt(sum((it - mean) ** 2 for it in logs) / (len(logs) - 1)) if len(logs) > 1 else 0.0
    sd = max(own, spread, USUAL_SD) / sqrt(len(logs))
    return Speed(
        trial_id=trial_id,
        num_runs=len(logs),
        value=exp(mean),
        low=exp(mean - WIDTH * sd),
        high=exp(mean + WIDTH * sd),
    )

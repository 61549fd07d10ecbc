"""Ranks the layouts of a cell: the winner or those that are tied, and the reasons in words.

`sweep best`, `sweep status`, the report and the notebook show the same ranking and the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import log, sqrt
from typing import TYPE_CHECKING

from orchestrator.core.trial.machine_load import relative_sd
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import TrialRow
    from db.store_reads import StoreReads
    from orchestrator.core.trial.drift import SpeedChange
    from orchestrator.core.trial.winner import Margin, Verdict

MAX_TIED_SHOWN = 8
# The spread of runs without drift and load is named if the whole spread is this many times larger.
LARGER_SPREAD = 1.5
# If the logarithm of the spread without drift and load differs from that of the assumed spread by
# more than this, repeats have shown it.
SHOWN_BY_REPEATS = 0.2
# Two runs of one layout differ by less than this many standard deviations of one run.
CLEARLY = 4.0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The speed of a layout as it was compared: on the machine of the last run."""

    step_seconds: float
    tokens_per_second_per_gpu: float | None
    # Half of the 95 % interval of the step time, relative.
    relative_confidence: float

    @property
    def record(self) -> dict[str, float | None]:
        """The fields of a machine-readable row."""
        return {f"compared_{name}": value for name, value in asdict(self).items()}


DRIFT_TITLES = ("without drift", "±95%")
OTHER_ORDER = (
    "The order is that of speeds without drift and the load of others, by all runs of a layout; the"
    " other numbers are those of one run, as it was measured"
)
OTHER_LEAD = (
    "The lead is that of speeds without drift and the load of others, by all runs of a layout; the"
    " other numbers are those of one run"
)
# Less than this, relative, and the lead in words agrees with that of the measured speeds.
SAME_LEAD = 0.005


@dataclass(frozen=True, kw_only=True)
class WithoutDrift:
    """Columns of a table of trials, by DRIFT_TITLES."""

    texts: Mapping[int, tuple[str, str]]  # by trial id
    # What is said below the table if the order or the lead is not that of the measured speeds.
    remark: str | None


def _texts(compared: Compared | None) -> tuple[str, str]:
    if compared is None:
        return show.UNKNOWN, show.UNKNOWN
    rate = show.tokens_rate(compared.tokens_per_second_per_gpu)
    return rate, show.confidence(compared.relative_confidence)


NOT_COMPARED = dict.fromkeys(f"compared_{field.name}" for field in fields(Compared))


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The fastest layouts of a cell, and how sure their order is."""

    # The fastest first, at the machine's present speed.
    leading: Sequence[TrialRow]
    tied: Sequence[int]
    text: str
    # None: the machine's speed changed by no more than noise.
    drift: str | None
    # None: nothing else was measured.
    margin: Margin | None = None
    # Relative, of runs of one layout as they were measured. None: nothing was repeated.
    spread: float | None = None
    # How much runs of one layout vary, in words.
    varies: str = ""
    # Each of the first two must run about so often until their difference shows. None: they are not
    # tied with each other, or they are equal.
    runs_to_decide: int | None = None
    # By trial id. Layouts that were far from the best are not compared.
    compared: Mapping[int, Compared] = field(default_factory=dict)

    def without_drift(self, shown: Sequence[TrialRow]) -> WithoutDrift | None:
        """The speeds by which these trials are ordered.

        None: the machine's speed did not change, and the order and the lead are those of the
        measured speeds.
        """
        speeds = [trial.tokens_per_second_per_gpu or 0.0 for trial in shown]
        remark = None
        if speeds != sorted(speeds, reverse=True):
            remark = OTHER_ORDER
        elif self._is_other_lead(shown):
            remark = OTHER_LEAD
        if self.drift is None and remark is None:
            return None
        texts = {trial.id: _texts(self.compared.get(trial.id)) for trial in shown}
        return WithoutDrift(texts=texts, remark=remark)

    def _is_other_lead(self, shown: Sequence[TrialRow]) -> bool:
        """Return whether the lead that the text names differs from that of the measured speeds."""
        if self.margin is None:
            return False
        measured = {
            trial.id: trial.step_seconds_median for trial in shown if trial.step_seconds_median
        }
        first, second = self.leading[0].id, self.margin.runner_up
        if first not in measured or second not in measured:
            return False
        lead = (1 + self.margin.value) * measured[first] / measured[second]
        return abs(log(lead)) > SAME_LEAD

    def record(self, trial_id: int) -> dict[str, float | None]:
        """The fields of a trial's comparison; each is None if it was not compared."""
        found = self.compared.get(trial_id)
        return NOT_COMPARED if found is None else found.record


def rank_cell(
    store: StoreReads, sweep_id: int, cell_id: int, leading: Sequence[TrialRow]
) -> Ranking:
    """Order the layouts of a cell. `leading`: its fastest layouts by their stored numbers."""
    from orchestrator.sweep.stored_confirmation import leading_confirmation  # needs SQLAlchemy

    confirmation, rows = leading_confirmation(store, sweep_id, cell_id, leading)
    verdict = confirmation.verdict()
    if verdict is None:
        return Ranking(leading=leading, tied=(), text="", drift=None)
    varies = varies_text(verdict)
    num_runs = confirmation.num_runs(verdict.best)
    if not verdict.is_settled:
        tied = ", ".join(map(str, verdict.tied_by_speed[:MAX_TIED_SHOWN]))
        more = " and others" if len(verdict.tied) > MAX_TIED_SHOWN else ""
        text = f"No single winner: trials {tied}{more} are tied; {varies}"
        text += assumed_text(verdict) + why_tied(verdict, rows)
        text += ", and with that any of the tied could be the fastest"
        text += difference_text(verdict, confirmation.num_runs)
    elif len(rows) == 1:
        text = f"Trial {verdict.best} is the only layout that can be ranked"
    elif num_runs == 1:
        text = f"Trial {verdict.best} is ahead after one run; {varies}"
        text += f"; not confirmed by another (search.confirm){_margin_text(verdict.margin)}"
    else:
        text = f"Winner: trial {verdict.best}, confirmed by {num_runs} runs; {varies}"
        text += ", and with that no other measured layout of this fingerprint could be faster"
        text += _margin_text(verdict.margin)
    # Layouts that are not compared follow in the store's order.
    compared = {row.id for row in rows}
    rest = [row for row in leading if row.id not in compared]
    drift = _drift_text(verdict.change) if verdict.change is not None else None
    return Ranking(
        leading=[*rows, *rest],
        tied=verdict.tied_by_speed,
        text=text,
        drift=drift,
        margin=verdict.margin,
        spread=verdict.spread,
        varies=varies,
        runs_to_decide=verdict.runs_to_decide,
        compared={row.id: _compared(row, verdict.intervals[row.id]) for row in rows},
    )


def _compared(row: TrialRow, interval: tuple[float, float]) -> Compared:
    low, high = interval
    # The interval is one of the logarithm.
    seconds, rate = sqrt(low * high), None
    if row.tokens_per_second_per_gpu is not None and row.step_seconds_median is not None:
        rate = row.tokens_per_second_per_gpu * row.step_seconds_median / seconds
    return Compared(
        step_seconds=seconds,
        tokens_per_second_per_gpu=rate,
        relative_confidence=(high - low) / 2 / seconds,
    )


def varies_text(verdict: Verdict) -> str:
    """Say how much runs of one layout vary."""
    # They need numpy.
    from orchestrator.core.trial.drift_prior import ASSUMED_RUN_SD
    from orchestrator.core.trial.winner import USUAL_VARIATION

    if verdict.spread is None:
        return f"runs of one layout usually vary by {USUAL_VARIATION} (nothing was repeated here)"
    repeats = show.counted(verdict.num_repeats, "repeat")
    text = f"runs of one layout vary by {show.variation(verdict.spread)} ({repeats})"
    if verdict.spread > LARGER_SPREAD * verdict.run_sd:
        found = f"; {verdict.run_sd:.1%} is assumed"
        if abs(log(verdict.run_sd / ASSUMED_RUN_SD)) > SHOWN_BY_REPEATS:
            found = f", and by {verdict.run_sd:.1%}"
        text += f"{found} without drift and the load of others"
    return text


def assumed_text(verdict: Verdict) -> str:
    """Say how much more variation is assumed than repeats show; empty if they show as much."""
    if verdict.spread is None or verdict.run_sd <= LARGER_SPREAD * verdict.spread:
        return ""
    return f"; {show.variation(verdict.run_sd)} is assumed, since other runs may vary more"


def difference_text(verdict: Verdict, num_runs: Callable[[int], int]) -> str:
    """Describe how far the first two are apart, as a sentence of its own.

    Empty if they are not tied with each other.
    """
    from orchestrator.core.trial.winner import COULD_WIN  # numpy

    margin = verdict.margin
    if margin is None or margin.runner_up not in verdict.tied:
        return ""
    first, second = verdict.best, margin.runner_up
    digits = 1 if margin.value >= 0.01 else 2
    value, low, high = (f"{share:.{digits}%}" for share in (margin.value, margin.low, margin.high))
    is_known = not show.is_too_wide((margin.high - margin.low) / 2)
    interval = f"95 % interval: {low} to {high}" if is_known else "95 % interval unknown"
    return (
        f". Trials {first} and {second} differ by {value} ({interval}, from"
        f" {num_runs(first)} and {num_runs(second)} runs)"
        + (
            f"; at {1 - COULD_WIN:.1%}, which a winner needs, it includes 0"
            if margin.low > 0
            else ""
        )
    )


def _margin_text(margin: Margin | None) -> str:
    """Describe the winner's lead, as the end of its sentence; empty if nothing else ran."""
    if margin is None:
        return ""
    return (
        f". It is {margin.value:.1%} faster than trial {margin.runner_up}, the next (95 % interval:"
        f" {margin.low:.1%} to {margin.high:.1%})"
    )


def _drift_text(change: SpeedChange) -> str:
    """A line about a change of the machine's speed."""
    later = "later"
    if change.apart_seconds is not None:
        later = f"{show.duration(change.apart_seconds)} later"
    return (
        f"The machine drifted: trial {change.key} took {show.step_time(change.first_seconds)} at"
        f" first and {show.step_time(change.then_seconds)} {later}; layouts are"
        " compared by all of their runs, and without drift: that corrects a run by up to"
        f" {change.largest_correction:.0%} and widens the intervals"
    )


def why_tied(verdict: Verdict, rows: Sequence[TrialRow]) -> str:
    """Say why layouts are tied that differ by more than runs vary; empty if they do not."""
    tied = [row for row in rows if row.id in verdict.tied]
    seconds = [row.step_seconds_median for row in tied if row.step_seconds_median]
    if not seconds or max(seconds) < min(seconds) * (1 + CLEARLY * verdict.run_sd):
        return ""
    load = max(relative_sd(row.load) for row in tied)
    if load > verdict.run_sd:
        return f"; the load of others may have slowed a run by {2 * load:.0%} or more"
    return "; between runs that were not repeated the machine's speed may have changed"

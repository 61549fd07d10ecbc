"""The progress and the end of a sweep, as values for those who watch it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum

from db.read.rows import TrialRow
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.purpose import Purpose


class Stop(IntEnum):
    """A request to the loop from outside."""

    GO_ON = 0
    # Start nothing new; let running attempts finish.
    DRAIN = 1
    CANCEL = 2  # end running attempts now


class StopReason(StrEnum):
    EXHAUSTED = "every layout is known"
    TRIALS = "max_trials reached"
    GPU_HOURS = "max_gpu_hours reached"
    COST = "max_cost reached"
    WALL_TIME = "max_wall_time reached"
    PLATEAU = "plateau: no more gain"
    NODES = "the nodes that are left cannot hold its gangs"
    FAULTS = "its attempts failed again and again"
    BOUND = "bound reached: no layout is expected to gain that much"
    NOTHING_FITS = "nothing fits"
    INTERRUPTED = "interrupted"
    BEFORE = "nothing was left to do"  # an earlier call had finished it


BUDGETS = frozenset({StopReason.GPU_HOURS, StopReason.COST, StopReason.WALL_TIME})
# Searches that ended by themselves: their best is confirmed.
DECIDED = frozenset({StopReason.EXHAUSTED, StopReason.TRIALS, StopReason.PLATEAU, StopReason.BOUND})
# Searches whose best is confirmed. After a budget ended one, its reserved part pays for that.
CONFIRMED = DECIDED | BUDGETS


@dataclass(frozen=True, kw_only=True)
class Running:
    """One attempt under way, for those who watch."""

    trial_id: int
    cell: Cell
    layout: Layout
    phase: Phase | None
    step: int
    since: float  # by the loop's clock
    purpose: Purpose = Purpose.NEW


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEnded:
    """An attempt that ended, and how the sweep was then."""

    text: str  # the trial and its outcome
    failure_kind: FailureKind | None = None
    seconds: float  # since this call began
    counts: Mapping[TrialState, int]
    num_launched: int
    num_running: int
    num_repeats: int = 0  # that this call has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchEnded:
    """A cell whose search has ended. Its best may still be confirmed."""

    cell: Cell
    reason: StopReason
    untried: int  # of its layouts
    seconds: float  # since this call began


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSettled:
    """A cell of which nothing is left to start: its search and its repeats are over."""

    cell: Cell
    # Layouts that share the first place, fastest first; a single one is the winner.
    tied: Sequence[Layout]
    num_runs: int  # of the first of them
    seconds: float  # since this call began


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLeft:
    """The seconds that a call may go on, at the pace so far and within its budgets."""

    least: float
    most: float
    # A budget is spent: what runs may go on, and nothing more is started.
    is_spent: bool = False


def time_left(
    *,
    seconds: float,
    attempt_seconds: float,
    num_ended: int,
    num_running: int,
    most_new: int,
    most_repeats: Sequence[int],
    may_end_early: bool,
    wall_seconds_left: float | None = None,
    gpu_seconds_left: float | None = None,
    gpu_seconds: float = 0.0,
) -> TimeLeft | None:
    """Estimate the time left from the attempts of this call; None: unknown.

    `attempt_seconds`: of all attempts that ended, together. `most_new`: attempts of new layouts
    that may still be started; `most_repeats`: the same for the repeats of each cell.
    `may_end_early`: a search may find that it needs fewer.
    """
    if any(one is not None and one <= 0 for one in (wall_seconds_left, gpu_seconds_left)):
        return TimeLeft(least=0.0, most=0.0, is_spent=True)
    bounds = [] if wall_seconds_left is None else [wall_seconds_left]
    if num_ended < FEWEST_TO_TELL or seconds <= 0:
        return TimeLeft(least=0.0, most=bounds[0]) if bounds else None
    # New layouts run side by side, as many as so far. Repeats of a cell follow one another, since
    # each result decides which is next.
    pace, each = seconds / num_ended, max(seconds, attempt_seconds) / num_ended
    if gpu_seconds_left is not None and gpu_seconds > 0:
        bounds.append(gpu_seconds_left / gpu_seconds * seconds)
    num_first = num_running + most_new
    first = max(pace * num_first, each if num_first else 0.0)
    repeats = max(pace * sum(most_repeats), each * max(most_repeats, default=0))
    most = min([first + repeats, *bounds])
    least = pace * num_running if may_end_early else most
    return TimeLeft(least=min(least, most), most=most)


# Fewest ended attempts for an estimate: the first includes imports and connections.
FEWEST_TO_TELL = 2


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The progress of a sweep: the values that a display needs."""

    sweep: str
    # Trials of this sweep by state, of all calls.
    counts: Mapping[TrialState, int]
    # Layouts of all cells, also of those whose search has ended.
    untried: int
    # Trials launched at least once, by all calls.
    num_launched: int
    # Upper bound of `num_launched`.
    at_most: int
    # Repeats of measured trials: those that this call has ended, and the most that it will end, as
    # long as the machine changes no further.
    num_repeats: int
    most_repeats: int
    running: Sequence[Running]
    best: Mapping[Cell, tuple[Layout, float]]  # objective value
    # Reserved by all calls, idle leases included.
    gpu_seconds: float
    seconds: float  # since this call began
    left: TimeLeft | None  # None: not known yet
    ended: Sequence[TrialEnded]  # since the last snapshot, in order
    searched: Sequence[SearchEnded]  # as well
    # As well; none if the file has no `notify`.
    settled: Sequence[CellSettled] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedTrials:
    """The trials of a cell that failed otherwise than by an out-of-memory, and the last of them."""

    num: int
    last_id: int
    last: str  # its kind and its message
    last_at: datetime  # when it failed


def failed_trials(trials: Iterable[TrialRow]) -> FailedTrials | None:
    """Return the failures of a cell by its trials; None: there are none."""
    failed = [trial for trial in trials if trial.state is TrialState.FAILED]
    if not failed:
        return None
    last = max(failed, key=lambda trial: trial.updated_at)
    told = f"{last.failure_kind}: {last.failure_message}" if last.failure_kind else "unknown"
    return FailedTrials(num=len(failed), last_id=last.id, last=told, last_at=last.updated_at)


def implausible_trials(trials: Iterable[TrialRow]) -> dict[int, str]:
    """Return why the numbers of measured trials cannot be true, by trial id."""
    return {
        one.id: one.implausible
        for one in trials
        if one.state is TrialState.MEASURED and one.implausible is not None
    }


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a call of `run_sweep`."""

    sweep_id: int
    counts: Mapping[TrialState, int]
    stopped: Mapping[Cell, StopReason]
    interrupted: bool
    # Cells without a measurement: their trials failed, or a budget was spent before.
    nothing_feasible: Sequence[Cell]
    # The cells among them in which no layout fits, with the evidence.
    nothing_fits: Mapping[Cell, str]
    # Layouts that share the first place, fastest first; a single one is the winner.
    tied: Mapping[Cell, Sequence[Layout]]
    # Layouts that were neither launched nor condemned.
    untried: Mapping[Cell, int]
    # Trials of each cell, by all calls.
    launched: Mapping[Cell, int] = field(default_factory=dict)
    # Cells whose best was measured once, since a budget allowed no repeat.
    unconfirmed: Sequence[Cell] = ()
    # For cells without a measurement, if trials of theirs failed.
    failed: Mapping[Cell, FailedTrials] = field(default_factory=dict)
    # For cells without a measurement that is ranked: why the numbers cannot be true, by trial id.
    implausible: Mapping[Cell, Mapping[int, str]] = field(default_factory=dict)
    # True if the code has changed since the measurements, and nothing was measured again.
    code_has_changed: bool = False

    @property
    def finished(self) -> bool:
        """True if nothing is left to do without a wider axis or budget."""
        return not self.interrupted and not {
            StopReason.WALL_TIME,
            StopReason.NODES,
            StopReason.FAULTS,
        } & set(self.stopped.values())

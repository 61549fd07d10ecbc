"""The progress of a sweep as values and short texts, for `sweep status` and `sweep top`.

It reads the store; the phase of a running attempt comes from the caller, who can see run folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import UNDER_WAY, TrialState
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import CellStatus, ReservedBySweep, SessionRow, SweepRow, UnderWayRow
    from db.store_reads import StoreReads

COUNTED: Mapping[str, tuple[TrialState, ...]] = {
    "measured": (TrialState.MEASURED,),
    "OOM": (TrialState.OUT_OF_MEMORY,),
    "failed": (TrialState.FAILED,),
    "pruned": (TrialState.PRUNED,),
    "under way": tuple(sorted(UNDER_WAY)),
    "waiting": (TrialState.QUEUED,),
}
_ALWAYS_SHOWN = ("measured", "OOM", "failed")

INTERRUPTED = "interrupted"
WHAT_INTERRUPTED_IS = "under way when its orchestrator ended; the same `sweep run` starts it again"

# Phase and step of an attempt's slowest rank; None: not known here.
PhaseAndStep = tuple[str | None, int | None]


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """The status of one sweep."""

    row: SweepRow
    cells: Sequence[CellStatus]
    running: Sequence[UnderWayRow]
    reserved: ReservedBySweep
    session: SessionRow | None  # of its newest call

    @property
    def is_worked_on(self) -> bool:
        """True if an orchestrator has it that may be alive."""
        from db.read.holder import is_worked_on  # needs SQLAlchemy

        return is_worked_on(self.row)

    @property
    def totals(self) -> dict[TrialState, int]:
        return {state: sum(cell.num_trials[state] for cell in self.cells) for state in TrialState}

    @property
    def stop_reasons(self) -> tuple[str, ...]:
        """Why its cells stopped; empty while a call goes on, or if it died."""
        return self.session.stop_reasons if self.session is not None else ()

    @property
    def untried(self) -> dict[int, int]:
        """Layouts never tried, by cell; empty while a call goes on, or if it died."""
        ended = [cell.cell for cell in self.cells if self.stop_reasons]
        return {row.id: row.num_untried for row in ended if row.num_untried}

    @property
    def price(self) -> float | None:
        return self.session.price_per_gpu_hour if self.session is not None else None


def read_status(store: StoreReads, row: SweepRow) -> SweepStatus:
    """Read how far a sweep is."""
    return SweepStatus(
        row=row,
        cells=store.status(row.id),
        running=store.under_way(row.id),
        reserved=store.reserved(row.id),
        session=store.newest_session(row.id),
    )


def shown_counts(sweeps: Sequence[SweepStatus]) -> list[str]:
    """The states that need a column: the usual ones, and those that some trial is in."""
    return [
        title
        for title, states in COUNTED.items()
        if title in _ALWAYS_SHOWN or any(one.totals[state] for one in sweeps for state in states)
    ]


def use_text(sweep: SweepStatus) -> str:
    """The cost and the use of the reserved GPU time, and the capacity of the cluster."""
    total, capacity = sweep.reserved.total, sweep.reserved.capacity
    if not total.reserved:
        return ""
    money = f", ${total.dollars(sweep.price):,.2f}" if sweep.price is not None else ""
    of = ""
    if capacity is not None:
        of = f"; the cluster had {show.gpu_hours(capacity)} GPU-hours meanwhile"
    return f"{money}: {show.shares(total.parts)}{of}"


def state_text(sweep: SweepStatus) -> str:
    """Tell who has worked on a sweep since when, or how it ended."""
    row, holder = sweep.row, sweep.row.holder
    if holder is None and row.state != "running":
        why = "; ".join(sweep.stop_reasons)
        return f"{row.state} ({why})" if why else str(row.state)
    if holder is None or not sweep.is_worked_on:
        # Its lease has ended, or its process is seen to be dead.
        gone = "is gone" if holder is None else f"(pid {holder.pid}) is dead"
        return f"nobody works on it now: its orchestrator {gone}; the same `sweep run` continues it"
    asked = f", asked to {row.stop_requested}" if row.stop_requested else ""
    since = show.at(holder.since)
    return f"running on host {holder.host}, pid {holder.pid}, since {since} UTC{asked}"


def phase_text(trial: UnderWayRow, progress: PhaseAndStep, *, is_worked_on: bool) -> str:
    """Describe the phase and the step of a running trial."""
    if not is_worked_on:
        # The next `sweep run` returns it to the queue first.
        return INTERRUPTED
    phase, step = progress
    if phase is not None:
        return f"{phase.replace('_', ' ')}{f', step {step}' if step else ''}"
    return "before its first step" if trial.state is TrialState.LAUNCHING else "taking steps"

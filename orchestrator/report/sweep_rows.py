"""All rows of one sweep that its pictures and pages are made of, read once from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.report.ranking import Ranking, rank_cell

if TYPE_CHECKING:
    # The rows need SQLAlchemy, and pictures of rows do not.
    from db.read.rows import (
        AttemptRow,
        CellStatus,
        FailedRepeatRow,
        ReservedBySweep,
        SessionRow,
        SweepRow,
        TrialDetail,
    )
    from db.store_reads import StoreReads
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.report.fronts import ShownFront
    from orchestrator.report.software_change import SoftwareChange


@dataclass(frozen=True, kw_only=True)
class SweepRows:
    """One sweep. Trials are ordered by id, and have their attempts, events and profiles."""

    sweep: SweepRow
    cells: Sequence[CellStatus]
    trials: Sequence[TrialDetail]
    rankings: Mapping[int, Ranking]  # by cell id
    reserved: ReservedBySweep
    fronts: Sequence[ShownFront] = ()
    sessions: Sequence[SessionRow] = ()
    fingerprints: Sequence[Fingerprint] = ()
    changes: Mapping[int, Sequence[SoftwareChange]] = field(default_factory=dict)  # by cell id
    # Those of the trials that the rankings lead with.
    failed_repeats: Sequence[FailedRepeatRow] = ()

    @property
    def name(self) -> str:
        return self.sweep.name

    def of_cell(self, cell_id: int) -> list[TrialDetail]:
        """The trials of one cell."""
        return [one for one in self.trials if one.trial.cell_id == cell_id]

    def attempts(self) -> Iterator[tuple[TrialDetail, AttemptRow]]:
        """Every attempt with its trial."""
        return ((one, attempt) for one in self.trials for attempt in one.attempts)


def read_rows(store: StoreReads, sweep: SweepRow) -> SweepRows:
    """Read a sweep from the store."""
    from orchestrator.core.trial.winner import CONSIDERED  # numpy
    from orchestrator.report.fronts import read_fronts  # numpy
    from orchestrator.report.software_change import sweep_changes

    leading = store.best(sweep.id, CONSIDERED)
    return SweepRows(
        sweep=sweep,
        cells=store.status(sweep.id),
        trials=store.trial_details(sweep.id),
        rankings={
            cell_id: rank_cell(store, sweep.id, cell_id, some) for cell_id, some in leading.items()
        },
        reserved=store.reserved(sweep.id),
        fronts=read_fronts(store, sweep),
        sessions=store.sessions(sweep.id),
        fingerprints=store.fingerprints(sweep.id),
        changes=sweep_changes(store, sweep).by_cell,
        failed_repeats=store.failed_repeats(
            [trial.id for trials in leading.values() for trial in trials]
        ),
    )

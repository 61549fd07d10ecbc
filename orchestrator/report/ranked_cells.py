"""The best layout of each cell as `sweep best` names it, where repeats changed the order.

`sweep status`, `sweep list`, `sweep top` and `sweep ui` show it. A cell without a repeat keeps the
order of its measured speeds, and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.ranking import Ranking, rank_cell
from orchestrator.report.sweep_status import SweepStatus

if TYPE_CHECKING:
    from db.read.rows import CellStatus, SweepSummary, TrialRow
    from db.store_reads import StoreReads

# CPU seconds of one reading for cells that were never ranked; one cell is ranked in any case.
FIRST_SECONDS = 0.2
# To rank cells again takes a twentieth of one core at most, however many repeats they have.
RESTS_PER_RANKING = 20.0


@dataclass(frozen=True, kw_only=True)
class RankedStatus:
    """A sweep's status whose best layouts are those of the ranking."""

    status: SweepStatus
    # A line for each cell in which the machine drifted.
    drifts: Sequence[str]


def rank_status(store: StoreReads, status: SweepStatus) -> RankedStatus:
    """Give each cell the best layout of its ranking."""
    repeated = store.repeated_cells(status.row.id).get(status.row.id, frozenset())
    rankings = _rank(store, status.row.id, repeated)
    drifts = []
    for cell in status.cells:
        ranking = rankings.get(cell.cell.id)
        if ranking is not None and ranking.drift is not None:
            of_cell = f"{cell.cell.cell.key}: " if len(status.cells) > 1 else ""
            drifts.append(f"{of_cell}{ranking.drift}")
    best = {cell_id: ranking.leading[0] for cell_id, ranking in rankings.items()}
    return RankedStatus(status=with_best(status, best), drifts=drifts)


def rank_summaries(store: StoreReads, summaries: Sequence[SweepSummary]) -> list[SweepSummary]:
    """Give each sweep the speeds of the best layouts of its rankings."""
    repeated = store.repeated_cells()
    return [_rank_summary(store, one, repeated.get(one.sweep.id)) for one in summaries]


def _rank_summary(
    store: StoreReads, summary: SweepSummary, repeated: frozenset[int] | None
) -> SweepSummary:
    if not repeated:
        return summary
    best = {cell_id: some[0] for cell_id, some in store.best(summary.sweep.id).items()}
    rankings = _rank(store, summary.sweep.id, repeated)
    best |= {cell_id: ranking.leading[0] for cell_id, ranking in rankings.items()}
    speeds = [trial.tokens_per_second_per_gpu for trial in best.values()]
    known = [speed for speed in speeds if speed is not None]
    return replace(
        summary, slowest_best=min(known, default=None), fastest_best=max(known, default=None)
    )


def _rank(store: StoreReads, sweep_id: int, cell_ids: Iterable[int]) -> dict[int, Ranking]:
    """Return the rankings of those of these cells that have a best layout, by cell id."""
    wanted = frozenset(cell_ids)
    if not wanted:
        # Without a cell to rank, numpy need not be imported.
        return {}
    from orchestrator.core.trial.winner import CONSIDERED  # numpy

    leading = store.best(sweep_id, CONSIDERED)
    return {
        cell_id: rank_cell(store, sweep_id, cell_id, leading[cell_id])
        for cell_id in wanted & leading.keys()
    }


def with_best(status: SweepStatus, best: Mapping[int, TrialRow]) -> SweepStatus:
    """Replace the best layouts of some cells, by cell id."""
    if not best:
        return status
    return replace(status, cells=[_with_best(cell, best) for cell in status.cells])


def _with_best(cell: CellStatus, best: Mapping[int, TrialRow]) -> CellStatus:
    found = best.get(cell.cell.id)
    return cell if found is None else replace(cell, best=found)


class LiveBests:
    """The best layouts of a sweep that is read again and again. `clock`: CPU seconds.

    A cell is ranked again after a trial of it has changed, but not more often than
    RESTS_PER_RANKING allows: a ranking with many repeats takes up to a second of CPU time.
    """

    def __init__(self, store: StoreReads, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._best: dict[int, int | None] = {}  # trial ids, by ranked cell
        self._repeated: set[int] = set()
        # Cells to rank, the one that waits longest first.
        self._stale: dict[int, None] = {}
        self._next_at = 0.0

    def note(self, changed: Iterable[TrialRow]) -> None:
        """Note that these trials may have changed."""
        for trial in changed:
            if trial.num_attempts > 1 and trial.state is TrialState.MEASURED:
                self._repeated.add(trial.cell_id)
            if trial.cell_id in self._repeated:
                self._stale.setdefault(trial.cell_id)

    def has_to_rank(self, now: float) -> bool:
        """Return whether a cell waits and may be ranked."""
        return bool(self._stale) and (
            now >= self._next_at or any(one not in self._best for one in self._stale)
        )

    def rank(self, sweep_id: int, now: float) -> None:
        """Rank the cells that wait, as many as the CPU time of one reading allows."""
        began = self._clock()
        for cell_id in [one for one in self._stale if one not in self._best]:
            self._rank_one(sweep_id, cell_id)
            if self._clock() - began > FIRST_SECONDS:
                return
        if self._stale and now >= self._next_at:
            began = self._clock()
            self._rank_one(sweep_id, next(iter(self._stale)))
            self._next_at = now + RESTS_PER_RANKING * (self._clock() - began)

    def _rank_one(self, sweep_id: int, cell_id: int) -> None:
        del self._stale[cell_id]
        ranking = _rank(self._store, sweep_id, [cell_id]).get(cell_id)
        self._best[cell_id] = ranking.leading[0].id if ranking is not None else None

    def best(self, trials: Mapping[int, TrialRow]) -> dict[int, TrialRow]:
        """Return the best trial of each cell id, if it still counts. `trials`: by trial id."""
        found = {}
        for cell_id, trial_id in self._best.items():
            trial = trials.get(trial_id) if trial_id is not None else None
            if trial is not None and trial.is_current_fingerprint and trial.is_ranked:
                found[cell_id] = trial
        return found

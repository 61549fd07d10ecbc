"""The best layouts of a sweep that is read again and again, for `sweep top` and `sweep ui`.

They are those of `sweep best`, within a bound on the CPU time that rankings take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.ranked_cells import rank_cells

if TYPE_CHECKING:
    from db.read.rows import TrialRow
    from db.store_reads import StoreReads

# CPU seconds of one reading for cells that were never ranked; one cell is ranked in any case.
FIRST_SECONDS = 0.2
# Seconds until the next ranking of a cell that was ranked before, over the CPU seconds of the last
# one: rankings take a twentieth of a core at most.
RESTS_PER_RANKING = 20.0


class LiveBests:
    """The best layout of each cell of one sweep. `clock`: CPU seconds of this thread.

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
        ranking = rank_cells(self._store, sweep_id, [cell_id]).get(cell_id)
        self._best[cell_id] = ranking.leading[0].id if ranking is not None else None

    def best(self, trials: Mapping[int, TrialRow]) -> dict[int, TrialRow]:
        """Return the best trial of each cell id, if it still counts. `trials`: by trial id."""
        found = {}
        for cell_id, trial_id in self._best.items():
            trial = trials.get(trial_id) if trial_id is not None else None
            if trial is not None and trial.is_current_fingerprint and trial.is_ranked:
                found[cell_id] = trial
        return found

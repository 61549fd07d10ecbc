"""The best layout of each cell as `sweep best` names it, for `sweep status` and `sweep list`.

A cell without a repeat keeps the order of its measured speeds, and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.report import quantities as show
from orchestrator.report.ranking import Ranking, rank_cell
from orchestrator.report.sweep_status import SweepStatus

if TYPE_CHECKING:
    from db.read.rows import CellStatus, SweepSummary, TrialRow
    from db.store_reads import StoreReads


@dataclass(frozen=True, kw_only=True)
class RankedStatus:
    """A sweep's status whose best layouts are those of the ranking."""

    status: SweepStatus
    # A line for each cell with a repeat in which no layout is the winner.
    ties: Sequence[str] = ()
    # A line for each cell with a repeat: how much runs of one layout vary there.
    variations: Sequence[str] = ()
    # A line for each cell in which the machine drifted.
    drifts: Sequence[str] = ()


def rank_status(store: StoreReads, status: SweepStatus) -> RankedStatus:
    """Give each cell the best layout of its ranking, and say how runs vary as `best` does."""
    repeated = store.repeated_cells(status.row.id).get(status.row.id, frozenset())
    rankings = rank_cells(store, status.row.id, repeated)
    ties, variations, drifts = [], [], []
    for cell in status.cells:
        ranking = rankings.get(cell.cell.id)
        of_cell = f"{cell.cell.cell.key}: " if len(status.cells) > 1 else ""
        if ranking is not None and len(ranking.tied) > 1:
            tied = show.numbered("trial", ranking.tied)
            ties.append(f"{of_cell}no single winner: {tied} are tied (see `sweep best`)")
        if ranking is not None and ranking.spread is not None:
            variations.append(f"{of_cell}{ranking.varies}")
        if ranking is not None and ranking.drift is not None:
            drifts.append(f"{of_cell}{ranking.drift}")
    best = {cell_id: ranking.leading[0] for cell_id, ranking in rankings.items()}
    return RankedStatus(
        status=with_best(status, best), ties=ties, variations=variations, drifts=drifts
    )


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
    rankings = rank_cells(store, summary.sweep.id, repeated)
    best |= {cell_id: ranking.leading[0] for cell_id, ranking in rankings.items()}
    speeds = [trial.tokens_per_second_per_gpu for trial in best.values()]
    known = [speed for speed in speeds if speed is not None]
    return replace(
        summary, slowest_best=min(known, default=None), fastest_best=max(known, default=None)
    )


def rank_cells(store: StoreReads, sweep_id: int, cell_ids: Iterable[int]) -> dict[int, Ranking]:
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

"""Tells from the store alone whether an earlier call has finished a sweep of the same file.

Such a sweep needs no cluster: to enumerate its cells again would find every layout known, or its
budget spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from db.read.rows import CellRow, CellStatus, TrialRow
from db.store import Store
from db.types import SweepState
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.search_section import Search
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import INITIAL, UNDER_WAY, TrialState
from orchestrator.core.trial.winner import CONSIDERED
from orchestrator.sweep.confirmation import Confirmation
from orchestrator.sweep.progress import (
    StopReason,
    SweepResult,
    failed_trials,
    implausible_trials,
)
from orchestrator.sweep.stored_confirmation import leading_confirmation
from orchestrator.sweep.winner_profiles import profiles_to_come


@dataclass(frozen=True, kw_only=True)
class _FinishedSweep:
    """The stored result of a sweep that ended under this file, in the file's cells."""

    sweep_id: int
    cells: Sequence[CellStatus]
    counts: Counter[TrialState]
    newest: TrialRow  # among the best of each cell
    # Why the cells stopped in the newest call.
    reasons: Collection[str]
    confirmations: Mapping[Cell, Confirmation]

    @property
    def spent(self) -> StopReason | None:
        """The budget that was spent, if any."""
        budgets = (StopReason.GPU_HOURS, StopReason.COST)
        return next((budget for budget in budgets if budget in self.reasons), None)

    @property
    def tied(self) -> dict[Cell, Sequence[Layout]]:
        """The layouts that share the first place in each cell, fastest first."""
        return {
            cell.cell.cell: self.confirmations[cell.cell.cell].tied()
            for cell in self.cells
            if cell.best is not None
        }

    def wants_a_repeat(self, search: Search) -> bool:
        return any(
            confirmation.next_repeat(search.confirm, anchor_every=search.anchor_every) is not None
            for confirmation in self.confirmations.values()
        )


def finished_before(
    spec: SweepSpec,
    store: Store,
    *,
    code: Callable[[], Fingerprint],
    program_version: str,
    this_host: str | None,
) -> SweepResult | None:
    """Return how the sweep ended then; None if anything may be left, or only the cluster knows.

    `this_host` is where a local Ray would run, None for a cluster. If the file leaves device or
    node size to the cluster, only a sweep that was measured on this host is known to mean the same
    layouts again. `code` tells what would be measured now.
    """
    code = cache(code)
    found = _finished(spec, store, code)
    if found is None:
        return None
    any_node = spec.device != "auto" and spec.gpus_per_node != "auto"
    of_then = _fingerprint_of(store, found.newest, this_host, any_node=any_node)
    if of_then is None or of_then.orchestrator_version != program_version:
        return None
    # If a budget was spent then, it cannot pay for repeats now either.
    if found.spent is None and found.wants_a_repeat(spec.search):
        return None
    if found.spent is None and profiles_to_come(spec, store, found.sweep_id, found.tied):
        return None
    return _result(spec, store, found, code_has_changed=not of_then.has_code_of(code()))


def _finished(
    spec: SweepSpec, store: Store, code: Callable[[], Fingerprint]
) -> _FinishedSweep | None:
    """Return what the store holds; None if the sweep has not ended, or has nothing measured."""
    row = next((sweep for sweep in store.sweeps() if sweep.name == spec.name), None)
    if row is None or row.holder is not None or row.state is not SweepState.FINISHED:
        return None
    if row.spec_json != spec.model_dump_json():
        return None
    # Leave out cells that only an earlier version of the file named.
    wanted = set(spec.cells())
    cells = [status for status in store.status(row.id) if status.cell.cell in wanted]
    counts = Counter({state: sum(cell.num_trials[state] for cell in cells) for state in TrialState})
    measured = [cell.best for cell in cells if cell.best is not None]
    is_some_left = any(counts[state] for state in {INITIAL, *UNDER_WAY})
    if len(cells) < len(wanted) or is_some_left or not measured:
        return None
    fastest, session = store.best(row.id, CONSIDERED), store.newest_session(row.id)
    return _FinishedSweep(
        sweep_id=row.id,
        cells=cells,
        counts=counts,
        newest=max(measured, key=lambda trial: trial.id),
        reasons=session.stop_reasons if session is not None else (),
        confirmations={
            cell.cell.cell: leading_confirmation(
                store, row.id, cell.cell.id, fastest.get(cell.cell.id, ()), code=code
            )[0]
            for cell in cells
        },
    )


def _result(
    spec: SweepSpec, store: Store, found: _FinishedSweep, *, code_has_changed: bool
) -> SweepResult:
    trials = store.trials(found.sweep_id)
    without_best = {
        one.cell.cell: [trial for trial in trials if trial.cell_id == one.cell.id]
        for one in found.cells
        if one.best is None
    }
    failed = {cell: failed_trials(rows) for cell, rows in without_best.items()}
    return SweepResult(
        sweep_id=found.sweep_id,
        counts=found.counts,
        stopped={cell.cell.cell: _why_it_stopped(cell.cell) for cell in found.cells},
        interrupted=False,
        nothing_feasible=list(without_best),
        nothing_fits={},
        tied=found.tied,
        untried={cell.cell.cell: cell.cell.num_untried or 0 for cell in found.cells},
        unconfirmed=[
            cell
            for cell, confirmation in found.confirmations.items()
            if confirmation.repeat_of_best(spec.search.confirm) is not None
        ],
        launched={cell.cell.cell: cell.num_launched for cell in found.cells},
        failed={cell: some for cell, some in failed.items() if some is not None},
        implausible={cell: implausible_trials(rows) for cell, rows in without_best.items()},
        code_has_changed=code_has_changed,
    )


def _why_it_stopped(cell: CellRow) -> StopReason:
    """Return why the cell's search ended then; BEFORE if every layout was known."""
    others = set(StopReason) - {StopReason.EXHAUSTED}
    return next((one for one in others if one == cell.stop_reason), StopReason.BEFORE)


def _fingerprint_of(
    store: Store, trial: TrialRow, this_host: str | None, *, any_node: bool
) -> Fingerprint | None:
    """Return what measured the numbers of a trial.

    None: the file may mean something else here.
    """
    # A later repeat with other code does not count.
    counting = [one for one in store.trial(trial.id).attempts if one.still_counts]
    attempt = next((one for one in reversed(counting) if one.measurement is not None), None)
    if attempt is None or not (
        any_node or (this_host is not None and this_host in (attempt.nodes or ()))
    ):
        return None
    return attempt.fingerprint

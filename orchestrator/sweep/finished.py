"""Tells from the store alone whether an earlier call has finished a sweep under this very file.

Such a sweep needs no cluster: to enumerate its cells again would find every layout known, or its
budget spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from db.read.rows import CellStatus, TrialRow
from db.store import Store
from db.types import SweepState
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import IN_FLIGHT, INITIAL, TrialState
from orchestrator.core.trial.winner import CONSIDERED
from orchestrator.sweep.progress import StopReason, SweepResult
from orchestrator.sweep.stored_confirmation import leading_confirmation


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
    row = next((sweep for sweep in store.sweeps() if sweep.name == spec.name), None)
    if (
        row is None
        or row.holder is not None
        or row.state is not SweepState.FINISHED
        or row.spec_json != spec.model_dump_json()
    ):
        return None
    wanted = set(spec.cells())  # an earlier file may have named more
    cells = [status for status in store.status(row.id) if status.cell.cell in wanted]
    counts = Counter({state: sum(cell.num_trials[state] for cell in cells) for state in TrialState})
    measured = max(
        (cell.best for cell in cells if cell.best is not None),
        key=lambda trial: trial.id,
        default=None,
    )
    if (
        len(cells) < len(wanted)
        or any(counts[state] for state in {INITIAL, *IN_FLIGHT})
        or measured is None
    ):
        return None
    of_then = _fingerprint_of(
        store, measured, this_host, any_node=spec.device != "auto" and spec.gpus_per_node != "auto"
    )
    if of_then is None or of_then.orchestrator_version != program_version:
        return None
    fastest = store.best(row.id, CONSIDERED)
    confirmations = {
        cell.cell.cell: leading_confirmation(
            store, row.id, cell.cell.id, fastest.get(cell.cell.id, ())
        )[0]
        for cell in cells
    }
    search = spec.search
    session = store.newest_session(row.id)
    said = session.stop_reasons if session is not None else ()
    spent = next(
        (bound for bound in (StopReason.GPU_HOURS, StopReason.COST) if bound in said), None
    )
    # A repeat that the budget had no room for then has none now.
    is_wanted = any(
        confirmation.next_repeat(search.confirm, anchor_every=search.anchor_every) is not None
        for confirmation in confirmations.values()
    )
    if is_wanted and spent is None:
        return None
    of_now = code()
    trials = [
        trial for trial in store.trials(row.id) if trial.cell_id in {cell.cell.id for cell in cells}
    ]
    return SweepResult(
        sweep_id=row.id,
        counts=counts,
        stopped={
            cell.cell.cell: spent
            or _how_it_stopped(cell, spec.search.max_trials if StopReason.TRIALS in said else None)
            for cell in cells
        },
        interrupted=False,
        nothing_feasible=[cell.cell.cell for cell in cells if cell.best is None],
        nothing_fits={},
        tied={
            cell.cell.cell: confirmations[cell.cell.cell].tied()
            for cell in cells
            if cell.best is not None
        },
        untried=None,
        num_fingerprints=len(
            {trial.fingerprint_digest for trial in trials if trial.fingerprint_digest is not None}
        ),
        unconfirmed=[
            cell
            for cell, confirmation in confirmations.items()
            if confirmation.repeat_of_best(search.confirm) is not None
        ],
        launched={cell.cell.cell: _num_launched(cell) for cell in cells},
        code_has_changed=(of_then.git_sha, of_then.dirty_diff_digest)
        != (of_now.git_sha, of_now.dirty_diff_digest),
    )


def _how_it_stopped(cell: CellStatus, max_trials: int | None) -> StopReason:
    return (
        StopReason.TRIALS
        if max_trials is not None and _num_launched(cell) >= max_trials
        else StopReason.BEFORE
    )


def _num_launched(cell: CellStatus) -> int:
    return sum(
        number for state, number in cell.num_trials.items() if state is not TrialState.PRUNED
    )


def _fingerprint_of(
    store: Store, trial: TrialRow, this_host: str | None, *, any_node: bool
) -> Fingerprint | None:
    """Return what a trial was measured with; None if the file may mean something else here."""
    attempt = next(
        (a for a in reversed(store.trial(trial.id).attempts) if a.measurement is not None), None
    )
    if attempt is None or not (
        any_node or (this_host is not None and this_host in (attempt.nodes or ()))
    ):
        return None
    return attempt.fingerprint

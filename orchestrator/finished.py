"""Whether an earlier call of this program has finished a sweep under this very file, told from the store alone.

Such a sweep needs no cluster: enumerating its cells again would find every layout known, or its budget spent.
"""

from __future__ import annotations

from collections import Counter

from db.rows import TrialRow
from db.schema import SweepState
from db.store import Store
from orchestrator.contest import contest_of
from orchestrator.core.lifecycle import IN_FLIGHT, INITIAL, TrialState
from orchestrator.core.spec import SweepSpec
from orchestrator.progress import StopReason, SweepResult

_CONTENDERS = 16  # of the fastest, that are compared with each other


def finished_before(spec: SweepSpec, store: Store, *, program_version: str, this_host: str | None) -> SweepResult | None:
    """How the sweep ended then; None where anything may be left to do, or cannot be known without asking the cluster.

    `this_host` is where a local Ray would run, None for a cluster. Where the file leaves device or node size to the cluster, only a sweep
    that was measured on this host is known to mean the same layouts again.
    """
    row = next((sweep for sweep in store.sweeps() if sweep.name == spec.name), None)
    if row is None or row.holder is not None or row.state is not SweepState.FINISHED or row.spec_json != spec.model_dump_json():
        return None
    cells = store.status(row.id)
    counts = Counter({state: sum(cell.num_trials[state] for cell in cells) for state in TrialState})
    newest = max((cell.best for cell in cells if cell.best is not None), key=lambda trial: trial.id, default=None)
    if any(counts[state] for state in {INITIAL, *IN_FLIGHT}) or newest is None:
        return None
    if not _means_the_same(spec, store, newest, program_version, this_host):
        return None
    fastest = store.best(row.id, _CONTENDERS)
    measured = {trial.fingerprint_digest for trial in store.trials(row.id) if trial.fingerprint_digest is not None}
    return SweepResult(
        sweep_id=row.id,
        counts=counts,
        stopped={cell.cell.cell: StopReason.BEFORE for cell in cells},
        interrupted=False,
        nothing_feasible=[cell.cell.cell for cell in cells if cell.best is None],
        nothing_fits={},
        tied={cell.cell.cell: contest_of(fastest.get(cell.cell.id, ()), store.repeats(cell.cell.id)).tied() for cell in cells if cell.best},
        num_fingerprints=len(measured),
    )


def _means_the_same(spec: SweepSpec, store: Store, newest: TrialRow, program_version: str, this_host: str | None) -> bool:
    """Whether the file would be read into the layouts of then: by the same version, for the same nodes."""
    attempt = next((a for a in reversed(store.trial(newest.id).attempts) if a.measurement is not None), None)
    if attempt is None or attempt.fingerprint is None or attempt.fingerprint.orchestrator_version != program_version:
        return False
    said = spec.device != "auto" and spec.gpus_per_node != "auto"
    return said or (this_host is not None and this_host in (attempt.nodes or ()))

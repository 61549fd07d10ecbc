"""Runs a sweep: takes its lease, opens a scheduler, lets the loop work, releases the lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from db.store import Store
from orchestrator.cluster.contract import Scheduler, Slots
from orchestrator.core.errors import StoreUnavailable
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.search.space import CellSpaces
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.sweep.call import Call
from orchestrator.sweep.lease import acquire
from orchestrator.sweep.measured_code import MeasuredCode
from orchestrator.sweep.opening import open_loop
from orchestrator.sweep.progress import Snapshot, Stop, SweepResult
from orchestrator.sweep.spool import FOLDER, Spool


def run_sweep(
    spec: SweepSpec,
    *,
    store: Store,
    open_scheduler: Callable[[], Scheduler],
    code: Fingerprint,
    edited: Callable[[], Fingerprint | None] | None = None,
    hardware: Callable[[Slots], Hardware | None],
    clock: Callable[[], float],
    stop: Callable[[], Stop] = lambda: Stop.GO_ON,
    observe: Callable[[Snapshot], None] = lambda _: None,
    takeover: bool = False,
    spaces: CellSpaces | None = None,
    run_root: Callable[[str], Path] | None = None,
    reused: str | None = None,
    not_passed: str | None = None,
) -> SweepResult:
    """Work on a sweep until every cell is done, a budget is spent, or somebody asks to stop.

    `code` is what is measured when the call begins. `edited` returns its new fingerprint if it was
    edited since it was last asked (None: it stays as it is). `spaces`: of the cells that were
    enumerated already. `run_root` gives the folder of a sweep's
    run folder on this machine: ends of attempts wait there while the database does not answer
    (None: only in memory). `reused` names a sweep whose measurements are taken over, where
    conditions are equal. `not_passed`: what varies and may not reach the program; results say so.
    Raises SweepChanged, SweepInUse, ResourcesInsufficient, StoreUnavailable
    and ClusterUnavailable. What was acknowledged by then is in the store, and what was measured is
    there or in that folder, for the next call.
    """
    lease = acquire(spec, store, takeover=takeover)
    result: SweepResult | None = None
    is_reachable = True
    scheduler: Scheduler | None = None
    try:
        # Start the scheduler only once the lease is ours.
        scheduler = open_scheduler()
        try:
            asked = spec.gpus_per_node
            folder = run_root(lease.before.run_folder) / FOLDER if run_root is not None else None
            call = Call(
                spec=spec,
                store=store,
                lease=lease,
                scheduler=scheduler,
                spool=Spool(folder) if folder is not None else None,
                code=MeasuredCode(code, edited),
                hardware=hardware,
                clock=clock,
                stop=stop,
                observe=observe,
                spaces=spaces if spaces is not None else CellSpaces(spec),
                gpus_per_node=asked if isinstance(asked, int) else scheduler.slots.per_node,
                began=clock(),
                reused=reused,
                not_passed=not_passed,
            )
            result = open_loop(call).run()
            return result
        finally:
            scheduler.close()
    except StoreUnavailable:
        # The database is unavailable, so the lease cannot be released; it expires by itself.
        is_reachable = False
        raise
    finally:
        store.while_away(time.sleep)
        # The scheduler is closed, so these numbers are final.
        leased = scheduler.leased() if scheduler is not None else None
        if is_reachable:
            lease.release(result, leased)

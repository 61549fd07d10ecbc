"""Objects that the parts of one call of `run_sweep` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from db.store import Store
from orchestrator.cluster.contract import Scheduler, Slots
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.search.space import CellSpaces
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.sweep.attempts import Attempts
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.lease import SweepLease
from orchestrator.sweep.measured_code import MeasuredCode
from orchestrator.sweep.progress import Snapshot, Stop
from orchestrator.sweep.spool import Spool


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of `run_sweep`: what it was given, its lease, its ledger and its cells."""

    spec: SweepSpec
    store: Store
    lease: SweepLease
    scheduler: Scheduler
    # For ends of attempts that the database cannot take now; None: they stay in memory.
    spool: Spool | None
    code: MeasuredCode
    hardware: Callable[[Slots], Hardware | None]
    clock: Callable[[], float]
    stop: Callable[[], Stop]
    observe: Callable[[Snapshot], None]
    spaces: CellSpaces
    # By the sweep file, else those of the largest node when the call began.
    gpus_per_node: int
    began: float  # by `clock`
    # The sweep whose measurements are taken over; None: a person asked for none.
    reused: str | None = None
    # What varies and may not reach the program, with the fix. None: every value does, or
    # its script cannot be read.
    not_passed: str | None = None
    attempts: Attempts = field(default_factory=Attempts)
    searches: dict[int, CellSearch] = field(default_factory=dict)  # by cell
    # Trials that people asked for: they are launched without being proposed.
    enqueued: set[int] = field(default_factory=set)

    @property
    def sweep_id(self) -> int:
        return self.lease.sweep_id

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return self.clock() - self.began

"""The values that the store returns. They know no SQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from db.types import AttemptState, BenchReason, StopRequest, SweepState
from orchestrator.core.machines.check import Check
from orchestrator.core.physics.link_sample import LinkSample
from orchestrator.core.pretend.simulated_name import SIMULATED_SUFFIX
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.trial.comparable import is_comparable
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import DriverMemoryKind, Phase
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.rank_profile import MemoryMoment, RankProfile
from orchestrator.core.trial.reserved_time import ReservedGpuSeconds, of_attempt, outcome_of
from orchestrator.core.trial.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The owner of a sweep. Its pid is unique in `namespace`: machine boot and pid namespace."""

    host: str
    pid: int
    namespace: str
    since: dt.datetime
    lease_until: dt.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    id: int
    name: str
    # Tells its folders from those of a sweep with the same name in another store.
    run_token: str
    spec_json: str
    conditions: Mapping[str, Any]
    state: SweepState
    created_at: dt.datetime
    # None: the sweep has no owner, or its lease has ended.
    holder: Holder | None
    owner_epoch: int
    stop_requested: StopRequest | None

    @property
    def run_folder(self) -> str:
        """The name of its folder under SWEEP_HOME/runs."""
        return run_folder(self.name, self.run_token)

    @property
    def is_simulated(self) -> bool:
        """True if `sweep run --simulate` made it: nothing in it was measured."""
        return (
            self.name.endswith(SIMULATED_SUFFIX) and self.conditions.get("workload") == "synthetic"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSummary:
    """A sweep in one line."""

    sweep: SweepRow
    num_cells: int
    num_trials: Mapping[TrialState, int]  # states that have some
    # Tokens/s/GPU of the best layouts of its cells, the smallest and the largest; None: none.
    slowest_best: float | None
    fastest_best: float | None
    # When a trial changed its state, or `sweep run` was last seen.
    changed_at: dt.datetime


def run_folder(name: str, run_token: str) -> str:
    return f"{name}-{run_token}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRow:
    id: int
    sweep_id: int
    cell: Cell
    # From the newest measurement, which is the current one.
    fingerprint_digest: str | None
    # From the newest call that ended by itself. None: no call has.
    stop_reason: str | None
    num_untried: int | None  # layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """A trial with the numbers of the attempt that counts, and the failure of the last one."""

    id: int
    cell_id: int
    layout: Layout
    state: TrialState
    num_attempts: int
    # Measurements that count; the numbers below are from the median one.
    num_measurements: int
    why: str | None
    predicted_tokens_per_second_per_gpu: float | None
    predicted_memory_bytes: int | None
    condemned_by: int | None
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    step_seconds_median: float | None
    step_seconds_iqr: float | None
    num_steps: int | None  # timed, of the measurement
    relative_confidence: float | None
    confident: bool | None
    # Why the numbers cannot be true; None: nothing shows it.
    implausible: str | None
    mfu: float | None
    hfu: float | None
    # From the measurement; from the failed rank if the last attempt ran out of memory.
    peak_memory_allocated_bytes: int | None
    peak_memory_reserved_bytes: int | None
    device_memory_bytes: int | None
    thrashing: bool | None
    fingerprint_digest: str | None  # of the attempt that counts
    measured_at: dt.datetime | None  # of the attempt that counts
    nodes: tuple[str, ...]  # where the attempt that counts ran
    is_current_fingerprint: bool | None  # None: no measurement counts
    failure_kind: FailureKind | None  # of the last attempt
    failure_message: str | None
    # From the last attempt, if it ran out of memory.
    memory: MemoryShortage | None
    gpu_seconds: float | None  # of the last attempt
    created_at: dt.datetime
    updated_at: dt.datetime
    load: MachineLoad = NO_LOAD  # of the attempt that counts
    # As a driver or kernel saw it, and which.
    peak_memory_driver_bytes: int | None = None
    peak_memory_driver_kind: DriverMemoryKind | None = None
    peak_memory_active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    device_used_bytes: int | None = None  # by everything, after the timed steps
    # Why its steps do not show the speed of a long run.
    unsteady: str | None = None
    # What of its step times nothing checks.
    unchecked: str | None = None
    # None: it was timed to its end.
    step_seconds_bound: float | None = None
    joules_per_token: float | None = None  # None: no GPU told
    extra: Mapping[str, Any] | None = None  # the program's own fields
    # The trial of another sweep that was measured.
    reused_from: int | None = None

    @property
    def was_launched(self) -> bool:
        """True if its sweep started it at least once: `max_trials` counts it."""
        return self.num_attempts > 0 and self.reused_from is None

    @property
    def is_comparable(self) -> bool:
        """True if it has numbers that may be compared with others of its fingerprint."""
        return self.state is TrialState.MEASURED and is_comparable(self)

    @property
    def is_ranked(self) -> bool:
        """True if it is in the order of its cell: comparable, and of the current fingerprint."""
        return self.is_comparable and self.is_current_fingerprint is True

    @property
    def is_ended_early(self) -> bool:
        """True if it was ended early, because it was too slow to be the best of its cell then."""
        return (
            self.state is TrialState.MEASURED
            and self.step_seconds_bound is not None
            and self.implausible is None
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    number: int
    epoch: int
    state: AttemptState
    superseded: bool
    pooled: bool
    purpose: Purpose | None  # None: not known
    started_at: dt.datetime
    ended_at: dt.datetime | None
    # By the sweep's clock; None: at ended_at.
    measured_at: dt.datetime | None
    nodes: tuple[str, ...] | None
    shared_nodes: bool | None
    phase_seconds: Mapping[Phase, float]
    gpu_seconds: float | None
    timed_seconds: float | None
    warmup_seconds: float | None
    # Communication settings that its ranks got; None: none, or not known.
    environment: Mapping[str, Any] | None
    fingerprint: Fingerprint | None
    processes_killed: int | None
    failure: Failure | None
    measurement: Measurement | None
    gpu: GpuUsage | None
    memory_by_part: Mapping[str, int] | None
    load: MachineLoad = NO_LOAD
    # By node: cores to which each rank was bound; None: to none.
    bound_cpus: Mapping[str, list[str]] | None = None

    @property
    def still_counts(self) -> bool:
        """True unless another attempt replaced it, or it was invalidated.

        Of several runs of a trial that count together, only the median is not superseded.
        """
        return self.pooled or not self.superseded

    def reserved(self, num_gpus: int) -> ReservedGpuSeconds | None:
        """The uses of its GPU-seconds; None: it has not ended, or its GPU-seconds are not known."""
        if self.gpu_seconds is None:
            return None
        counts = self.state is AttemptState.MEASURED and self.still_counts
        outcome = outcome_of(self.failure.kind if self.failure is not None else None, counts=counts)
        return of_attempt(
            self.gpu_seconds,
            num_gpus=num_gpus,
            outcome=outcome,
            timed_seconds=self.timed_seconds,
            warmup_seconds=self.warmup_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRepeat:
    """A repeat that was measured with other code or software than its trial, or failed so."""

    fingerprint: Fingerprint | None  # None: not known
    failure_kind: FailureKind | None  # None: it was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """The repeats of a measured trial: its runs, failures, and repeats with other code."""

    # Measurements that count together, the first included.
    runs: tuple[Run, ...]
    # Numbers of failed repeats, without those with other code.
    failures: Mapping[FailureKind, int]
    # None: not known, or all repeats of the cell have the same.
    fingerprint: Fingerprint | None = None
    # Repeats that began after all runs of the cell that count.
    others: tuple[OtherRepeat, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ImplausibleRow:
    """A trial that is not ranked, because its numbers cannot be true."""

    cell_id: int
    trial_id: int
    layout: str  # its key
    tokens_per_second_per_gpu: float
    implausible: str  # why


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedEarlyRow:
    """A trial that is not ranked, because it was ended before its last timed step."""

    cell_id: int
    trial_id: int
    layout: str  # its key
    step_seconds_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRepeatRow:
    """A repeat of a measured trial that failed: it does not count."""

    cell_id: int
    trial_id: int
    attempt: int
    failure_kind: FailureKind
    failure_message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherClockRow:
    """A measured attempt whose GPUs had another clock than usual in their cell."""

    cell_id: int
    trial_id: int
    attempt: int
    gpu_clock_mhz: float
    gpu_clock_off: float  # relative to the usual clock


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """The difference of two runs of one layout in a cell, on average."""

    relative: float  # to the first run
    num_repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRow:
    """The measured peak that the MFU of one or more attempts uses."""

    nodes: tuple[str, ...]
    precision: Precision
    device_name: str | None
    flops: float  # per second, of one device
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheckRow:
    """The last check of a node."""

    node: str
    at: dt.datetime
    is_fit: bool
    failed: str | None
    host: str | None
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """A node on which nothing is placed, or was not for a while."""

    node: str
    since: dt.datetime
    until: dt.datetime | None  # None: it is benched now
    reason: BenchReason
    is_remeasured: bool
    evidence: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """One collective at one message size, as `sweep netbench` measured it."""

    run_token: str
    at: dt.datetime
    device_name: str | None
    backend: str
    sample: LinkSample
    num_calls: int
    nodes: tuple[str, ...]
    torch: str | None
    nccl: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    id: int
    at: dt.datetime
    trial_id: int | None
    attempt: int | None
    event: str
    from_state: str | None
    to_state: str | None
    epoch: int
    detail: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRow:
    """A few steps of a trial's layout under a profiler."""

    number: int  # among those of its trial
    epoch: int | None  # None: by `sweep profile`
    state: str
    started_at: dt.datetime
    ended_at: dt.datetime | None
    nodes: tuple[str, ...]
    gpu_seconds: float | None
    advice: tuple[str, ...]
    memory: tuple[MemoryMoment, ...]  # of rank 0
    failure_kind: FailureKind | None
    failure_message: str | None
    ranks: Mapping[int, RankProfile]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialDetail:
    sweep_name: str
    run_folder: str  # of the sweep, under SWEEP_HOME/runs
    cell: CellRow
    trial: TrialRow
    attempts: tuple[AttemptRow, ...]
    events: tuple[EventRow, ...]
    profiles: tuple[ProfileRow, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CellStatus:
    cell: CellRow
    num_trials: Mapping[TrialState, int]  # every state, also those with none
    best: TrialRow | None  # under the current fingerprint
    # Trials with at least one attempt in this sweep: what max_trials counts.
    num_launched: int
    # Measured ones whose numbers cannot be true. None: not counted, since the cell has a best
    # layout or nothing measured.
    num_implausible: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintCounts:
    """The numbers of measured trials of a cell with its fingerprint, and with earlier ones."""

    cell_id: int
    num_current: int
    digest: str | None  # of the cell
    # Each earlier fingerprint with its trials, the one that was measured last at the end.
    earlier: tuple[tuple[str | None, int], ...]
    # Repeats with another fingerprint that began after all that count: they do not count.
    num_apart: int
    apart_digest: str | None
    # The last measurement with the cell's fingerprint; None: none counts.
    newest_attempt_id: int | None

    @property
    def num_earlier(self) -> int:
        """The trials whose numbers have an earlier fingerprint."""
        return sum(num for _, num in self.earlier)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderWayRow:
    """An attempt that has not ended: of a trial under way, or of one that is measured again."""

    trial_id: int
    cell_id: int
    cell: str  # its key
    num_gpus: int
    layout: str  # its key
    state: TrialState  # of the trial
    attempt: int
    nodes: tuple[str, ...]  # where it was placed
    purpose: Purpose | None  # of its attempt; None: not known
    # When the state began; if a trial is measured again, when the attempt began.
    since: dt.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """One call of `run_sweep` that got its sweep."""

    epoch: int
    host: str
    pid: int
    started_at: dt.datetime
    seen_at: dt.datetime
    ended_at: dt.datetime | None
    num_gpus: int  # slots of the cluster
    price_per_gpu_hour: float | None
    # Empty: the call goes on, or died.
    stop_reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedBySweep:
    """The reserved GPU-seconds of a sweep by use, over all of its sessions."""

    total: ReservedGpuSeconds
    # By cell id; idle leases belong to no cell.
    by_cell: Mapping[int, ReservedGpuSeconds]
    # GPU-seconds of all slots while orchestrators worked; None: not known.
    capacity: float | None

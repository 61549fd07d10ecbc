"""The report of a node's launcher on an attempt: how each rank ended, and what was seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.fingerprint import Software
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.protocol import Phase, RankFailure, RankResult


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """NVML's report on one node's GPUs during timed steps. Unknown is None."""

    # Mean share of time in which at least one kernel ran, however small.
    busy: float | None = None
    power_watts: float | None = None  # mean per GPU
    energy_joules: float | None = None  # of all GPUs together
    # SM clock: the median of the slowest device, and the lowest of all samples.
    clock_mhz: float | None = None
    lowest_clock_mhz: float | None = None
    # Means by GPM, 0..1: of multiprocessors, of tensor cores, of the memory's bandwidth.
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    num_samples: int = 0
    # The peak of the fullest device, whether steps were timed or not, less what was used before.
    peak_memory_bytes: int | None = None

    def joules_per_token(self, tokens_per_second_per_gpu: float) -> float | None:
        """Return the energy that a GPU takes for a token at this speed."""
        return None if self.power_watts is None else self.power_watts / tokens_per_second_per_gpu


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The end of one rank, and what it wrote."""

    rank: int
    exit_code: int | None = None  # None: we killed it
    signal: int | None = None
    result: RankResult | None = None
    failure: RankFailure | None = None
    bad_result: str | None = None  # why its result is not valid
    phase: Phase = Phase.START
    step: int = 0
    # As its launcher saw them, for a rank that tells none itself.
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    ended_at_unix_seconds: float | None = None
    log_path: str = ""
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A launcher's report of its node's ranks after an attempt; all its processes have ended."""

    node: str  # host name; address if names repeat
    ranks: Sequence[RankOutcome]
    failure: Failure | None = None  # None: every rank measured
    failed_at_unix_seconds: float | None = None
    # Rank 0's numbers are in, and its gang was ended: how other ranks ended does not matter.
    has_enough: bool = False
    seconds: float = 0.0  # until the last process has ended
    # From the last result to the end of the last process; None: not every rank measured.
    teardown_seconds: float | None = None
    processes_killed: int = 0  # without the ranks themselves
    # The ranks' settings of communication, as `communication.recorded` selects them.
    environment: Mapping[str, str] = field(default_factory=dict)
    set_by_launcher: tuple[str, ...] = ()  # names only the launcher set
    gpu: GpuUsage = field(default_factory=GpuUsage)
    # All the memory of the GPU that was nearest to its limit, as its driver says; None: not read.
    device_memory_bytes: int | None = None
    load: MachineLoad = field(default_factory=MachineLoad)  # during timed steps
    # The software of a user's program; for ours only the driver.
    software: Software = field(default_factory=Software)
    # The cores near each GPU, to which its rank was bound: `0-31,64-95`; empty: to none.
    bound_cpus: tuple[str, ...] = ()

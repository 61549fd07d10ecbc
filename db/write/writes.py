"""The values that a caller writes to the store, and its answers. They know no SQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import FAILED_EVENTS, TrialEvent, TrialState
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import Phase
from orchestrator.core.trial.purpose import REPEATS, Purpose
from orchestrator.core.trial.rank_profile import RankProfile

NO_USAGE = GpuUsage()


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTrial:
    """A layout of a cell that is about to be launched, and why."""

    cell_id: int
    layout: Layout
    why: str | None = None
    predicted_tokens_per_second_per_gpu: float | None = None
    predicted_memory_bytes: float | None = None
    # In rank order; None: its gang is not placed yet.
    nodes: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAttempt:
    """A trial that is about to be launched: a QUEUED one, or for a repeat a MEASURED one."""

    trial_id: int
    nodes: Sequence[str] | None = None
    shared_nodes: bool | None = None
    purpose: Purpose = Purpose.RETRY
    why: str | None = None

    @property
    def is_repeat(self) -> bool:
        return self.purpose in REPEATS


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEnd:
    """The result of a profile, or its failure."""

    trial_id: int
    number: int
    nodes: Sequence[str]
    gpu_seconds: float
    # Rank 0, the slowest, and those asked for; empty if it failed.
    ranks: Mapping[int, RankProfile]
    advice: Sequence[str]
    failure: Failure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """A layout that another trial proves infeasible, recorded without a launch."""

    cell_id: int
    layout: Layout
    why: str
    condemned_by: int | None  # the trial that proves it


class AttemptFacts(TypedDict, total=False):
    """Facts about an attempt, however it ended."""

    phases: Mapping[Phase, float]  # seconds in each, worst rank
    fingerprint: Fingerprint | None
    gpu_seconds: float | None  # reserved GPUs x seconds
    timed_seconds: float | None  # of these seconds, in timed steps
    # The part of these seconds in the steps before the timed ones.
    warmup_seconds: float | None
    processes_killed: int | None
    nodes: Sequence[str] | None  # None: as given when it began
    shared_nodes: bool | None
    environment: Mapping[str, Any]  # see core.communication.over_nodes
    load: MachineLoad  # of its nodes
    # By node, of each rank; empty: bound to none.
    bound_cpus: Mapping[str, Sequence[str]]
    # By the sweep's clock. Not given: the time when its end is recorded.
    measured_at: dt.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppedCell:
    """The state of a cell's search when its call ended."""

    cell: Cell
    reason: str
    # Layouts that were neither launched nor ruled out.
    num_untried: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredEnd:
    """The attempt left a measurement."""

    measurement: Measurement
    gpu: GpuUsage = NO_USAGE
    memory_by_part: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedEnd:
    """The attempt failed. `event` moves its trial: OUT_OF_MEMORY, FAILED or REQUEUED."""

    failure: Failure
    event: TrialEvent
    peak_memory_bytes: int | None = None
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.event not in FAILED_EVENTS:
            raise ValueError(
                f"a failure does not end in {self.event}; it does in one of: "
                f"{', '.join(sorted(FAILED_EVENTS))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The end of an attempt, and all that is known of it."""

    trial_id: int
    attempt: int
    outcome: MeasuredEnd | FailedEnd
    # True if it made its first step, which may not be stored yet.
    stepped: bool = False
    facts: AttemptFacts = field(default_factory=AttemptFacts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The effect of a recorded end of an attempt on its trial."""

    # State of the trial after all ends that were recorded together.
    state: TrialState
    # True if its measurement counts, once all ends of the write are stored. False: it failed,
    # another attempt came first, or its cell has another fingerprint.
    counts: bool
    # As stored: with the software that other attempts of the sweep found, if it was not known.
    fingerprint: Fingerprint | None
    # True if it has the fingerprint of its cell, once all ends of the write are stored. False:
    # other code began later, or it failed before its fingerprint was known.
    is_current: bool = True

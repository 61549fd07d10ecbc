"""What the store is told of trials, as values: what begins, what is never to begin, and how an attempt ended; and what it answers. They know no SQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.protocol import GpuUsage, Phase
from orchestrator.core.trial.purpose import REPEATS, Purpose

FAILED_EVENTS = frozenset({TrialEvent.OUT_OF_MEMORY, TrialEvent.FAILED, TrialEvent.REQUEUED})
NO_USAGE = GpuUsage()


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTrial:
    """A layout of a cell that is about to be launched, and why."""

    cell_id: int
    layout: Layout
    why: str | None = None
    predicted_tokens_per_second_per_gpu: float | None = None
    predicted_memory_bytes: float | None = None
    nodes: Sequence[str] | None = None  # in rank order; None: its gang has still to be placed


@dataclass(frozen=True, kw_only=True, slots=True)
class NewAttempt:
    """A trial of the store that is about to be launched: one that is QUEUED, or, as a repeat, one that is MEASURED."""

    trial_id: int
    nodes: Sequence[str] | None = None
    shared_nodes: bool | None = None
    purpose: Purpose = Purpose.RETRY
    why: str | None = None

    @property
    def is_repeat(self) -> bool:
        return self.purpose in REPEATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """A layout that another trial proves infeasible: recorded without a launch."""

    cell_id: int
    layout: Layout
    why: str
    condemned_by: int | None  # the trial that proves it


class AttemptFacts(TypedDict, total=False):
    """What is known of an attempt however it ended."""

    phases: Mapping[Phase, float]  # seconds in each, worst rank
    fingerprint: Fingerprint | None
    gpu_seconds: float | None  # GPUs held x seconds
    timed_seconds: float | None  # of these seconds, in timed steps
    warmup_seconds: float | None  # and in the steps before them
    processes_killed: int | None
    nodes: Sequence[str] | None  # None: as given when it began
    shared_nodes: bool | None
    environment: Mapping[str, Any]  # see core.communication.over_nodes
    load: MachineLoad  # of its nodes
    measured_at: (
        dt.datetime
    )  # by the clock that the sweep goes by; not given: when its end was written down


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredEnd:
    """The attempt left a measurement."""

    measurement: Measurement
    gpu: GpuUsage = NO_USAGE
    memory_by_part: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedEnd:
    """The attempt failed. `event` is what becomes of its trial: OUT_OF_MEMORY, FAILED or REQUEUED."""

    failure: Failure
    event: TrialEvent
    peak_memory_bytes: int | None = None
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.event not in FAILED_EVENTS:
            raise ValueError(
                f"a failure does not end in {self.event}; it does in one of: {', '.join(sorted(FAILED_EVENTS))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """An attempt that is over, and all that is known of it."""

    trial_id: int
    attempt: int
    outcome: MeasuredEnd | FailedEnd
    stepped: bool = False  # it is known to have made its first step: noted with its end, where that was not done before
    facts: AttemptFacts = field(default_factory=AttemptFacts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the end of an attempt came to."""

    state: TrialState  # of its trial, with all that was told together
    counts: bool  # what it measured is its trial's; False: it failed, or another came first and it is kept beside that

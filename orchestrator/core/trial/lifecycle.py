"""The states of a trial, and the one table of how it moves between them.

An out-of-memory is a result. A crash is a result about the code. A lost node is not a result: its
trial waits again. Nothing here knows a clock, a file or SQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class TrialState(StrEnum):
    QUEUED = "queued"
    LAUNCHING = "launching"
    RUNNING = "running"
    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    PRUNED = "pruned"


class TrialEvent(StrEnum):
    GANG_PLACED = "gang_placed"
    FIRST_STEP = "first_step"
    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    REQUEUED = "requeued"  # the machine's fault, or on request
    PRUNED = "pruned"  # proven infeasible by another trial
    INVALIDATED = "invalidated"  # by a person: measure it again
    REPEATED = "repeated"  # another attempt of a measured trial


class LogEvent(StrEnum):
    """Other events of the log. They change no trial's state."""

    ADDED = "added"  # a trial's first row
    # An attempt's result arrived too late to count.
    SUPERSEDED = "superseded"
    REPEAT_FAILED = "repeat_failed"  # the trial keeps its numbers
    BENCHED = "benched"  # a node, without a trial
    UNBENCHED = "unbenched"
    # By a person, of a trial: its orchestrator reads it when it renews its lease.
    ENQUEUED = "enqueued"
    RETRY_ASKED = "retry_asked"


REQUESTS = (LogEvent.ENQUEUED, LogEvent.RETRY_ASKED)

_S, _E = TrialState, TrialEvent

TRANSITIONS: Mapping[tuple[TrialState, TrialEvent], TrialState] = MappingProxyType(
    {
        (_S.QUEUED, _E.GANG_PLACED): _S.LAUNCHING,
        (_S.QUEUED, _E.PRUNED): _S.PRUNED,
        (_S.LAUNCHING, _E.FIRST_STEP): _S.RUNNING,
        (_S.LAUNCHING, _E.OUT_OF_MEMORY): _S.OUT_OF_MEMORY,
        (_S.LAUNCHING, _E.FAILED): _S.FAILED,
        (_S.LAUNCHING, _E.REQUEUED): _S.QUEUED,
        (_S.RUNNING, _E.MEASURED): _S.MEASURED,
        (_S.RUNNING, _E.OUT_OF_MEMORY): _S.OUT_OF_MEMORY,
        (_S.RUNNING, _E.FAILED): _S.FAILED,
        (_S.RUNNING, _E.REQUEUED): _S.QUEUED,
        (_S.MEASURED, _E.REPEATED): _S.MEASURED,
        (_S.MEASURED, _E.MEASURED): _S.MEASURED,
        **{
            (state, _E.INVALIDATED): _S.QUEUED
            for state in (_S.MEASURED, _S.OUT_OF_MEMORY, _S.FAILED, _S.PRUNED)
        },
    }
)

INITIAL = TrialState.QUEUED
UNDER_WAY = frozenset({TrialState.LAUNCHING, TrialState.RUNNING})
UNFINISHED = UNDER_WAY | {INITIAL}
TERMINAL = frozenset(TrialState) - UNFINISHED
# A person may ask to measure trials in these states again.
INVALIDATABLE = frozenset(state for state, event in TRANSITIONS if event is _E.INVALIDATED)
# The events by which an attempt ends without a measurement.
FAILED_EVENTS = frozenset({_E.OUT_OF_MEMORY, _E.FAILED, _E.REQUEUED})


class IllegalTransition(ValueError):
    """A trial cannot take this event in its state; nothing was changed."""


def advance(state: TrialState, event: TrialEvent) -> TrialState:
    """Return the state that follows. Raises IllegalTransition for a pair that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = sorted(e for s, e in TRANSITIONS if s is state)
        raise IllegalTransition(
            f"{event} is not possible in state {state}; possible: {', '.join(allowed) or 'nothing'}"
        ) from None


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram, for docs/architecture.md."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}"]
    lines += [
        f"    {state} --> {target}: {event}" for (state, event), target in TRANSITIONS.items()
    ]
    lines += [f"    {state} --> [*]" for state in TrialState if state in TERMINAL]
    return "\n".join(lines)

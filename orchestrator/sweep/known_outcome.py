"""Turns a stored trial into what a search learns about its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import nan

from db.read.rows import TrialRow
from orchestrator.core.search.outcome import Failed, Measured, OutOfMemory
from orchestrator.core.trial.failure_kinds import HANG_KINDS, POLICIES, Fault
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.peak_memory import allocator_peak
from orchestrator.search.layout_state import Condemned, Known, SetAside, UnderWay
from orchestrator.sweep.verdict import relative_excess


def with_proofs(known: Known | None, trial_id: int, num_proofs: Mapping[int, int] | None) -> Known:
    """Return the known outcome with the number of attempts that prove the trial does not fit."""
    if isinstance(known, OutOfMemory) and num_proofs is not None:
        return replace(known, num_proofs=num_proofs.get(trial_id, 0))
    return known or SetAside()


def known_of(trial: TrialRow) -> Known | None:
    """Return what a stored trial tells of its layout; None: nothing.

    A trial tells nothing if it was measured under other conditions or the machine was at fault.
    A measurement that cannot be true has no value: only that it fits is known.
    One that waits is under way: it will be launched without being asked for. If it hung before, it
    counts as failed until it has run again.
    """
    match trial.state:
        case TrialState.MEASURED if trial.is_current_fingerprint is False:
            return None
        case TrialState.MEASURED:
            seconds = nan if trial.implausible else trial.step_seconds_median
            assert seconds is not None, f"trial {trial.id} is measured and has no number"
            return Measured.of_step(
                seconds,
                peak_memory_bytes=allocator_peak(trial),
                joules_per_token=trial.joules_per_token,
            )
        case TrialState.OUT_OF_MEMORY:
            return OutOfMemory(
                excess=relative_excess(
                    trial.peak_memory_allocated_bytes,
                    trial.device_memory_bytes,
                    trial.memory,
                )
            )
        case TrialState.FAILED if (
            trial.failure_kind is not None
            and POLICIES[trial.failure_kind].fault is not Fault.MACHINE
        ):
            return Failed()
        case TrialState.FAILED:
            return None
        case TrialState.PRUNED:
            return Condemned()
        case TrialState.QUEUED if trial.failure_kind in HANG_KINDS:
            return Failed()
        case TrialState.QUEUED | TrialState.LAUNCHING | TrialState.RUNNING:
            return UnderWay()

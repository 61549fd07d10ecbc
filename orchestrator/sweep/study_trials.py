"""Stored trials as an Optuna study shows them, and those that it leaves out."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from db.read.rows import TrialRow
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.search.optuna_storage import StudyState, StudyTrial
from orchestrator.sweep.trial_numbers import numbers_of

OTHER_SOFTWARE = "measured with another fingerprint than the newest"
NOT_ENDED = "not ended"
# The columns of a trial that become attributes, if they are known.
_ATTRIBUTES = (
    "why", "num_attempts", "num_measurements", "tokens_per_second_per_gpu", "step_seconds_median",
    "relative_confidence", "mfu", "hfu", "joules_per_token", "peak_memory_allocated_bytes",
    "peak_memory_reserved_bytes", "device_memory_bytes", "predicted_tokens_per_second_per_gpu",
    "predicted_memory_bytes", "condemned_by", "reused_from", "failure_kind", "failure_message",
    "implausible", "step_seconds_bound", "fingerprint_digest",
)  # fmt: skip


def study_trials(
    trials: Iterable[TrialRow],
    spans: Mapping[int, tuple[dt.datetime, dt.datetime]],
    objectives: Sequence[Objective],
    *,
    price_per_gpu_hour: float | None = None,
    device_memory_bytes: float | None = None,
) -> tuple[list[StudyTrial], dict[str, int]]:
    """Return the trials of a cell for a study, and how many were left out, by reason.

    `spans`: start of the first and end of the last attempt, by trial id; `device_memory_bytes`: of
    trials that do not name it. A measured trial without one of the objectives is left out: a
    complete trial of Optuna has all of them.
    """
    found, left_out = [], Counter[str]()
    for trial in trials:
        state = _state(trial)
        if not isinstance(state, StudyState):
            left_out[state] += 1
            continue
        values = None
        if state is StudyState.COMPLETE:
            known = numbers_of(
                trial,
                device_memory_bytes=device_memory_bytes,
                price_per_gpu_hour=price_per_gpu_hour,
            )
            told = [known.value(objective) for objective in objectives]
            values = tuple(value for value in told if value is not None)
            if len(values) < len(told):
                absent = objectives[told.index(None)]
                left_out[f"measured without {absent}"] += 1
                continue
        # A condemned layout has no attempt.
        began, ended = spans.get(trial.id, (trial.created_at, trial.updated_at))
        found.append(
            StudyTrial(
                layout=trial.layout,
                state=state,
                values=values,
                started_at=began,
                ended_at=ended,
                attributes=_attributes(trial),
            )
        )
    return found, dict(left_out)


def _state(trial: TrialRow) -> StudyState | str:
    """The form of a trial in the study, or the reason why it is left out."""
    match trial.state:
        case TrialState.MEASURED if trial.is_current_fingerprint is False:
            return OTHER_SOFTWARE
        case TrialState.MEASURED if trial.implausible is not None:
            return StudyState.FAIL
        case TrialState.MEASURED if trial.step_seconds_bound is not None:
            return StudyState.PRUNED
        case TrialState.MEASURED:
            return StudyState.COMPLETE
        case TrialState.OUT_OF_MEMORY | TrialState.FAILED:
            return StudyState.FAIL
        case TrialState.PRUNED:
            return StudyState.PRUNED
        case TrialState.QUEUED | TrialState.LAUNCHING | TrialState.RUNNING:
            return NOT_ENDED


def _attributes(trial: TrialRow) -> dict[str, Any]:
    known = {name: getattr(trial, name) for name in _ATTRIBUTES}
    return {
        "trial_id": trial.id,
        "state": trial.state.value,
        **{name: value for name, value in known.items() if value is not None},
    }

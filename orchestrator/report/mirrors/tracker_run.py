"""A trial that has ended as trackers have it: parameters, metrics and tags of one run."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TERMINAL, TrialState
from orchestrator.core.trial.peak_memory import needed_bytes

if TYPE_CHECKING:
    from db.read.rows import CellRow, SweepRow, TrialRow

# Trackers refuse longer texts.
MOST_CHARACTERS = 500
_NUMBERS = (
    "tokens_per_second", "tokens_per_second_per_gpu", "mfu", "hfu", "step_seconds_median",
    "relative_confidence", "device_memory_bytes", "joules_per_token", "num_measurements",
    "predicted_tokens_per_second_per_gpu", "predicted_memory_bytes",
)  # fmt: skip
_WORDS = (
    "why", "failure_kind", "failure_message", "implausible", "unsteady", "unchecked",
    "fingerprint_digest", "is_current_fingerprint", "reused_from",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrackerRun:
    """One run. Its key is the same at every try, so that no trial has two."""

    key: str
    # Changes with what the run holds: a tracker that has this version lacks nothing.
    version: str
    trial_id: int
    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    started_at: dt.datetime
    ended_at: dt.datetime
    is_measured: bool


def runs_of(
    sweep: SweepRow,
    cells: Iterable[CellRow],
    trials: Iterable[TrialRow],
    spans: Mapping[int, tuple[dt.datetime, dt.datetime]],
) -> list[TrackerRun]:
    """Return a run for each trial that was launched, or reused, and has ended.

    `spans`: start of the first and end of the last attempt, by trial id.
    """
    by_id = {row.id: row for row in cells}
    return [
        _run(sweep, by_id[trial.cell_id], trial, spans.get(trial.id))
        for trial in trials
        if trial.state in TERMINAL and trial.num_attempts > 0
    ]


def _run(
    sweep: SweepRow, cell: CellRow, trial: TrialRow, span: tuple[dt.datetime, dt.datetime] | None
) -> TrackerRun:
    from orchestrator.core.problem.layout import to_columns

    began, ended = span or (trial.created_at, trial.updated_at)
    problem = {
        "model": cell.cell.model.name,
        "num_gpus": cell.cell.num_gpus,
        "sequence_length": cell.cell.sequence_length,
        "global_batch_size": cell.cell.global_batch_size,
    }
    numbers = {name: getattr(trial, name) for name in _NUMBERS}
    numbers["peak_memory_bytes"] = needed_bytes(trial)
    tags = {
        "sweep": sweep.name,
        "trial_id": trial.id,
        "cell": cell.cell.key,
        "layout": trial.layout.key,
        "state": trial.state.value,
        **{name: getattr(trial, name) for name in _WORDS},
    }
    return TrackerRun(
        key=f"{sweep.run_token}-{trial.id}",
        version=f"{trial.state}:{trial.num_attempts}:{trial.updated_at.isoformat()}"
        f":{trial.is_current_fingerprint}",
        trial_id=trial.id,
        name=f"trial {trial.id}: {trial.layout.short}"[:MOST_CHARACTERS],
        params=_texts({**problem, **to_columns(trial.layout)}),
        metrics={
            name: float(number)
            for name, number in numbers.items()
            if number is not None and isfinite(number)
        },
        tags=_texts(tags),
        started_at=began,
        ended_at=ended,
        is_measured=trial.state is TrialState.MEASURED,
    )


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {
        name: str(value)[:MOST_CHARACTERS] for name, value in values.items() if value is not None
    }

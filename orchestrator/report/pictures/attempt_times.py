"""The times when each attempt had its GPUs, from its reserved GPU-seconds and its end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orchestrator.core.trial.comparable import is_comparable
from orchestrator.core.trial.reserved_time import Outcome, outcome_of
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import AttemptRow


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """An attempt from start to end, in seconds since 1970. Unknown is None."""

    trial_id: int
    attempt: int
    cell_id: int
    num_gpus: int
    nodes: tuple[str, ...]
    start: float
    # If the attempt has not ended: its start.
    end: float
    has_ended: bool
    # 0 if it has not ended, or they are not known.
    gpu_seconds: float
    outcome: Outcome | None  # None: it has not ended
    # Tokens/s/GPU of a measurement that can be ranked.
    speed: float | None


def spans(sweep: SweepRows) -> list[AttemptSpan]:
    """Return every attempt of a sweep in the order of trials.

    The end is by the sweep's clock, which is virtual in a simulation. An attempt starts as many
    seconds before its end as its GPUs were reserved.
    """
    found = []
    for one, attempt in sweep.attempts():
        num_gpus = one.cell.cell.num_gpus
        ended = attempt.measured_at or attempt.ended_at
        started = _seconds(attempt.started_at)
        if ended is not None and attempt.gpu_seconds is not None:
            started = _seconds(ended) - attempt.gpu_seconds / num_gpus
        found.append(
            AttemptSpan(
                trial_id=one.trial.id,
                attempt=attempt.number,
                cell_id=one.trial.cell_id,
                num_gpus=num_gpus,
                nodes=attempt.nodes or (),
                start=started,
                end=started if ended is None else _seconds(ended),
                has_ended=ended is not None,
                gpu_seconds=attempt.gpu_seconds or 0.0,
                outcome=None if ended is None else _outcome(attempt),
                speed=_speed(attempt),
            )
        )
    return found


def _outcome(attempt: AttemptRow) -> Outcome:
    counts = attempt.measurement is not None and attempt.still_counts
    return outcome_of(attempt.failure.kind if attempt.failure is not None else None, counts=counts)


def _speed(attempt: AttemptRow) -> float | None:
    found = attempt.measurement
    if found is None or not is_comparable(found):
        return None
    return found.tokens_per_second_per_gpu


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

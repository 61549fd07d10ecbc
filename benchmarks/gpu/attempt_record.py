"""The record of an attempt in a script's file: its numbers, or how it failed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.measurement import ImplausibleMeasurement, measure
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import RankResult, TrialRequest


def record_of(request: TrialRequest, report: NodeReport) -> dict[str, Any]:
    """Return the result of an attempt, with every number of its rank and its launcher."""
    attempt = {
        "model": request.model.name,
        "sequence_length": request.sequence_length,
        "layout": request.layout.key,
        "options": dict(request.options),
        "gpu": _told(asdict(report.gpu)),
        "load": _told(asdict(report.load)),
    }
    failure = report.failure
    if failure is not None:
        is_oom = failure.kind in (FailureKind.OOM_GPU, FailureKind.OOM_HOST)
        return {
            **attempt,
            "outcome": failure.kind.value,
            "message": failure.message[:500],
            "phase": failure.phase,
            "step": failure.step,
            "log_tail": "" if is_oom else failure.log_tail[-1500:],
        }
    results = [rank.result for rank in report.ranks if rank.result is not None]
    return {**attempt, "outcome": "measured", **numbers_of(request, results)}


def numbers_of(request: TrialRequest, results: Sequence[RankResult]) -> dict[str, Any]:
    first = results[0]
    told = first.model_dump(mode="json", exclude={"step_seconds", "warmup_seconds", "extra"})
    try:
        found = measure(
            results,
            model=request.model,
            sequence_length=request.sequence_length,
            layout=request.layout,
            plan=request.measurement,
        )
    except ImplausibleMeasurement as exc:
        return {"implausible": str(exc), "told": told}
    return {
        "tokens_per_second": found.tokens_per_second_per_gpu,
        "step_seconds_median": found.step_time.median,
        "relative_confidence": found.step_time.relative_confidence,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "step_seconds": [round(seconds, 6) for seconds in found.step_seconds],
        "told": told,
    }


def is_measured(record: Mapping[str, Any] | None) -> bool:
    return record is not None and record.get("tokens_per_second") is not None


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None: fewer than two."""
    if len(values) < 2:
        return None
    return (max(values) - min(values)) / statistics.median(values)


def _told(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, (), [], {})}

"""What messages between ranks, launchers and loop may contain at most, and what they say untold."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from orchestrator.core.trial import failure_kinds, protocol
from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind, Fault
from orchestrator.core.trial.fingerprint import Software
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.node_report import GpuUsage, NodeReport, RankOutcome
from orchestrator.core.trial.protocol import (
    CollectiveTime,
    Heartbeat,
    MeasurementPlan,
    Phase,
    ProgramSeen,
    RankFailure,
    RankResult,
)

RESULT: dict[str, Any] = {"step_seconds": [1.0]}
PLAN = {"warmup_steps": 1, "min_steps": 2, "max_steps": 2, "relative_confidence": 0.1}
FAILURE = {"exception": "E", "message": "m", "phase": "start", "at_unix_seconds": 0.0}
COLLECTIVE = {"collective": "x", "message_bytes": 1, "seconds": 1.0, "num_calls": 1}


@pytest.mark.parametrize(
    ("model", "given", "field", "least", "below", "most", "above"),
    [
        (RankResult, RESULT, "step_seconds", [1e-9], [0.9e-9], [1e7], [1.1e7]),
        (RankResult, RESULT, "tokens_per_step", 1, 0, 1 << 50, (1 << 50) + 1),
        (RankResult, RESULT, "peak_memory_allocated_bytes", 0, -1, 1 << 50, (1 << 50) + 1),
        (RankResult, RESULT, "allocator_retries", 0, -1, 1 << 40, (1 << 40) + 1),
        (RankResult, RESULT, "allocator_ooms", 0, -1, 1 << 40, (1 << 40) + 1),
        (RankResult, RESULT, "peak_flops", 1e-9, 0.0, 1e18, 1.01e18),
        (RankResult, RESULT, "loss_first", -1e30, -1.1e30, 1e30, 1.1e30),
        (RankResult, RESULT, "loss_last", -1e30, -1.1e30, 1e30, 1.1e30),
        (RankResult, RESULT, "gradient_norm", 0.0, -0.1, 1e30, 1.1e30),
        (
            RankResult,
            RESULT,
            "phase_seconds",
            {"start": 0.0},
            {"start": -1.0},
            {"start": 1e7},
            {"start": 1.1e7},
        ),
        (Heartbeat, {"phase": "steady"}, "step", 0, -1, 10**9, 10**9 + 1),
        (Heartbeat, {"phase": "steady"}, "at", 0.0, -0.1, 1e12, 1.1e12),
        (RankFailure, FAILURE, "at_unix_seconds", 0.0, -0.1, 1e11, 1.1e11),
        (RankFailure, FAILURE, "message", "", None, "x" * 4000, "x" * 4001),
        (RankFailure, FAILURE, "traceback", "", None, "x" * 100_000, "x" * 100_001),
        (CollectiveTime, COLLECTIVE, "message_bytes", 1, 0, 1 << 40, (1 << 40) + 1),
        (CollectiveTime, COLLECTIVE, "num_calls", 1, 0, 1 << 30, (1 << 30) + 1),
        (CollectiveTime, COLLECTIVE, "collective", "", None, "x" * 32, "x" * 33),
        (MeasurementPlan, PLAN, "warmup_steps", 1, 0, 10**6, None),
        (MeasurementPlan, PLAN, "min_steps", 2, 1, 10**6, None),
        (MeasurementPlan, PLAN, "max_steps", 2, 1, protocol.MAX_SAMPLES, protocol.MAX_SAMPLES + 1),
        (MeasurementPlan, PLAN, "relative_confidence", 1e-9, 0.0, 1e9, None),
    ],
)
def test_a_number_beyond_its_bounds_is_refused(
    model: type[BaseModel],
    given: dict[str, Any],
    field: str,
    least: Any,
    below: Any,
    most: Any,
    above: Any,
) -> None:
    for good in (least, most):
        model.model_validate(given | {field: good})
    for bad in (below, above):
        if bad is not None:
            with pytest.raises(ValidationError):
                model.model_validate(given | {field: bad})


@pytest.mark.parametrize(
    ("field", "most"),
    [("phase_seconds", 5), ("memory_bytes_by_part", 32), ("collectives", 1000)],
)
def test_a_collection_beyond_its_length_is_refused(field: str, most: int) -> None:
    def of(num: int) -> Any:
        if field == "collectives":
            return [COLLECTIVE] * num
        names = [*Phase] if field == "phase_seconds" else [f"part {n}" for n in range(num)]
        return dict.fromkeys(names[:num], 1)

    RankResult.model_validate(RESULT | {field: of(most)})
    if field != "phase_seconds":
        with pytest.raises(ValidationError):
            RankResult.model_validate(RESULT | {field: of(most + 1)})


def test_sources_of_a_peak_are_short() -> None:
    source = TypeAdapter(protocol.PeakSource)
    assert source.validate_python("x" * 200)
    with pytest.raises(ValidationError):
        source.validate_python("x" * 201)


def test_what_is_not_told_is_nothing() -> None:
    assert Heartbeat(phase=Phase.STEADY).model_dump() == {
        "phase": Phase.STEADY,
        "step": 0,
        "timed": False,
        "enough": False,
        "at": None,
        "total_limit_seconds": None,
    }
    seen = ProgramSeen(seconds=1.0)
    assert (seen.reads, seen.later_seconds, seen.every) == ([], [], 1)
    assert (seen.ended_itself, seen.knows_num_steps, seen.steps_per_line) == (True, True, None)
    failure = RankFailure.model_validate(FAILURE)
    assert (failure.step, failure.traceback, failure.out_of_memory) == (0, "", False)
    result = RankResult(step_seconds=[1.0]).model_dump(exclude={"step_seconds", "stack"})
    assert not any(result.values())
    outcome = RankOutcome(rank=3)
    assert (outcome.phase, outcome.step, outcome.log_path, outcome.log_tail) == (
        Phase.START,
        0,
        "",
        "",
    )
    report = NodeReport(node="n", ranks=())
    assert (report.has_enough, report.seconds, report.processes_killed) == (False, 0.0, 0)
    assert (report.environment, report.set_by_launcher) == ({}, ())
    assert (report.gpu, report.load, report.software) == (GpuUsage(), MachineLoad(), Software())
    assert GpuUsage().num_samples == 0


K = FailureKind


def test_who_may_be_at_fault_is_told_by_the_kind() -> None:
    assert {K.NCCL} == failure_kinds.AFTERMATH_KINDS
    assert {
        K.DEVICE_ERROR, K.XID, K.NODE_LOST, K.LAUNCH_FAILED, K.STORAGE, K.KILLED,
    } == failure_kinds.NODE_KINDS  # fmt: skip
    hangs = failure_kinds.HANG_KINDS
    assert {K.NCCL} | hangs == failure_kinds.ONE_NODE_KINDS
    machines = {kind for kind in K if POLICIES[kind].fault is Fault.MACHINE}
    assert K.DEVICE_ERROR in machines
    assert K.USER_ERROR not in failure_kinds.SUSPECT_KINDS
    assert machines | hangs == failure_kinds.SUSPECT_KINDS

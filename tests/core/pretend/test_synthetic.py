"""The drift that workload synthetic obeys on purpose."""

from __future__ import annotations

from itertools import islice
from math import log
from statistics import fmean, stdev
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.core.pretend.synthetic import noisy_steps, slowness, step_seconds, strikes
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.synthetic_options import (
    SyntheticDrift,
    SyntheticFault,
    SyntheticOptions,
)
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest


@pytest.mark.parametrize(
    # At 0, 150, 300, 450 and 600 s.
    ("drift", "expected"),
    [
        ({"kind": "slow_start", "size": 0.6, "seconds": 300.0}, [1.6, 1.6, 1.0, 1.0, 1.0]),
        ({"kind": "step", "size": -0.25, "seconds": 300.0}, [1.0, 1.0, 0.75, 0.75, 0.75]),
        ({"kind": "wave", "size": 0.2, "seconds": 600.0}, [1.0, 1.1, 1.2, 1.1, 1.0]),
        ({"kind": "slow_node", "size": 0.3, "node": "b"}, [1.3] * 5),
        ({"kind": "slow_node", "size": 0.3, "node": "c"}, [1.0] * 5),
    ],
)
def test_a_machine_drifts_as_it_is_told(drift: dict[str, Any], expected: list[float]) -> None:
    drifts = [SyntheticDrift.model_validate(drift)]
    assert [
        slowness(drifts, at, ["a", "b"]) for at in (0.0, 150.0, 300.0, 450.0, 600.0)
    ] == pytest.approx(expected)
    assert slowness([*drifts, *drifts], 0.0, ["a", "b"]) == pytest.approx(expected[0] ** 2)


def test_a_slow_node_has_a_name() -> None:
    with pytest.raises(ValidationError, match="slow_node needs the name of the slow node"):
        SyntheticOptions.model_validate({"drift": [{"kind": "slow_node", "size": 0.3}]})


def request(**changes: Any) -> TrialRequest:
    return TrialRequest.model_validate(
        {
            "sweep": "t",
            "trial_id": 1,
            "attempt": 1,
            "workload": "synthetic",
            "options": {},
            "model": PRESETS["llama-tiny"],
            "sequence_length": 64,
            "layout": Layout(data_parallel_size=2, micro_batch_size=4),
            "device": Device.CPU,
            "measurement": MeasurementPlan(
                warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.1
            ),
            "limits": PhaseLimits(
                start=1, rendezvous=1, first_step=1, steady=1, teardown=1, total=1
            ),
            "seed": 0,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("only", "rank", "changes", "hits"),
    [
        ({}, 1, {}, True),
        ({"rank": 1}, 1, {}, True),
        ({"rank": 1}, 0, {}, False),
        ({"first_attempt_only": True}, 0, {}, True),
        ({"first_attempt_only": True}, 0, {"attempt": 2}, False),
        ({"only_if": {"micro_batch_size": 4}}, 0, {}, True),
        ({"only_if": {"micro_batch_size": 4, "zero_stage": 1}}, 0, {}, False),
        ({"probability": 0.0}, 0, {}, False),
    ],
)
def test_a_fault_hits_the_ranks_attempts_and_layouts_that_it_names(
    only: dict[str, Any], rank: int, changes: dict[str, Any], hits: bool
) -> None:
    fault = SyntheticFault.model_validate({"fault": "oom"} | only)
    assert strikes(fault, request(**changes), rank) is hits


def test_a_fault_is_drawn_once_per_attempt_for_all_ranks() -> None:
    fault = SyntheticFault.model_validate({"fault": "oom", "probability": 0.3})
    drawn = [strikes(fault, request(attempt=number), 0) for number in range(1, 401)]
    # A share of 0.3 of 400 has a standard deviation of 0.023.
    assert sum(drawn) / 400 == pytest.approx(0.3, abs=0.08)
    assert drawn == [strikes(fault, request(attempt=number), 1) for number in range(1, 401)]


def test_steps_are_the_closed_form_s_scaled_slowed_down_and_noisy() -> None:
    h100, asked = DEVICES["h100-sxm"], request()
    drift = {"kind": "slow_start", "size": 0.6, "seconds": 300.0}
    quiet = SyntheticOptions.model_validate({"time_scale": 3.0, "noise": 0, "drift": [drift]})
    one = step_seconds(asked.model, asked.layout, asked.sequence_length, h100)
    assert list(islice(noisy_steps(asked, quiet, h100), 2)) == pytest.approx([4.8 * one] * 2)
    later = request(elapsed_seconds=400.0)
    assert next(noisy_steps(later, quiet, h100)) == pytest.approx(3.0 * one)
    noisy = quiet.model_copy(update={"noise": 0.05})
    logs = [log(seconds) for seconds in islice(noisy_steps(later, noisy, h100), 400)]
    assert stdev(logs) == pytest.approx(0.05, rel=0.15)
    assert fmean(logs) == pytest.approx(log(3.0 * one), abs=0.02)

"""Errors of predictions against SQL over the same store."""

from __future__ import annotations

import pytest

from orchestrator.report.pictures import (
    prediction,
)
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_errors_of_predictions_are_those_that_sql_computes(
    scaling: SweepRows, query: Query
) -> None:
    [(speed, memory, num)] = query(
        "SELECT avg(abs(predicted_tokens_per_second_per_gpu / tokens_per_second_per_gpu - 1)),"
        " avg(abs(1.0 * predicted_memory_bytes / peak_memory_allocated_bytes - 1)), count(*)"
        " FROM v_trial WHERE sweep = 'scaling' AND state = 'measured'"
    )
    speeds, memories = prediction.speeds([scaling]), prediction.memories([scaling])
    assert len(speeds) == len(memories) == num == 6
    assert prediction.mean_error(speeds) == pytest.approx(speed)
    assert prediction.mean_error(memories) == pytest.approx(memory)
    assert f"mean absolute error {speed:.1%}" in prediction.picture([scaling]).caption

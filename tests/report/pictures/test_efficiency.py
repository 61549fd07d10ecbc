"""Scaling efficiency against the view v_scaling."""

from __future__ import annotations

import pytest

from orchestrator.report.pictures import (
    efficiency,
)
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_efficiency_is_that_of_the_view(scaling: SweepRows, query: Query) -> None:
    strong = [line for line in efficiency.lines([scaling]) if not line.is_weak]
    expected = query(
        "SELECT trial_id, num_gpus, efficiency FROM v_scaling WHERE sweep = 'scaling' ORDER BY 2"
    )
    [line] = strong
    assert [(it.trial_id, it.num_gpus) for it in line.points] == [row[:2] for row in expected]
    assert [it.efficiency for it in line.points] == pytest.approx([row[2] for row in expected])

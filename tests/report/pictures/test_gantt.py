"""Bars of the cluster, and GPU-seconds by use, against SQL."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
from orchestrator.report.pictures import (
    gantt,
)
from orchestrator.report.pictures.attempt_times import spans
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_bars_of_the_cluster_hold_exactly_the_gpu_seconds_of_the_attempts(
    scaling: SweepRows, query: Query
) -> None:
    busy = sum((it.end - it.start) * it.num_gpus for it in spans(scaling))
    [(seconds,)] = query(
        "SELECT sum(gpu_seconds) FROM attempt JOIN trial ON trial.id = attempt.trial_id"
        " JOIN sweep ON sweep.id = trial.sweep_id WHERE sweep.name = 'scaling'"
    )
    assert busy == pytest.approx(seconds)
    # Six attempts on two nodes, two on one.
    assert len(gantt.bars([scaling])) == 6 * 2 + 2


def test_gpu_seconds_by_use_are_those_of_the_view(scaling: SweepRows, query: Query) -> None:
    total, unreserved = gantt.parts([scaling])
    names = list(ReservedGpuSeconds().parts)
    columns = ", ".join(f"sum({name}_gpu_seconds)" for name in names)
    [expected] = query(f"SELECT {columns} FROM v_gpu_seconds WHERE sweep = 'scaling'")
    assert [total.parts[name] for name in names] == pytest.approx([it or 0.0 for it in expected])
    assert unreserved is None
    figure = gantt.gpu_seconds([scaling]).figure
    assert figure is not None
    drawn = sum(trace["x"][0] for trace in figure["data"])
    assert drawn == pytest.approx(total.reserved / 3600)

"""Parallel coordinates have a line for each layout."""

from __future__ import annotations

from orchestrator.report.pictures import (
    parallel,
)
from orchestrator.report.sweep_rows import SweepRows


def test_parallel_coordinates_have_a_line_for_each_layout(scaling: SweepRows) -> None:
    figure = parallel.picture([scaling]).figure
    assert figure is not None
    ends = [trace["x"].count(None) for trace in figure["data"]]
    assert sum(ends) == 6

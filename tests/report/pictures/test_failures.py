"""Failures by kind and node against the view v_failure."""

from __future__ import annotations

from collections import Counter

from orchestrator.report.pictures import (
    failures,
)
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_failures_are_counted_as_sql_counts_them(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = Counter((one.kind.value, one.node) for one in failures.failed_attempts([tiny, scaling]))
    expected = query("SELECT failure_kind, failure_node, count(*) FROM v_failure GROUP BY 1, 2")
    assert found == {(kind, node): num for kind, node, num in expected}
    figure = failures.picture([tiny, scaling]).figure
    assert figure is not None
    assert sum(value or 0 for trace in figure["data"] for value in trace["x"]) == found.total()

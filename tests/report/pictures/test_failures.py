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


def test_each_bar_leads_to_its_trials_and_names_their_layouts_and_ranks(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    picture = failures.picture([tiny, scaling])
    assert picture.figure is not None
    found = {
        (trace["name"], node): (ids, text)
        for trace in picture.figure["data"]
        for node, ids, text in zip(trace["y"], trace["customdata"], trace["text"], strict=True)
    }
    rows = query(
        "SELECT failure_kind, failure_node, trial_id, layout, failure_rank FROM v_failure"
        " WHERE failure_node IS NOT NULL ORDER BY trial_id, attempt"
    )
    assert any(rank is not None for *_, rank in rows)
    for kind, node, trial_id, _, rank in rows:
        ids, text = found[kind, node]
        assert trial_id in ids
        assert f"trial {trial_id}, attempt " in text
        assert rank is None or f"first bad rank {rank}, dp" in text
    assert set(picture.trial_ids) == {trial_id for _, _, trial_id, _, _ in rows}

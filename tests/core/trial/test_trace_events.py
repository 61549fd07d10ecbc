"""Documents of traces: what is read of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.trial.trace_events import BadTrace, read_trace
from tests.core.trial.traces import annotation, document, host


def test_times_become_whole_nanoseconds() -> None:
    row = host("aten::mm", 0, 0) | {"ts": 4700953222129.625, "dur": 0.75}
    event = read_trace(document(row)).events[1]
    assert (event.start, event.end) == (4700953222129625, 4700953222130375)


def test_the_window_is_our_annotation_or_all_steps_of_the_profiler() -> None:
    steps = [annotation("ProfilerStep#3", 0, 40), annotation("ProfilerStep#4", 40, 90)]
    assert read_trace({"traceEvents": steps}).window == (0, 90_000)
    assert read_trace({"traceEvents": steps}).num_steps == 2
    assert read_trace(document(*steps, steps=(5, 80))).window == (5_000, 80_000)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([], "no list traceEvents"),
        ({"traceEvents": 3}, "no list traceEvents"),
        ({"traceEvents": [host("aten::mm", 0, 1)]}, "no annotation sweep::steps"),
        (document(host("aten::mm", 0, 0) | {"ts": float("nan")}), "ts nan"),
        (document(host("aten::mm", 5, 4)), "dur -1"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(found: Any, why: str) -> None:
    with pytest.raises(BadTrace, match=why):
        read_trace(found)


def test_rows_that_took_no_time_are_left_out() -> None:
    marks: list[Any] = [{"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "ac2g"}, "noise"]
    assert [event.name for event in read_trace(document(*marks)).events] == ["sweep::steps"]


def test_only_annotations_of_steps_count_and_there_is_one_at_least() -> None:
    steps = [annotation("ProfilerStep#3", 0, 40), host("ProfilerStep#4", 40, 90)]
    assert read_trace({"traceEvents": steps}).num_steps == 1
    assert read_trace({"traceEvents": steps}).window == (0, 40_000)
    # The first of our annotations is the window.
    again = annotation("sweep::steps", 200, 300)
    found = read_trace(document(again))
    assert (found.window, found.num_steps) == ((0, 100_000), 1)
    assert read_trace(document(again), num_steps=7).num_steps == 7


@pytest.mark.parametrize(("start", "is_read"), [(9e16, True), (1e17, False), (-1.1e17, False)])
def test_a_time_has_at_most_seventeen_digits(start: float, *, is_read: bool) -> None:
    row = host("x" * 200, 0, 0) | {"ts": start}
    if is_read:
        assert len(read_trace(document(row)).events) == 2
    else:
        with pytest.raises(BadTrace, match=f"^event '{'x' * 100}' has ts"):
            read_trace(document(row))


def test_groups_without_a_name_are_left_out() -> None:
    groups = [{"pg_name": 1, "pg_desc": "mesh_tp"}, {"pg_name": "2"}, {"pg_desc": "x"}, 3]
    found = read_trace(document(distributedInfo={"pg_config": groups}))
    assert found.descriptions == {"1": "mesh_tp", "2": ""}

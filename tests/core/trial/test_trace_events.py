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

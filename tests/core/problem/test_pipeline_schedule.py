from __future__ import annotations

import pytest

from orchestrator.core.problem.pipeline_schedule import (
    ONE_F_ONE_B,
    PipelineSchedule,
    ScheduleKind,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1f1b", ONE_F_ONE_B),
        ("gpipe", PipelineSchedule(kind=ScheduleKind.GPIPE)),
        (
            "interleaved:4",
            PipelineSchedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=4),
        ),
        (
            "interleaved:999",
            PipelineSchedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=999),
        ),
    ],
)
def test_a_schedule_reads_back_as_it_is_written(text: str, expected: PipelineSchedule) -> None:
    assert PipelineSchedule.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["", "1F1B", "interleaved", "interleaved:0", "interleaved:02", "interleaved:1000", "gpipe:2"],
)
def test_what_is_no_schedule_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="not one of gpipe, 1f1b"):
        PipelineSchedule.parse(text)


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        (ScheduleKind.INTERLEAVED, 1),
        (ScheduleKind.INTERLEAVED, 1000),
        (ScheduleKind.GPIPE, 2),
        (ScheduleKind.ONE_F_ONE_B, 2),
    ],
)
def test_only_an_interleaved_rank_has_several_stages(kind: ScheduleKind, stages: int) -> None:
    with pytest.raises(ValueError, match="stages per rank"):
        PipelineSchedule(kind=kind, virtual_stages=stages)


@pytest.mark.parametrize(
    ("text", "num_micro_batches", "expected"),
    [
        ("gpipe", 16, 16),
        ("1f1b", 16, 4),
        ("1f1b", 3, 3),
        # (v - 1) p + 2 (p - 1) + 1 chunks of half a rank's layers: 4 + 6 + 1 = 11.
        ("interleaved:2", 16, 5.5),
        ("interleaved:2", 4, 4),
    ],
)
def test_the_first_rank_keeps_what_the_schedule_says(
    text: str, num_micro_batches: int, expected: float
) -> None:
    schedule = PipelineSchedule.parse(text)
    assert schedule.num_in_flight(num_ranks=4, num_micro_batches=num_micro_batches) == expected

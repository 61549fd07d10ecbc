"""Profiles as text: rows that add up, remarks, and the chart of memory."""

from __future__ import annotations

from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part
from orchestrator.report.profile_text import PART_NAMES, memory_chart, remarks, split_rows
from tests.core.trial.rank_profiles import rank_profile


def test_every_part_has_a_name() -> None:
    assert set(PART_NAMES) == set(Part)


def test_parts_that_took_time_have_a_row_and_the_last_row_is_the_step() -> None:
    found = rank_profile({Part.EXPOSED_DP: 250_000, Part.IDLE: 50_000})
    assert split_rows({0: found}) == [
        ["matrix products", "0.7 ms", "70.0%"],
        ["exposed communication, DP", "0.2 ms", "25.0%"],
        ["idle", "0.1 ms", "5.0%"],
        ["step", "1.0 ms", "100%"],
    ]


def test_unknown_kernels_have_a_row_only_if_they_take_more_than_three_percent() -> None:
    little = split_rows({0: rank_profile({Part.UNKNOWN: 30_000, Part.OTHER: 100_000})})
    assert [row[0] for row in little] == ["matrix products", "other kernels", "step"]
    assert little[1][2] == "13.0%"
    much = split_rows({0: rank_profile({Part.UNKNOWN: 30_001})})
    assert "unknown kernels" in [row[0] for row in much]


def test_a_little_of_unknown_kernels_is_not_lost_without_other_kernels() -> None:
    rows = split_rows({0: rank_profile({Part.UNKNOWN: 20_000})})
    assert ["other kernels", "0.0 ms", "2.0%"] in rows


def test_remarks_tell_what_is_hidden_unknown_and_how_much_the_profiler_adds() -> None:
    found = rank_profile(
        {Part.UNKNOWN: 100_000},
        overlapped={**dict.fromkeys(Axis, 0), Axis.TP: 2_000_000},
        unknown={"mystery": 100_000},
        plain_step_seconds=0.0008,
    )
    text = "\n".join(remarks({0: found}))
    assert "rank 0: hidden behind kernels, no part of the step: TP 2.0 ms" in text
    assert "rank 0: unknown kernels: mystery" in text
    assert "the profiler adds 25%" in text


def test_a_chart_stacks_kinds_and_reaches_the_peak() -> None:
    sizes = [(4, 0), (4, 4), (4, 6), (4, 2)]
    moments = [
        MemoryMoment(
            step=1 + i // 2,
            part=StepPart.FORWARD,
            num_bytes={MemoryKind.PARAMETERS: fixed << 20, MemoryKind.ACTIVATIONS: more << 20},
        )
        for i, (fixed, more) in enumerate(sizes)
    ]
    lines = memory_chart(moments, height=10)
    columns = ["".join(line[12:].ljust(4)[i] for line in reversed(lines[:10])) for i in range(4)]
    assert [column.count("P") for column in columns] == [4, 4, 4, 4]
    assert [column.count("a") for column in columns] == [0, 4, 6, 2]
    assert lines[0].startswith("  10.0 MiB |")
    assert "step 1" in lines[11]
    assert "a activations" in lines[12]
    assert memory_chart([]) == []

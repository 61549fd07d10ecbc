"""A profile as lines for a terminal: its split, advice, and its memory as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment, RankProfile
from orchestrator.core.trial.trace_split import Part
from orchestrator.report import quantities as show

# Unknown kernels are shown only if they take more than this share of the step.
UNKNOWN_SHARE = 0.03
CHART_HEIGHT = 10
_SCALE_WIDTH = 10

PART_NAMES: Mapping[Part, str] = {
    Part.MATMUL: "matrix products",
    Part.ATTENTION: "attention",
    Part.OPTIMIZER: "optimizer",
    Part.OTHER: "other kernels",
    Part.UNKNOWN: "unknown kernels",
    Part.EXPOSED_TP: "exposed communication, TP",
    Part.EXPOSED_CP: "exposed communication, CP",
    Part.EXPOSED_PP: "exposed communication, PP",
    Part.EXPOSED_DP: "exposed communication, DP",
    Part.EXPOSED_OTHER: "exposed communication, other",
    Part.BUBBLE: "bubble of the pipeline",
    Part.HOST_BOUND: "waiting for the host",
    Part.IDLE: "idle",
}
# From the bottom of the chart to its top.
_LETTERS: Mapping[MemoryKind, str] = {
    MemoryKind.PARAMETERS: "P",
    MemoryKind.OPTIMIZER: "o",
    MemoryKind.GRADIENTS: "g",
    MemoryKind.ACTIVATIONS: "a",
    MemoryKind.TEMPORARIES: "t",
}


def split_rows(ranks: Mapping[int, RankProfile]) -> list[list[str]]:
    """Return a row for each part that some rank spent time in: its name, and time and share of each
    rank. The last row is the step.
    """
    is_much = any(one.share(Part.UNKNOWN) > UNKNOWN_SHARE for one in ranks.values())
    rows = []
    for part, name in PART_NAMES.items():
        # Too little for a row of their own, they still have to add up.
        parts = (part, Part.UNKNOWN) if part is Part.OTHER and not is_much else (part,)
        if part is Part.UNKNOWN and not is_much:
            continue
        if any(one.share(*parts) > 0 for one in ranks.values()):
            rows.append([name, *_cells(ranks, *parts)])
    total = [text for one in ranks.values() for text in (show.step_time(one.step_seconds), "100%")]
    return [*rows, ["step", *total]]


def _cells(ranks: Mapping[int, RankProfile], *parts: Part) -> list[str]:
    cells = []
    for one in ranks.values():
        seconds = sum(one.parts[part] for part in parts) / one.num_steps / 1e9
        cells += [show.step_time(seconds), show.percent(one.share(*parts))]
    return cells


def remarks(ranks: Mapping[int, RankProfile]) -> list[str]:
    """Return what the rows do not say: hidden communication, unknown kernels, and the profiler."""
    lines = []
    for rank, one in ranks.items():
        hidden = [
            f"{axis.value.upper()} {show.step_time(spent / one.num_steps / 1e9)}"
            for axis, spent in one.overlapped.items()
            if spent
        ]
        if hidden:
            lines.append(
                f"rank {rank}: hidden behind kernels, no part of the step: {', '.join(hidden)}"
            )
        if one.share(Part.UNKNOWN) > UNKNOWN_SHARE:
            lines.append(f"rank {rank}: unknown kernels: {', '.join(one.unknown)}")
    first = next(iter(ranks.values()))
    if first.plain_step_seconds:
        slower = first.step_seconds / first.plain_step_seconds - 1
        lines.append(
            f"without the profiler a step of this run takes"
            f" {show.step_time(first.plain_step_seconds)}: the profiler adds {max(slower, 0.0):.0%}"
        )
    return lines


def memory_chart(moments: Sequence[MemoryMoment], *, height: int = CHART_HEIGHT) -> list[str]:
    """Draw the memory of the first steps: a column for each moment, kinds stacked as letters."""
    if not moments:
        return []
    peak = max(moment.total for moment in moments) or 1
    columns = [_column(moment, peak, height) for moment in moments]
    lines = []
    for row in range(height - 1, -1, -1):
        label = show.memory(peak * (row + 1) / height) if row in (height - 1, height // 2) else ""
        text = "".join(column[row] for column in columns).rstrip()
        lines.append(f"{label:>{_SCALE_WIDTH}} |{text}")
    marks = ""
    for number, moment in enumerate(moments):
        is_first = number == 0 or moments[number - 1].step != moment.step
        marks = marks.ljust(number) + f"step {moment.step}" if is_first else marks
    lines.append(f"{'':>{_SCALE_WIDTH}} +{'-' * len(moments)}")
    lines.append(f"{'':>{_SCALE_WIDTH}}  {marks}")
    legend = ", ".join(f"{letter} {kind.value}" for kind, letter in _LETTERS.items())
    return [*lines, f"{'':>{_SCALE_WIDTH}}  {legend}"]


def _column(moment: MemoryMoment, peak: int, height: int) -> str:
    """From the bottom up; each boundary is rounded, so that the whole column has its height."""
    column, total = "", 0
    for kind, letter in _LETTERS.items():
        total += moment.num_bytes.get(kind, 0)
        column += letter * (round(total / peak * height) - len(column))
    return column.ljust(height)

"""Memory by part: predicted and measured, against the limit of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import ValidationError

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.peak_memory import needed_bytes, sources_of
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    COLORS,
    GIB,
    GREY,
    Picture,
    PictureAxis,
    Trace,
    figure,
    line_at,
    marked_up,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialDetail
    from orchestrator.core.sweepfile.spec import SweepSpec

MOST_SHOWN = 12
PER_CELL = 3
# For parts that are not known one by one.
WHOLE = "all parts together"
REST = "allocated beyond the parts"


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """A trial's peak memory: what was predicted, and what was measured by part. In bytes."""

    trial_id: int
    layout: str
    predicted_bytes: int | None
    # They add up to it, in the proportions of the formulas.
    predicted_parts: Mapping[str, float]
    # They add up to the measured peak, or to more if the parts had their own peaks.
    measured_parts: Mapping[str, int]
    measured_bytes: int | None
    limit_bytes: int | None


class Side(StrEnum):
    """The two bars of a trial."""

    PREDICTED = "predicted"
    MEASURED = "measured"

    def parts(self, bar: MemoryBar) -> Mapping[str, float]:
        """The parts of this bar, in bytes."""
        return bar.predicted_parts if self is Side.PREDICTED else bar.measured_parts


def bars(sweeps: Sequence[SweepRows]) -> tuple[MemoryBar, ...]:
    """Return the leading layouts of each cell, and of each the layout that needed most."""
    chosen: dict[int, tuple[SweepRows, TrialDetail]] = {}
    for sweep in sweeps:
        details = {one.trial.id: one for one in sweep.trials}
        for status in sweep.cells:
            ranking = sweep.rankings.get(status.cell.id)
            leading = ranking.leading if ranking is not None else ()
            some = [details[trial.id] for trial in leading if needed_bytes(trial) is not None]
            largest = max(some[1:], key=lambda one: needed_bytes(one.trial) or 0, default=None)
            first = some[: PER_CELL - 1]
            for one in [*first, *([largest] if largest is not None else [])]:
                chosen.setdefault(one.trial.id, (sweep, one))
    specs = {sweep.name: _spec(sweep) for sweep, _ in chosen.values()}
    shown = list(chosen.values())[:MOST_SHOWN]
    return tuple(_bar(one, specs[sweep.name]) for sweep, one in shown)


def _spec(sweep: SweepRows) -> SweepSpec | None:
    """The sweep's file; None: the store has none, or one of another version."""
    from orchestrator.core.sweepfile.spec import SweepSpec  # pydantic models, 0.2 s

    try:
        return SweepSpec.model_validate_json(sweep.sweep.spec_json)
    except ValidationError:
        return None


def _bar(one: TrialDetail, spec: SweepSpec | None) -> MemoryBar:
    trial = one.trial
    return MemoryBar(
        trial_id=trial.id,
        layout=trial.layout.short,
        predicted_bytes=trial.predicted_memory_bytes,
        predicted_parts=_predicted_parts(one, spec),
        measured_parts=_parts(one),
        measured_bytes=needed_bytes(trial),
        limit_bytes=trial.device_memory_bytes,
    )


def _predicted_parts(one: TrialDetail, spec: SweepSpec | None) -> dict[str, float]:
    """Return the parts of the stored prediction, whose constants were fitted at the time."""
    total = one.trial.predicted_memory_bytes
    if total is None:
        return {}
    if spec is None:
        return {WHOLE: total}
    from orchestrator.core.physics.memory import predict_memory  # numpy
    from orchestrator.core.problem.layout_table import LayoutTable
    from orchestrator.core.search.planner import trainer_of
    from orchestrator.core.trial.protocol import Device

    layout = one.trial.layout
    # On cores no allocator reserves memory.
    on_gpu = one.trial.peak_memory_reserved_bytes is not None
    device = Device.CUDA if on_gpu else Device.CPU
    trainer = trainer_of(spec, layout.options, device=device)
    found = predict_memory(LayoutTable.of([layout]), one.cell.cell, trainer)
    parts = {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "activations": found.activations,
        "temporaries": found.temporaries,
        "reserve": found.reserve,
    }
    sizes = {name: float(part[0]) for name, part in parts.items() if part[0] > 0}
    return {name: total * size / sum(sizes.values()) for name, size in sizes.items()}


def _parts(one: TrialDetail) -> dict[str, int]:
    """Return the parts of the attempt that counts, with what they leave of the peak."""
    peak = needed_bytes(one.trial)
    parts = next(
        (
            dict(attempt.memory_by_part)
            for attempt in one.attempts
            if attempt.measurement is not None and not attempt.superseded and attempt.memory_by_part
        ),
        None,
    )
    if parts is None:
        return {} if peak is None else {WHOLE: peak}
    rest = (peak or 0) - sum(parts.values())
    return parts | ({REST: rest} if rest > 0 else {})


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw two bars for each layout: predicted, and measured by part."""
    found = bars(sweeps)
    blank = Picture(
        name="memory",
        title="Memory: predicted and measured",
        question="What must shrink?",
    )
    if not found:
        return replace(blank, why_empty=_why_empty(sweeps))
    names = list(
        dict.fromkeys(part for one in found for part in (*one.predicted_parts, *one.measured_parts))
    )
    labels = [f"trial {one.trial_id}" for one in found]
    traces = [
        trace
        for number, name in enumerate(names)
        for side in Side
        if (trace := _trace(found, side, names[: number + 1]))["x"]
    ]
    named = set()
    for trace in traces:
        # One entry of the legend for both bars of a part.
        trace["showlegend"] = trace["name"] not in named
        named.add(trace["name"])
    limits = sorted({one.limit_bytes for one in found if one.limit_bytes is not None})
    kinds = sources_of(one.trial for sweep in sweeps for one in sweep.trials)
    lines = [line_at(limit / GIB, f"limit {show.memory(limit)}") for limit in limits[-1:]]
    return replace(
        blank,
        caption=_caption(found),
        figure=figure(
            traces,
            x=PictureAxis(title="", names=labels),
            y=PictureAxis(title=f"peak memory, {kinds}, worst rank (GiB)", from_zero=True),
            barmode="group",
            shapes=[shape for shape, _ in lines],
            annotations=[label for _, label in lines],
        ),
    )


def _trace(found: Sequence[MemoryBar], side: Side, names: Sequence[str]) -> Trace:
    """The bars of the last of some parts, on top of the others."""
    *below, name = names
    sides = [(one, side.parts(one)) for one in found]
    known = [(one, parts) for one, parts in sides if parts.get(name)]
    words = name.replace("_", " ")
    is_predicted = side is Side.PREDICTED
    color = GREY if name == WHOLE and is_predicted else COLORS[len(below) % len(COLORS)]
    return {
        "type": "bar",
        "name": words,
        "legendgroup": words,
        "offsetgroup": side.value,
        "x": [f"trial {one.trial_id}" for one, _ in known],
        "y": [parts[name] / GIB for _, parts in known],
        "base": [sum(parts.get(part, 0) for part in below) / GIB for _, parts in known],
        "customdata": [one.trial_id for one, _ in known],
        "hovertemplate": f"%{{x}}: %{{y:.2f}} GiB<extra>{marked_up(words)}, {side.value}</extra>",
        "marker": {"color": color, "opacity": 0.5 if is_predicted else 1.0},
    }


def _caption(found: Sequence[MemoryBar]) -> str:
    ratios = [
        one.predicted_bytes / one.measured_bytes
        for one in found
        if one.predicted_bytes is not None and one.measured_bytes
    ]
    text = (
        f"The leading layouts of each cell, {show.counted(len(found), 'trial')}: the prediction in"
        " pale colours next to the measurement."
    )
    if ratios:
        text += f" Predicted over measured: {min(ratios):.2f} to {max(ratios):.2f}."
    if all(set(one.measured_parts) == {WHOLE} for one in found):
        text += " The program reported no parts of its memory."
    return text


def _why_empty(sweeps: Sequence[SweepRows]) -> str:
    states = [one.trial.state for sweep in sweeps for one in sweep.trials]
    if TrialState.MEASURED in states:
        return (
            "No program reported its peak memory; a program of workload command reports it as"
            " peak_memory_allocated_bytes (docs/workloads.md)."
        )
    return "Nothing is measured yet; `sweep run` measures."

"""Profiled trials: what a step is spent on, and the memory of the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.trace_split import COMPUTATION, EXPOSED, Part
from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import COLORS, GIB, Picture, PictureAxis, figure
from orchestrator.report.profile_text import PART_NAMES
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_commands import UNTRAINED

if TYPE_CHECKING:
    from db.read.rows import ProfileRow, TrialDetail
    from orchestrator.core.trial.rank_profile import MemoryMoment

NOTHING_TRAINED = "Nothing was trained here, so there is nothing to profile. `sweep run` trains."
MOST_SHOWN = 12
# Computation in blues and greens, communication in warm colours, waiting in greys.
PART_COLORS = {
    Part.MATMUL: "#0072B2",
    Part.ATTENTION: "#56B4E9",
    Part.OPTIMIZER: "#009E73",
    Part.OTHER: "#8CC5B2",
    Part.UNKNOWN: "#C7D9E8",
    Part.EXPOSED_TP: "#D55E00",
    Part.EXPOSED_CP: "#E69F00",
    Part.EXPOSED_PP: "#F0C75E",
    Part.EXPOSED_DP: "#CC79A7",
    Part.EXPOSED_OTHER: "#E3B4CC",
    Part.BUBBLE: "#555B63",
    Part.HOST_BOUND: "#8A8F98",
    Part.IDLE: "#C4C8CE",
}
_KINDS = (
    MemoryKind.PARAMETERS,
    MemoryKind.OPTIMIZER,
    MemoryKind.GRADIENTS,
    MemoryKind.ACTIVATIONS,
    MemoryKind.TEMPORARIES,
)


STEP_SPLIT = Picture(
    name="step-split",
    title="What a step is spent on",
    question="Why is it slow?",
)
MEMORY_TIMELINE = Picture(
    name="memory-timeline",
    title="Memory over the first steps",
    question="When is the peak?",
)


@dataclass(frozen=True, kw_only=True)
class StepSplit:
    """The step of the slowest rank of a profiled trial, in seconds by part."""

    trial_id: int
    layout: str
    rank: int
    seconds: dict[Part, float]


def splits(sweeps: Sequence[SweepRows]) -> tuple[StepSplit, ...]:
    """Return the split of the last good profile of each profiled trial."""
    return tuple(
        split_in(one, profile)
        for sweep in sweeps
        for one in sweep.trials
        if (profile := _last(one)) is not None
    )


def _last(one: TrialDetail) -> ProfileRow | None:
    return next((profile for profile in reversed(one.profiles) if profile.ranks), None)


def split_in(one: TrialDetail, profile: ProfileRow) -> StepSplit:
    """Return the split of the slowest rank of a profile."""
    slowest = [rank for rank, split in profile.ranks.items() if split.is_slowest]
    rank = (slowest or list(profile.ranks))[0]
    split = profile.ranks[rank]
    return StepSplit(
        trial_id=one.trial.id,
        layout=one.trial.layout.short,
        rank=rank,
        seconds={part: spent / split.num_steps / 1e9 for part, spent in split.parts.items()},
    )


def step_split(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a bar for each profiled trial, its parts stacked."""
    found = splits(sweeps)
    if not found:
        how = _how(sweeps)
        why = NOTHING_TRAINED if how is None else f"No trial is profiled yet: `{how}` profiles one."
        return replace(STEP_SPLIT, why_empty=why)
    return split_of(found[:MOST_SHOWN])


def split_of(found: Sequence[StepSplit]) -> Picture:
    """Draw the splits of some trials."""
    labels = [f"trial {one.trial_id}" for one in found]
    parts = [part for part in Part if any(one.seconds.get(part) for one in found)]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": PART_NAMES[part],
            "x": [1000 * one.seconds.get(part, 0.0) for one in found],
            "y": labels,
            "customdata": [one.trial_id for one in found],
            "hovertemplate": f"%{{y}}: %{{x:.1f}} ms<extra>{PART_NAMES[part]}</extra>",
            "marker": {"color": PART_COLORS[part]},
        }
        for part in parts
    ]
    return replace(
        STEP_SPLIT,
        caption=" ".join(map(_said, found[:3])),
        figure=figure(
            traces,
            x=PictureAxis(title="milliseconds of a step, under the profiler", from_zero=True),
            y=PictureAxis(title="", names=list(reversed(labels))),
            height=190 + 30 * len(found),
            barmode="stack",
        ),
    )


def _how(sweeps: Sequence[SweepRows]) -> str | None:
    """Return the command that profiles a trial. None: nothing was trained."""
    trained = [one for one in sweeps if one.sweep.conditions.get("workload") not in UNTRAINED]
    if sweeps and not trained:
        return None
    leading = [
        it.leading[0].id for sweep in trained for it in sweep.rankings.values() if it.leading
    ]
    return f"sweep profile {leading[0] if leading else 'TRIAL'} --memory"


def _said(one: StepSplit) -> str:
    total = sum(one.seconds.values()) or 1.0

    def share(*parts: Part) -> str:
        return show.percent(sum(one.seconds.get(part, 0.0) for part in parts) / total)

    return (
        f"Trial {one.trial_id}, rank {one.rank} ({one.layout}): {share(*COMPUTATION)} computing,"
        f" {share(*EXPOSED)} communicating while nothing runs,"
        f" {share(Part.BUBBLE, Part.HOST_BOUND, Part.IDLE)} waiting."
    )


def memory_profile(sweeps: Sequence[SweepRows]) -> tuple[TrialDetail, ProfileRow] | None:
    """Return the trial whose memory is drawn: the leading one of those whose memory is known."""
    with_memory = {
        one.trial.id: (one, profile)
        for sweep in sweeps
        for one in sweep.trials
        for profile in one.profiles
        if profile.memory
    }
    leading = [
        trial.id
        for sweep in sweeps
        for ranking in sweep.rankings.values()
        for trial in ranking.leading
    ]
    chosen = next(
        (trial_id for trial_id in [*leading, *with_memory] if trial_id in with_memory), None
    )
    return None if chosen is None else with_memory[chosen]


def memory_timeline(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw the memory of rank 0 over the first steps of one trial, its kinds stacked."""
    found = memory_profile(sweeps)
    if found is None:
        how = _how(sweeps)
        why = f"No profile has the memory of its steps yet: `{how}` records it."
        return replace(MEMORY_TIMELINE, why_empty=NOTHING_TRAINED if how is None else why)
    return timeline_of(*found)


def timeline_of(one: TrialDetail, profile: ProfileRow) -> Picture:
    """Draw the memory of one profile that has recorded it."""
    moments = profile.memory
    kinds = [kind for kind in _KINDS if any(moment.num_bytes.get(kind) for moment in moments)]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": kind.value,
            "stackgroup": "memory",
            "x": list(range(len(moments))),
            "y": [moment.num_bytes.get(kind, 0) / GIB for moment in moments],
            "line": {"width": 0.5, "color": COLORS[number]},
            "fillcolor": COLORS[number],
            "hovertemplate": f"%{{y:.3f}} GiB<extra>{kind.value}</extra>",
        }
        for number, kind in enumerate(kinds)
    ]
    peak = max(moments, key=lambda moment: moment.total)
    shapes, labels = _phases(moments)
    made = figure(
        traces,
        x=PictureAxis(title="moments of the first steps", ticks=[], from_zero=True),
        y=PictureAxis(title="memory of rank 0 (GiB)", from_zero=True),
        shapes=shapes,
        annotations=labels,
    )
    made["layout"]["xaxis"]["showticklabels"] = False
    return replace(
        MEMORY_TIMELINE,
        caption=f"Trial {one.trial.id} ({one.trial.layout.short}): the peak of"
        f" {show.memory(peak.total)} is in {peak.part.value} of step {peak.step}."
        f"{_other_ranks(one)}",
        figure=made,
    )


def _other_ranks(one: TrialDetail) -> str:
    """Say that the picture leaves out other ranks: a profile has the memory of rank 0 alone."""
    if one.cell.cell.num_gpus == 1:
        return ""
    worst = one.trial.peak_memory_allocated_bytes
    measured = "" if worst is None else f"; the worst rank allocated {show.memory(worst)} in all"
    return f" Only rank 0 is recorded, and others may take more{measured}."


def _phases(
    moments: Sequence[MemoryMoment],
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Every other part of a step is shaded, and each is named."""
    shapes: list[dict[str, object]] = []
    labels: list[dict[str, object]] = []
    start = 0
    for number, ((step, part), some) in enumerate(
        groupby(moments, key=lambda moment: (moment.step, moment.part))
    ):
        end = start + len(list(some))
        if number % 2:
            shapes.append(
                {
                    "type": "rect",
                    "xref": "x",
                    "yref": "paper",
                    "x0": start - 0.5,
                    "x1": end - 0.5,
                    "y0": 0,
                    "y1": 1,
                    "layer": "below",
                    "line": {"width": 0},
                    "fillcolor": "rgba(128,128,128,0.15)",
                }
            )
        labels.append(
            {
                "x": (start + end - 1) / 2,
                "y": 1,
                "yref": "paper",
                "yanchor": "top",
                "text": f"{part.value}<br>{step}",
                "showarrow": False,
                "font": {"size": 10},
            }
        )
        start = end
    return shapes, labels

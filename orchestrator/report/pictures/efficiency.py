"""Scaling efficiency: the best layout of each number of GPUs against that of the smallest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.report import quantities as show
from orchestrator.report.pictures.picture import (
    COLORS,
    GREY,
    HOVER_TRIAL,
    Picture,
    PictureAxis,
    Trace,
    figure,
    gpu_ticks,
)
from orchestrator.report.sweep_rows import SweepRows


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The best layout of a problem on a number of GPUs."""

    trial_id: int
    num_gpus: int
    tokens_per_second_per_gpu: float
    # Tokens/s/GPU over those of the smallest number of GPUs.
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class ScalingLine:
    """One problem on several numbers of GPUs, the smallest first."""

    problem: str
    # True: the batch grows with the GPUs. False: it stays the same.
    is_weak: bool
    points: Sequence[Scaled]


def lines(sweeps: Sequence[SweepRows]) -> tuple[ScalingLine, ...]:
    """Return a line for each problem with a best layout on two numbers of GPUs or more."""
    strong: defaultdict[str, list[tuple[int, int, float]]] = defaultdict(list)
    weak: defaultdict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for sweep in sweeps:
        for status in sweep.cells:
            ranking, cell = sweep.rankings.get(status.cell.id), status.cell.cell
            best = ranking.leading[0] if ranking is not None and ranking.leading else None
            if best is None or not best.tokens_per_second_per_gpu:
                continue
            point = (cell.num_gpus, best.id, best.tokens_per_second_per_gpu)
            model = f"{cell.model.name}, sequence {cell.sequence_length:,}"
            strong[f"{model}, batch {cell.global_batch_size:,}"].append(point)
            each = cell.global_batch_size / cell.num_gpus
            weak[f"{model}, batch {each:g} per GPU"].append(point)
    return (
        *(
            _line(problem, some, is_weak=False)
            for problem, some in strong.items()
            if _several(some)
        ),
        *(_line(problem, some, is_weak=True) for problem, some in weak.items() if _several(some)),
    )


def _several(some: Sequence[tuple[int, int, float]]) -> bool:
    return len({num_gpus for num_gpus, _, _ in some}) > 1


def _line(problem: str, some: Sequence[tuple[int, int, float]], *, is_weak: bool) -> ScalingLine:
    # If two sweeps have one cell, the faster layout counts.
    fastest: dict[int, tuple[int, int, float]] = {}
    for one in sorted(some, key=lambda it: it[2]):
        fastest[one[0]] = one
    ordered = [fastest[num_gpus] for num_gpus in sorted(fastest)]
    first = ordered[0][2]
    return ScalingLine(
        problem=problem,
        is_weak=is_weak,
        points=[
            Scaled(
                trial_id=trial_id,
                num_gpus=num_gpus,
                tokens_per_second_per_gpu=speed,
                efficiency=speed / first,
            )
            for num_gpus, trial_id, speed in ordered
        ],
    )


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw a line for each problem, and the ideal at 100 %."""
    found = lines(sweeps)
    blank = Picture(
        name="efficiency",
        title="Scaling efficiency",
        question="Where does scaling die?",
    )
    if not found:
        return replace(
            blank,
            why_empty="Only one number of GPUs has a best layout; a sweep with several"
            " (gpus: [8, 16]), or a report of several sweeps, shows how a problem scales.",
        )
    traces = [_trace(line, COLORS[number % len(COLORS)]) for number, line in enumerate(found)]
    numbers = [point.num_gpus for line in found for point in line.points]
    ideal: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal",
        "x": [min(numbers), max(numbers)],
        "y": [1.0, 1.0],
        "hoverinfo": "skip",
        "line": {"color": GREY, "dash": "dash", "width": 1},
    }
    worst = min(
        ((point, line) for line in found for point in line.points),
        key=lambda it: it[0].efficiency,
    )
    caption = (
        "Tokens/s/GPU of the best layout over that of the smallest number of GPUs. Lowest:"
        f" {show.percent(worst[0].efficiency)} of {worst[1].problem} on"
        f" {show.counted(worst[0].num_gpus, 'GPU')}."
    )
    y = PictureAxis(title="efficiency", from_zero=True)
    made = figure(
        [ideal, *traces],
        x=PictureAxis(title="GPUs", is_log=True, **gpu_ticks(numbers)),
        y=y,
    )
    made["layout"]["yaxis"]["tickformat"] = ".0%"
    return replace(blank, caption=caption, figure=made)


def _trace(line: ScalingLine, color: str) -> Trace:
    kind = "weak" if line.is_weak else "strong"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{line.problem} ({kind} scaling)",
        "x": [point.num_gpus for point in line.points],
        "y": [point.efficiency for point in line.points],
        "customdata": [point.trial_id for point in line.points],
        "hovertemplate": HOVER_TRIAL,
        "line": {"color": color, "dash": "dot" if line.is_weak else "solid"},
        "marker": {"color": color, "size": 8},
    }

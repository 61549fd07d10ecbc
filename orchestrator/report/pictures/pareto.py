"""The Pareto front as `sweep best --pareto` has it, among all measured layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.trial.peak_memory import taken_peak
from orchestrator.report import quantities as show
from orchestrator.report.fronts import objective_titles
from orchestrator.report.pictures.picture import (
    COLORS,
    GIB,
    GREY,
    HOVER_TRIAL,
    Picture,
    PictureAxis,
    Trace,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialDetail
    from orchestrator.report.fronts import ShownPoint, Valued


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A measured layout by its speed and memory, and whether it is on the front."""

    trial_id: int
    # Only layouts of one problem are compared: a model, a sequence length and a batch.
    problem: str
    tokens_per_second_per_gpu: float
    memory_bytes: int
    num_gpus: int
    is_on_front: bool = False
    # It is beaten by less than noise.
    may_be_on_front: bool = False
    # The speed that was compared, with its 95 % interval; None: it was not compared by this.
    compared: Valued | None = None


def candidates(sweeps: Sequence[SweepRows]) -> tuple[Candidate, ...]:
    """Return the measured layouts whose memory is known."""
    points = {
        point.trial.id: point
        for sweep in sweeps
        for front in sweep.fronts
        for point in front.points
    }
    return tuple(
        one
        for sweep in sweeps
        for detail in sweep.trials
        if (one := _candidate(detail, points.get(detail.trial.id))) is not None
    )


def _candidate(detail: TrialDetail, point: ShownPoint | None) -> Candidate | None:
    trial, cell = detail.trial, detail.cell.cell
    speed, taken = trial.tokens_per_second_per_gpu, taken_peak(trial)
    if not trial.is_ranked or speed is None or taken is None:
        return None
    return Candidate(
        trial_id=trial.id,
        problem=f"{cell.model.name}, sequence {cell.sequence_length:,},"
        f" batch {cell.global_batch_size:,}",
        tokens_per_second_per_gpu=speed,
        memory_bytes=taken,
        num_gpus=cell.num_gpus,
        is_on_front=point is not None and point.is_on_front,
        may_be_on_front=point is not None and not point.is_on_front,
        compared=None if point is None else _speed(point),
    )


def _speed(point: ShownPoint) -> Valued | None:
    from orchestrator.core.sweepfile.sections import Objective  # pydantic

    return point.values.get(Objective.TOKENS_PER_SECOND_PER_GPU)


def picture(sweeps: Sequence[SweepRows]) -> Picture:
    """Draw speed against memory: the front in colours by problem, the others grey."""
    found = candidates(sweeps)
    blank = Picture(
        name="pareto",
        title="Speed against memory: the Pareto front",
        question="What is the cheap runner-up with headroom?",
    )
    if not found:
        return replace(
            blank,
            why_empty="No measured trial has a known peak of memory; a program of workload command"
            " tells it as peak_memory_allocated_bytes (docs/workloads.md).",
        )
    beaten = [one for one in found if not one.is_on_front and not one.may_be_on_front]
    possible = [one for one in found if one.may_be_on_front]
    traces = [
        _trace(beaten, "beaten by another", GREY, opacity=0.35),
        _trace(possible, "could be on the front", GREY, symbol="circle-open"),
    ]
    problems = list(dict.fromkeys(one.problem for one in found))
    for number, problem in enumerate(problems):
        some = [one for one in found if one.is_on_front and one.problem == problem]
        some.sort(key=lambda one: one.memory_bytes)
        traces.append(_trace(some, problem, COLORS[number % len(COLORS)]))
    return replace(
        blank,
        caption=_caption(sweeps, found, num_possible=len(possible)),
        figure=figure(
            [trace for trace in traces if trace["x"]],
            x=PictureAxis(title="memory taken of the device, worst rank (GiB)", from_zero=True),
            y=PictureAxis(title="tokens/s/GPU", from_zero=True),
        ),
    )


def _caption(sweeps: Sequence[SweepRows], found: Sequence[Candidate], *, num_possible: int) -> str:
    objectives = dict.fromkeys(
        objective for sweep in sweeps for front in sweep.fronts for objective in front.objectives
    )
    goals = ", ".join(objective_titles(objective)[0] for objective in objectives)
    num_front = sum(one.is_on_front for one in found)
    text = f"On the front by {goals}: {num_front:,} of {show.counted(len(found), 'layout')}"
    if num_possible:
        verb = "is" if num_possible == 1 else "are"
        text += f"; {num_possible:,} more {verb} beaten by less than noise"
    return (
        f"{text}. Lines are 95 % intervals. Larger points use more GPUs. Only layouts of one"
        " sweep and one problem are compared, as by `sweep best --pareto`."
    )


def _trace(
    some: Sequence[Candidate],
    name: str,
    color: str,
    *,
    symbol: str = "circle",
    opacity: float = 0.9,
) -> Trace:
    numbers = sorted({one.num_gpus for one in some})
    speeds = [
        one.tokens_per_second_per_gpu if one.compared is None else one.compared.value
        for one in some
    ]
    trace: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.memory_bytes / GIB for one in some],
        "y": speeds,
        "customdata": [one.trial_id for one in some],
        "hovertemplate": HOVER_TRIAL,
        "marker": {
            "color": color,
            "symbol": symbol,
            "size": [min(7 + 2 * numbers.index(one.num_gpus), 21) for one in some],
            "opacity": opacity,
        },
    }
    if any(one.compared is not None for one in some):
        trace["error_y"] = _intervals([one.compared for one in some], color)
    return trace


def _intervals(compared: Sequence[Valued | None], color: str) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if it is None else it.high - it.value for it in compared],
        "arrayminus": [0.0 if it is None else it.value - it.low for it in compared],
        "color": color,
        "thickness": 1,
    }

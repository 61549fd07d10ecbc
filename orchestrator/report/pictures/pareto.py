"""The Pareto front: layouts that no other beats in speed, memory, GPUs and energy at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report.pictures.peak import kinds_of, peak_of
from orchestrator.report.pictures.picture import (
    COLORS,
    GIB,
    GREY,
    HOVER_TRIAL,
    Axis,
    Picture,
    Trace,
    figure,
)
from orchestrator.report.sweep_rows import SweepRows

if TYPE_CHECKING:
    from db.read.rows import TrialDetail


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A measured layout by what one may want of it."""

    trial_id: int
    # Only layouts of one problem are compared: a model, a sequence length and a batch.
    problem: str
    tokens_per_second_per_gpu: float
    memory_bytes: int
    num_gpus: int
    joules_per_token: float | None
    is_on_front: bool = False


def candidates(sweeps: Sequence[SweepRows]) -> tuple[Candidate, ...]:
    """Return the measured layouts whose memory is known, those on the front marked.

    Energy counts where it is known of every layout of a problem.
    """
    found = [
        one
        for sweep in sweeps
        for detail in sweep.trials
        if (one := _candidate(detail)) is not None
    ]
    by_problem: defaultdict[str, list[Candidate]] = defaultdict(list)
    for one in found:
        by_problem[one.problem].append(one)
    on_front = {one.trial_id for some in by_problem.values() for one in front(some)}
    return tuple(replace(one, is_on_front=one.trial_id in on_front) for one in found)


def _candidate(detail: TrialDetail) -> Candidate | None:
    trial, cell = detail.trial, detail.cell.cell
    speed, peak = trial.tokens_per_second_per_gpu, peak_of(trial)
    is_ranked = (
        trial.state is TrialState.MEASURED
        and trial.implausible is None
        and trial.step_seconds_bound is None
        and trial.is_current_fingerprint
    )
    if not is_ranked or speed is None or peak is None:
        return None
    return Candidate(
        trial_id=trial.id,
        problem=f"{cell.model.name}, sequence {cell.sequence_length:,},"
        f" batch {cell.global_batch_size:,}",
        tokens_per_second_per_gpu=speed,
        memory_bytes=peak,
        num_gpus=cell.num_gpus,
        joules_per_token=joules_per_token(detail),
    )


def joules_per_token(detail: TrialDetail) -> float | None:
    """Return the energy of the attempt that counts; None: its power is not known."""
    for attempt in detail.attempts:
        if attempt.measurement is not None and not attempt.superseded and attempt.gpu is not None:
            watts = attempt.gpu.power_watts
            rate = attempt.measurement.tokens_per_second_per_gpu
            return None if watts is None else watts / rate
    return None


def front(some: Sequence[Candidate]) -> list[Candidate]:
    """Return those that none is at least as good as in everything and better in something."""
    has_energy = all(one.joules_per_token is not None for one in some)
    costs = {one.trial_id: _costs(one, has_energy=has_energy) for one in some}
    found: list[Candidate] = []
    # In this order whoever beats a layout comes before it, and the first who does is on the front.
    for one in sorted(some, key=lambda it: costs[it.trial_id]):
        mine = costs[one.trial_id]
        if not any(_beats(costs[other.trial_id], mine) for other in found):
            found.append(one)
    return found


def _costs(one: Candidate, *, has_energy: bool) -> tuple[float, ...]:
    energy = (one.joules_per_token,) if has_energy and one.joules_per_token is not None else ()
    return (-one.tokens_per_second_per_gpu, one.memory_bytes, one.num_gpus, *energy)


def _beats(costs: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return costs != others and all(a <= b for a, b in zip(costs, others, strict=True))


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
    traces = [_trace([it for it in found if not it.is_on_front], "beaten by another", GREY)]
    problems = list(dict.fromkeys(one.problem for one in found))
    for number, problem in enumerate(problems):
        some = [one for one in found if one.is_on_front and one.problem == problem]
        some.sort(key=lambda one: one.memory_bytes)
        traces.append(_trace(some, problem, COLORS[number % len(COLORS)]))
    num_front = sum(one.is_on_front for one in found)
    goals = "tokens/s/GPU, memory and GPUs"
    if any(one.joules_per_token is not None for one in found):
        goals = "tokens/s/GPU, memory, GPUs, and joules per token where known"
    kinds = kinds_of(one.trial for sweep in sweeps for one in sweep.trials)
    return replace(
        blank,
        caption=f"On the front by {goals}: {num_front:,} of {show.counted(len(found), 'layout')}."
        " Larger points use more GPUs. Only layouts of one problem are compared.",
        figure=figure(
            [trace for trace in traces if trace["x"]],
            x=Axis(title=f"peak memory, {kinds}, worst rank (GiB)", from_zero=True),
            y=Axis(title="tokens/s/GPU", from_zero=True),
        ),
    )


def _trace(some: Sequence[Candidate], name: str, color: str) -> Trace:
    numbers = sorted({one.num_gpus for one in some})
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.memory_bytes / GIB for one in some],
        "y": [one.tokens_per_second_per_gpu for one in some],
        "customdata": [one.trial_id for one in some],
        "hovertemplate": HOVER_TRIAL,
        "marker": {
            "color": color,
            "size": [min(7 + 2 * numbers.index(one.num_gpus), 21) for one in some],
            "opacity": 0.35 if color == GREY else 0.9,
        },
    }

"""The fronts of a sweep: the measured layouts that no other beats in every objective.

Cells that differ in their number of GPUs alone train the same, so they have one front together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

from orchestrator.core.sweepfile.objective import LayoutNumbers, Objective, objectives_of
from orchestrator.core.trial.front import FrontPoint, front_of
from orchestrator.core.trial.merit import Merit
from orchestrator.core.trial.winner import WIDTH
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    # The rows need SQLAlchemy.
    from db.read.rows import CellRow, SweepRow, TrialRow
    from db.store_reads import StoreReads
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.trial.front_verdict import FrontVerdict


@dataclass(frozen=True, kw_only=True)
class Valued:
    """A layout's value of one objective, with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def relative_confidence(self) -> float:
        """Half of the interval, over the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


@dataclass(frozen=True, kw_only=True)
class ShownPoint:
    """A layout of a front, or one that noise may keep from it."""

    trial: TrialRow
    cell: CellRow
    values: Mapping[Objective, Valued]
    is_on_front: bool

    def record(self) -> dict[str, Any]:
        """The fields of a machine-readable row, in addition to the trial's."""
        found: dict[str, Any] = {"is_on_front": self.is_on_front}
        for objective, valued in self.values.items():
            found |= {
                f"{objective}_value": valued.value,
                f"{objective}_low": valued.low,
                f"{objective}_high": valued.high,
            }
        return found


@dataclass(frozen=True, kw_only=True)
class ShownFront:
    """The front of the cells that train one model with one batch."""

    sweep: str
    cells: Sequence[CellRow]
    objectives: Sequence[Objective]
    # Those on the front first, each part with the best by the first objective first.
    points: Sequence[ShownPoint]
    # Trials that were measured, but not one of the objectives.
    left_out: Sequence[int]
    # What one of them lacks, or several do.
    not_read: Sequence[Objective]
    num_measured: int

    @property
    def title(self) -> str:
        """The model, sequence length, batch and numbers of GPUs."""
        cell, gpus = self.cells[0].cell, [one.cell.num_gpus for one in self.cells]
        numbers = " or ".join(map(str, gpus))
        return (
            f"{cell.model.name}, {numbers} {'GPU' if gpus == [1] else 'GPUs'}, sequence length"
            f" {cell.sequence_length}, global batch {cell.global_batch_size}"
        )

    @property
    def text(self) -> str:
        """Describe the evidence for the front."""
        if not self.num_measured:
            return "Nothing is measured under the current conditions"
        if not self.points:
            return f"No front: {self._not_read} of any of the measured layouts"
        on = [point.trial for point in self.points if point.is_on_front]
        possible = [point.trial.id for point in self.points if not point.is_on_front]
        text = f"Front of {show.counted(self.num_measured, 'measured layout')}:"
        text += f" {show.numbered('trial', [trial.id for trial in on])}"
        if possible:
            verb = "is" if len(possible) == 1 else "are"
            text += f"; {show.numbered('trial', possible)} {verb} dominated by less than noise"
        once = [trial.id for trial in on if trial.num_measurements < 2]
        if once:
            text += f"; measured once: {show.numbered('trial', once)}"
        if self.left_out:
            text += f"; {self._not_read} of {show.numbered('trial', self.left_out)}"
        return text

    @property
    def _not_read(self) -> str:
        return f"{' or '.join(self.not_read or self.objectives)} was not read"

    def record(self) -> dict[str, Any]:
        """The front as one machine-readable value."""
        from orchestrator.report import records

        return {
            "cells": [records.cell_record(cell) for cell in self.cells],
            "objectives": [str(objective) for objective in self.objectives],
            "points": [
                point.record() | records.trial_record(point.trial, point.cell, self.sweep)
                for point in self.points
            ],
            "left_out": list(self.left_out),
            "num_measured": self.num_measured,
            "text": self.text,
        }


def asks_for_front(sweep: SweepRow) -> bool:
    """Return whether the file of a sweep has other objectives than speed."""
    return any(one.merit is not Merit.SPEED for one in _asked(sweep))


def read_fronts(store: StoreReads, sweep: SweepRow) -> list[ShownFront]:
    """Return the fronts of a sweep by the objectives of its file.

    If the file has no objective but speed, they are speed and free memory, and energy if a GPU
    reported it.
    """
    session = store.newest_session(sweep.id)
    price = session.price_per_gpu_hour if session is not None else None
    cells = {cell.id: cell for cell in store.cells(sweep.id)}
    trials = store.best(sweep.id, top=None)
    told = [trial for some in trials.values() for trial in some]
    objectives = _shown(_asked(sweep), told)
    groups: dict[tuple[str, int, int], list[CellRow]] = {}
    for cell in cells.values():
        size = cell.cell
        key = size.model.digest, size.sequence_length, size.global_batch_size
        groups.setdefault(key, []).append(cell)
    device = _PriceAndMemory(
        price_per_gpu_hour=price, memory_bytes=device_memory_bytes(store, sweep)
    )
    return [_front(store, sweep, group, trials, objectives, device) for group in groups.values()]


@dataclass(frozen=True, kw_only=True)
class _PriceAndMemory:
    """The price and the memory of a sweep's device; None: unknown."""

    price_per_gpu_hour: float | None
    # For trials that do not name it.
    memory_bytes: float | None


def device_memory_bytes(store: StoreReads, sweep: SweepRow) -> float | None:
    """Return the memory of the sweep's device, by its file or the data sheet."""
    from orchestrator.core.problem.hardware import DEVICES, GIB, from_driver_name

    spec = json.loads(sweep.spec_json)
    if (gib := spec.get("device_memory_gib")) is not None:
        return float(gib) * GIB
    if (named := DEVICES.get(spec.get("device", "auto"))) is not None:
        return float(named.memory_bytes)
    names = {one.stack.device_name for one in store.fingerprints(sweep.id)}
    known = [from_driver_name(name) for name in names if name is not None]
    sizes = {float(one.memory_bytes) for one in known if one is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _asked(sweep: SweepRow) -> tuple[Objective, ...]:
    return objectives_of(json.loads(sweep.spec_json).get("objective"))


def _shown(asked: Sequence[Objective], trials: Sequence[TrialRow]) -> tuple[Objective, ...]:
    if any(objective.merit is not Merit.SPEED for objective in asked) or len(asked) > 1:
        return tuple(asked)
    energy = [Objective.JOULES_PER_TOKEN] if any(trial.joules_per_token for trial in trials) else []
    return (*asked, Objective.MEMORY_HEADROOM, *energy)


def _front(
    store: StoreReads,
    sweep: SweepRow,
    group: Sequence[CellRow],
    trials: Mapping[int, Sequence[TrialRow]],
    objectives: Sequence[Objective],
    device: _PriceAndMemory,
) -> ShownFront:
    from orchestrator.sweep.stored_confirmation import confirmation_of  # needs SQLAlchemy
    from orchestrator.sweep.trial_numbers import numbers_of

    merits = tuple(dict.fromkeys(objective.merit for objective in objectives))
    points: list[FrontPoint] = []
    values: dict[int, dict[Objective, Valued]] = {}
    left_out: list[int] = []
    for cell in group:
        # Only a layout of its own cell's front can be on that of the group.
        measured = trials.get(cell.id, [])
        confirmation = confirmation_of(
            measured,
            store.repeats(cell.id),
            merits=merits,
            device_memory_bytes=device.memory_bytes,
        )
        verdict = confirmation.front()
        left_out += verdict.left_out
        near = {trial.id: trial for trial in measured if trial.id in verdict.log_seconds}
        for key in (*verdict.front.on, *verdict.front.possible):
            found = _values(near[key], cell.cell, verdict, objectives, device)
            if found is None:
                left_out.append(key)
                continue
            values[key] = found
            points.append(_point(key, found, verdict.log_seconds[key][1]))
    found_front = front_of(points, objectives, headroom=Objective.MEMORY_HEADROOM)
    rows = {trial.id: (trial, cell) for cell in group for trial in trials.get(cell.id, ())}
    unread = {
        objective
        for key in left_out
        for objective in objectives
        if numbers_of(
            rows[key][0],
            device_memory_bytes=device.memory_bytes,
            price_per_gpu_hour=device.price_per_gpu_hour,
        ).value(objective)
        is None
    }
    return ShownFront(
        sweep=sweep.name,
        cells=group,
        objectives=objectives,
        points=[
            ShownPoint(trial=rows[key][0], cell=rows[key][1], values=values[key], is_on_front=is_on)
            for is_on, keys in ((True, found_front.on), (False, found_front.possible))
            for key in keys
        ],
        left_out=sorted(left_out),
        not_read=[objective for objective in objectives if objective in unread],
        num_measured=len(rows),
    )


def _values(
    trial: TrialRow,
    cell: Cell,
    verdict: FrontVerdict,
    objectives: Sequence[Objective],
    device: _PriceAndMemory,
) -> dict[Objective, Valued] | None:
    """Return what a trial has of each objective; None if one is unknown."""
    from orchestrator.sweep.trial_numbers import others_of  # needs SQLAlchemy

    mean, sd = verdict.log_seconds[trial.id]
    numbers = LayoutNumbers.of_step(
        cell,
        exp(mean),
        others=others_of(trial, device.memory_bytes),
        price_per_gpu_hour=device.price_per_gpu_hour,
    )
    found = {}
    for objective in objectives:
        value = numbers.value(objective)
        if value is None:
            return None
        factor = 1.0 if objective is Objective.MEMORY_HEADROOM else exp(WIDTH * sd)
        found[objective] = Valued(value=value, low=value / factor, high=value * factor)
    return found


def _point(key: int, values: Mapping[Objective, Valued], sd: float) -> FrontPoint:
    return FrontPoint(
        key=key,
        values={
            objective: valued.value
            if objective.merit is Merit.HEADROOM
            else log(valued.value) * (1.0 if objective.is_larger_better else -1.0)
            for objective, valued in values.items()
        },
        sds=dict.fromkeys(values, sd),
    )


def objective_text(objective: Objective, valued: Valued) -> list[str]:
    """The value of an objective and its interval as the cells of a table."""
    sure = show.confidence(valued.relative_confidence)
    match objective:
        case Objective.MEMORY_HEADROOM:
            return [show.percent(valued.value)]
        case Objective.STEP_SECONDS:
            return [show.step_time(valued.value), sure]
        case Objective.DOLLARS_PER_BILLION_TOKENS:
            return [f"{valued.value:,.2f}", sure]
        case Objective.JOULES_PER_TOKEN:
            return [f"{valued.value:.3g}", sure]
        case Objective.TOKENS_PER_SECOND_PER_GPU:
            return [show.tokens_rate(valued.value), sure]


def objective_titles(objective: Objective) -> list[str]:
    """The column titles of `objective_text`."""
    match objective:
        case Objective.MEMORY_HEADROOM:
            return ["memory free"]
        case Objective.STEP_SECONDS:
            return ["step", "±95%"]
        case Objective.DOLLARS_PER_BILLION_TOKENS:
            return ["$/1e9 tokens", "±95%"]
        case Objective.JOULES_PER_TOKEN:
            return ["J/token", "±95%"]
        case Objective.TOKENS_PER_SECOND_PER_GPU:
            return ["tokens/s/GPU", "±95%"]

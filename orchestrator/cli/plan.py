"""The command `plan`: ranks the layouts of a sweep file by prediction, and estimates the cost.

Starts and writes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Db, File, Json, Overrides
from orchestrator.cli.sweep_file import Planning, cell_limit_warnings, load, planning, store_if_any
from orchestrator.cli.terminal.output import (
    Column,
    StyledText,
    TableRow,
    numbers,
    write_json,
    write_line,
    write_table,
)
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from db.store_reads import StoreReads
    from orchestrator.core.problem.arrays import Floats
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.search.planner import Candidates, CellPlan
    from orchestrator.core.search.trial_cost import PlannedCost, TrialCost
    from orchestrator.core.sweepfile.spec import SweepSpec

MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "workspace",
    "reserve",
)
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True)
class _FinishedLayouts:
    """The layouts of a cell that earlier calls have finished: they are not run again."""

    layouts: frozenset[Layout] = frozenset()
    num_launched: int = 0  # of these layouts: `max_trials` counts them


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    """The work that earlier calls of the sweep have done."""

    reserved_gpu_hours: float = 0.0
    done: dict[Cell, _FinishedLayouts]
    # The share of the layouts that fit which should fail for another reason than memory.
    failing_share: float


def plan(
    file: File,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option("--top", "-n", min=0, help="Layouts to show per cell.")] = 5,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Count the layouts of a sweep file, and rank them.

    Ranks them by their predicted speed, and estimates what it costs to measure them. Results in the
    store for the same device and workload make the predictions better. Starts and writes nothing.

    Examples:
      sweep plan sweeps/8b.yaml --top 10
      sweep plan sweeps/8b.yaml gpus=64 search.max_trials=10
    """
    from orchestrator.core.search import trial_cost

    spec = load(file, overrides)
    with store_if_any(db) as store:
        known = planning(spec, store)
        earlier = _earlier(spec, store)
    trial = known.knowledge.trial_cost
    rows, costs = [], []
    for cell in spec.cells():
        planned = known.plan(cell)
        done = earlier.done.get(cell, _FinishedLayouts())
        left = _left(planned.candidates, done)
        to_run = len(left.order)
        if spec.search.max_trials is not None:
            to_run = min(to_run, max(spec.search.max_trials - done.num_launched, 0))
        has_own = any(trial.row.cell == cell for trial in known.knowledge.rows)
        cost = trial_cost.cost_of(left, cell, num_trials=to_run, trial=trial, knows_cell=has_own)
        if to_run:
            costs.append(cost)
        fails = earlier.failing_share
        row = _cell(known, planned, left, top=top, to_run=to_run, cost=cost, fails=fails)
        rows.append({**row, "num_done": len(planned.candidates) - len(left.order)})
    document = {
        "name": spec.name,
        "strategy": spec.search.strategy,
        "device": known.device,
        "remarks": list(spec.remarks()),
        "dominance": {"rule": spec.dominance, "says": _dominance_text(spec)},
        "calibration": _calibration(known),
        "cost": _cost(
            known,
            trial_cost.total(costs),
            trial,
            num_trials=sum(row["num_to_run"] for row in rows),
            reserved_hours=earlier.reserved_gpu_hours,
        ),
        "cells": rows,
    }
    if as_json:
        write_json("plan", document)
    else:
        _print(document, known)


def _earlier(spec: SweepSpec, store: StoreReads | None) -> _Earlier:
    from orchestrator.core.search.expectation import share_that_fails
    from orchestrator.core.trial.lifecycle import TERMINAL, TrialState

    sweeps = store.sweeps() if store is not None else []
    found = next((row for row in sweeps if row.name == spec.name), None)
    if store is None or found is None:
        return _Earlier(done={}, failing_share=share_that_fails(num_failed=0, num_measured=0))
    done = {}
    for row in store.cells(found.id):
        trials = store.trials(found.id, cell_id=row.id)
        ended = [trial for trial in trials if trial.state in TERMINAL]
        done[row.cell] = _FinishedLayouts(
            layouts=frozenset(trial.layout for trial in ended),
            num_launched=sum(trial.was_launched for trial in ended),
        )
    cells = store.status(found.id)
    share = share_that_fails(
        num_failed=sum(cell.num_trials[TrialState.FAILED] for cell in cells),
        num_measured=sum(cell.num_trials[TrialState.MEASURED] for cell in cells),
    )
    hours = store.reserved(found.id).total.reserved / 3600
    return _Earlier(reserved_gpu_hours=hours, done=done, failing_share=share)


def _dominance_text(spec: SweepSpec) -> str:
    """Describe what a sweep concludes from a layout that runs out of memory, and why."""
    from orchestrator.core.problem.proofs import Dominance

    why = ", as the file asks"
    match spec.dominance:
        case Dominance.TRUSTED:
            if spec.search.dominance == "auto":
                why = f", since {spec.knows_memory}"
            rule = "one layout rules out all that need at least as much"
        case Dominance.CONFIRMED:
            if spec.search.dominance == "auto":
                name = spec.workload.name
                why = f", since the memory of workload {name} is not declared: see trainer"
            rule = (
                "two that agree, or one whose message shows that it needs more than the device has,"
                " rule out all that need at least as much"
            )
        case Dominance.OFF:
            return "rules out nothing (search.dominance is off)"
    return f"{rule} (search.dominance is {spec.dominance}{why})"


def _calibration(known: Planning) -> dict[str, Any]:
    from orchestrator.sweep.prior_knowledge import sweeps_of

    rows = known.knowledge.rows
    return {
        "is_calibrated": bool(rows),
        "num_trials": len(rows),
        "num_out_of_memory": sum(trial.row.out_of_memory for trial in rows),
        "sweeps": sweeps_of(rows),
        "says": known.based_on,
    }


def _left(candidates: Candidates, done: _FinishedLayouts) -> Candidates:
    """The candidates, with only those in the order that are not done."""
    if not done.layouts:
        return candidates
    import numpy as np

    layout = candidates.table.layout
    rows = (int(row) for row in candidates.order if layout(int(row)) not in done.layouts)
    return replace(candidates, order=np.fromiter(rows, dtype=candidates.order.dtype))


def _cost(
    known: Planning,
    planned: PlannedCost | None,
    trial: TrialCost,
    *,
    num_trials: int,
    reserved_hours: float,
) -> dict[str, Any]:
    from orchestrator.core.sweepfile.budget import budget_of, price_of

    search, price = known.spec.search, price_of(known.spec, known.hardware)
    budget = budget_of(known.spec, price)
    left = max(budget.gpu_seconds / 3600 - reserved_hours, 0.0) if budget is not None else None
    most = math.inf if left is None else left
    p50 = min(planned.gpu_hours, most) if planned is not None else None
    p90 = min(planned.gpu_hours_p90, most) if planned is not None else None
    within = None
    if planned is not None and p50 is not None:
        within = int(num_trials * p50 / planned.gpu_hours)
    per_hour = price.per_gpu_hour if price is not None else None
    return {
        "gpu_hours": p50,
        "gpu_hours_p90": p90,
        "max_gpu_hours": search.max_gpu_hours,
        "max_cost": search.max_cost,
        "max_wall_time": search.max_wall_time,
        "reserved_gpu_hours": reserved_hours,
        "budget_limit": budget.limit if budget is not None else None,
        "budget_gpu_hours_left": left,
        "num_trials": num_trials,
        "num_trials_within_budget": within,
        "price_per_gpu_hour": per_hour,
        "price_source": price.source if price is not None else None,
        "dollars": p50 * per_hour if p50 is not None and per_hour is not None else None,
        "dollars_p90": p90 * per_hour if p90 is not None and per_hour is not None else None,
        "launch_seconds": trial.launch_seconds,
        "is_launch_measured": known.knowledge.launch_seconds is not None,
        "steps_per_trial": trial.num_steps,
    }


def _cell(
    known: Planning,
    planned: CellPlan,
    left: Candidates,
    *,
    top: int,
    to_run: int,
    cost: PlannedCost | None,
    fails: float,
) -> dict[str, Any]:
    from orchestrator.core.search import expectation

    candidates, space = planned.candidates, planned.space
    fitting = expectation.fitting(candidates) if len(candidates) else None
    out_of_memory = expectation.expected_out_of_memory(left, num_trials=to_run) if to_run else None
    return {
        "cell": space.cell.key,
        "num_combinations": space.num_combinations,
        "num_legal": len(candidates),
        "num_predicted_to_fit": int(candidates.fits.sum()),
        "num_expected_to_fit": fitting.expected if fitting is not None else None,
        "num_that_fit": [fitting.at_least, fitting.at_most] if fitting is not None else None,
        "num_expected_out_of_memory": out_of_memory,
        "num_expected_to_fail_otherwise": fails * (to_run - (out_of_memory or 0.0)),
        "num_to_run": to_run,
        "on_cores": known.on_cores,
        "memory_limit_bytes": candidates.memory_limit_bytes,
        "gpu_hours": cost.gpu_hours if cost is not None else None,
        "gpu_hours_p90": cost.gpu_hours_p90 if cost is not None else None,
        "rejected": dict(space.rejected),
        "limit_warnings": cell_limit_warnings(known, planned),
        "best": _best(known, planned, top, fails=fails),
    }


def _best(known: Planning, planned: CellPlan, top: int, *, fails: float) -> list[dict[str, Any]]:
    import numpy as np

    from orchestrator.core.physics.memory import predict_memory
    from orchestrator.core.search.expectation import probability_of_fitting

    candidates, cell = planned.candidates, planned.space.cell
    rows = candidates.order[:top]
    if not len(rows):
        return []
    table = candidates.table.take(rows)
    predicted = candidates.predict(table) if candidates.predict is not None else None
    time_band = predicted.step_band() if predicted is not None else None
    memory_band = predicted.memory_band() if predicted is not None else None
    probabilities = probability_of_fitting(candidates, rows, predicted)
    best = []
    for place, row in enumerate(rows):
        layout = table.layout(place)
        trainer = known.calibration(cell, layout.options).trainer
        parts = predict_memory(table.take(np.array([place])), cell, trainer)
        tokens = float(candidates.tokens_per_second_per_gpu[row])
        seconds, size = float(candidates.step_seconds[row]), float(candidates.memory_bytes[row])
        fits = float(probabilities[place]) if probabilities is not None else None
        record = {
            "layout": layout.key,
            "short": layout.short,
            "predicted_tokens_per_second_per_gpu": None if math.isnan(tokens) else tokens,
            "predicted_step_seconds": None if math.isnan(seconds) else seconds,
            "step_seconds_band": _band(seconds, time_band, place),
            "predicted_memory_bytes": size,
            "memory_bytes_band": _band(size, memory_band, place),
            "memory_bytes_by_part": {name: float(getattr(parts, name)[0]) for name in MEMORY_PARTS},
            "probability_of_fitting": fits,
            "probability_of_out_of_memory": 1.0 - fits if fits is not None else None,
            "probability_of_another_failure": fails * (fits if fits is not None else 1.0),
            "fits": bool(candidates.fits[row]),
        }
        best.append(record)
    return best


def _band(value: float, band: tuple[Floats, Floats] | None, place: int) -> list[float] | None:
    """Bounds between which four of five measurements should lie; None for an unknown value."""
    if band is None or math.isnan(value):
        return None
    low, high = band
    return [value * float(low[place]), value * float(high[place])]


def _print(document: dict[str, Any], known: Planning) -> None:
    cost, cells = document["cost"], document["cells"]
    name, device = document["name"], document["device"]
    num_cells, strategy = show_as.counted(len(cells), "cell"), document["strategy"]
    write_line(f"sweep {name}: {num_cells}, strategy {strategy}, device {device}")
    write_line(f"predictions: {known.based_on}")
    write_line(f"out of memory: {document['dominance']['says']}")
    for remark in document["remarks"]:
        write_line(remark, style="yellow")
    for row in cells:
        _print_cell(row)
    if cost["gpu_hours"] is None:
        return
    money = ""
    if cost["dollars"] is not None:
        price = f"${cost['price_per_gpu_hour']:.2f} a GPU-hour: {cost['price_source']}"
        money = f", ${cost['dollars']:,.0f} to ${cost['dollars_p90']:,.0f} ({price})"
    source = "measured" if cost["is_launch_measured"] else "assumed"
    launch = f"{source} {cost['launch_seconds']:.3g} s around {cost['steps_per_trial']:.0f} steps"
    p50, p90 = _hours(cost["gpu_hours"]), _hours(cost["gpu_hours_p90"])
    write_line("")
    write_line(
        f"All cells: P50 {p50}, P90 {p90} GPU-hours reserved{money} if all remaining layouts run"
        f" ({launch} a trial){_budget_text(cost)}."
    )


def _budget_text(cost: dict[str, Any]) -> str:
    """Describe what the budgets allow; empty without budgets."""
    text = ""
    if cost["budget_limit"] is not None:
        hours = _hours(cost["budget_gpu_hours_left"])
        text = f"; search.{cost['budget_limit']} leaves {hours} GPU-hours"
        if cost["reserved_gpu_hours"]:
            text += f" ({_hours(cost['reserved_gpu_hours'])} already reserved)"
        trials = show_as.counted(cost["num_trials"], "trial")
        text += f", about {cost['num_trials_within_budget']:,} of {trials}"
    if cost["max_wall_time"] is not None:
        duration = show_as.duration(cost["max_wall_time"])
        text += f"; search.max_wall_time ends each call after {duration}"
    return text


def _print_cell(row: dict[str, Any]) -> None:
    hours = ""
    if row["gpu_hours"] is not None:
        hours = f", P50 {_hours(row['gpu_hours'])} and P90 {_hours(row['gpu_hours_p90'])} GPU-hours"
    limit = row["memory_limit_bytes"]
    fitting = "memory limit unknown"
    if not row["on_cores"]:
        fitting += " (name a device: device=h100-sxm)"
    if limit is not None:
        low, high = row["num_that_fit"] or (0, 0)
        fitting = f"predicted to fit {low:,}"
        if low != high:
            fitting += f" to {high:,} (expected {row['num_expected_to_fit']:,.1f})"
    to_run = f"to run {row['num_to_run']:,}"
    if row["num_done"]:
        to_run = f"known {row['num_done']:,}, left {to_run}"
    counts = (
        f"{show_as.counted(row['num_combinations'], 'combination')}, {row['num_legal']:,} legal"
    )
    write_line("")
    write_line(f"{row['cell']}: {counts}, {fitting}, {to_run}{hours}", style="bold")
    failing = f"{row['num_expected_to_fail_otherwise']:,.1f} for another reason"
    if row["num_expected_out_of_memory"] is not None:
        failing = f"{row['num_expected_out_of_memory']:,.1f} out of memory, {failing}"
    if row["num_to_run"]:
        write_line(f"  expected failures if all run: {failing}", style="dim")
    for reason, count in sorted(row["rejected"].items(), key=lambda item: -item[1]):
        if count:
            write_line(f"  rejected {count:>10,}  {reason}", style="dim")
    for warning in row["limit_warnings"]:
        write_line(f"  {warning}", style="yellow")
    if not row["best"]:
        return
    largest = max(best["predicted_memory_bytes"] for best in row["best"])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    memory = f"{name} of {limit / unit:,.1f}" if limit is not None else name
    columns = [
        *numbers(""),
        Column("layout", wrap=True),
        *numbers("tokens/s/GPU", "4 of 5 within", memory, "4 of 5 within", "OOM", "fails"),
        *(Column(part[:11], right=True, style="dim") for part in MEMORY_PARTS),
    ]
    write_table(columns, [_line(place, best, unit) for place, best in enumerate(row["best"], 1)])


def _line(place: int, best: dict[str, Any], unit: int) -> TableRow:
    rate, seconds = best["predicted_tokens_per_second_per_gpu"], best["predicted_step_seconds"]
    times, sizes = best["step_seconds_band"], best["memory_bytes_band"]
    rates = sizes_text = show_as.UNKNOWN
    if times is not None and rate is not None:
        low, high = (show_as.tokens_rate(rate * seconds / time) for time in reversed(times))
        rates = f"{low} - {high}"
    if sizes is not None:
        sizes_text = f"{sizes[0] / unit:,.1f} - {sizes[1] / unit:,.1f}"
    oom = best["probability_of_out_of_memory"]
    oom_text = StyledText(show_as.UNKNOWN)
    if oom is not None:
        oom_text = StyledText(f"{oom:.0%}", "" if oom < 0.5 else "yellow")
    return [
        f"{place}.",
        best["short"],
        show_as.tokens_rate(rate),
        rates,
        f"{best['predicted_memory_bytes'] / unit:,.1f}",
        sizes_text,
        oom_text,
        f"{best['probability_of_another_failure']:.0%}",
        *(f"{size / unit:,.1f}" for size in best["memory_bytes_by_part"].values()),
    ]


def _hours(hours: float) -> str:
    return show_as.gpu_hours(hours * 3600)

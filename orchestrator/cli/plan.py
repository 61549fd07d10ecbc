"""The command `plan`: what a sweep file means, ranked by prediction, and what measuring it would hold. Starts and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.output import (
    Column,
    DbOption,
    JsonOption,
    StyledText,
    examples,
    write_json,
    write_line,
    write_table,
)
from orchestrator.cli.sweep_file import (
    File,
    Overrides,
    Planning,
    limit_warnings_of,
    load,
    planning,
    store_if_any,
)
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from db.store import Store
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.search.planner import Candidates, CellPlan, Floats
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
GIB = 1 << 30


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep plan sweeps/8b.yaml --top 10",
            "sweep plan sweeps/8b.yaml gpus=64 search.max_trials=10",
        )
    )(plan)


def plan(
    file: File,
    overrides: Overrides = None,
    top: Annotated[int, typer.Option("--top", "-n", min=0, help="Layouts to show per cell.")] = 5,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count and rank the layouts that a sweep file means.

    By prediction, calibrated by what the store has of the same device and workload, with what measuring them would cost. Starts and writes nothing.
    """
    from orchestrator.core.search import trial_cost

    spec = load(file, overrides)
    with store_if_any(db) as store:
        known = planning(spec, store)
        held_hours = held_gpu_hours(spec, store)
        known_before = done_before(spec, store)
        fails = failing_share(spec, store)
    trial = known.learned.trial_cost()
    rows, costs = [], []
    for cell in spec.cells():
        planned = known.plan(cell)
        done = known_before.get(cell, Done())
        left = _left(planned.candidates, done)
        to_run = _num_to_run(spec, left, done)
        has_own = any(taught.row.cell == cell for taught in known.learned.rows)
        cost = trial_cost.cost_of(left, cell, num_trials=to_run, trial=trial, knows_cell=has_own)
        if to_run:
            costs.append(cost)
        row = _cell(known, planned, left, top=top, to_run=to_run, cost=cost, fails=fails)
        rows.append({**row, "num_done": len(planned.candidates) - len(left.order)})
    document = {
        "name": spec.name,
        "strategy": spec.search.strategy,
        "device": known.learned.hardware.name if known.learned.hardware is not None else "cpu",
        "remarks": list(spec.remarks()),
        "dominance": {"rule": spec.dominance, "says": dominance_in_words(spec)},
        "calibration": _calibration(known),
        "cost": _cost(
            known,
            trial_cost.total(costs),
            trial,
            num_trials=sum(row["num_to_run"] for row in rows),
            held_hours=held_hours,
        ),
        "cells": rows,
    }
    if as_json:
        write_json("plan", document)
    else:
        _print(document, known)


def dominance_in_words(spec: SweepSpec) -> str:
    """What a sweep concludes from a layout that runs out of memory, and why."""
    from orchestrator.core.problem.proofs import Dominance

    asked = "" if spec.search.dominance == "auto" else ", as the file asks"
    match spec.dominance:
        case Dominance.TRUSTED:
            why = asked or f", since {spec.knows_memory}"
            return f"one layout rules out all that need at least as much (search.dominance is trusted{why})"
        case Dominance.CONFIRMED:
            why = (
                asked
                or f", since the memory of workload {spec.workload.name} is not declared: see trainer"
            )
            proof = (
                "two that agree, or one whose message shows that it needs more than the device has"
            )
            return f"{proof}, rule out all that need at least as much (search.dominance is confirmed{why})"
        case Dominance.OFF:
            return "rules out nothing (search.dominance is off)"


def _num_to_run(spec: SweepSpec, left: Candidates, done: Done) -> int:
    """How many of the layouts that are left may still be launched, within max_trials of all calls."""
    budget = spec.search.max_trials
    return (
        min(len(left.order), max(budget - done.num_launched, 0))
        if budget is not None
        else len(left.order)
    )


def _calibration(known: Planning) -> dict[str, Any]:
    from orchestrator.sweep.prior_knowledge import sweeps_of

    rows = known.learned.rows
    return {
        "is_calibrated": bool(rows),
        "num_trials": len(rows),
        "num_out_of_memory": sum(taught.row.out_of_memory for taught in rows),
        "sweeps": sweeps_of(rows),
        "says": known.based_on,
    }


def held_gpu_hours(spec: SweepSpec, store: Store | None) -> float:
    """What earlier calls of the sweep have held, which its budgets count."""
    found = (
        next((row for row in store.sweeps() if row.name == spec.name), None)
        if store is not None
        else None
    )
    return (
        store.held(found.id).total.held / 3600 if store is not None and found is not None else 0.0
    )


@dataclass(frozen=True, kw_only=True)
class Done:
    """The layouts of a cell that earlier calls have done: they are not run again."""

    layouts: frozenset[Layout] = frozenset()
    num_launched: int = 0  # of them: what max_trials counts


def done_before(spec: SweepSpec, store: Store | None) -> dict[Cell, Done]:
    """What earlier calls of a sweep have done, by cell, without layouts that wait to be launched again."""
    from orchestrator.core.trial.lifecycle import TERMINAL

    found = (
        next((row for row in store.sweeps() if row.name == spec.name), None)
        if store is not None
        else None
    )
    if store is None or found is None:
        return {}
    done = {}
    for row in store.cells(found.id):
        trials = [
            trial for trial in store.trials(found.id, cell_id=row.id) if trial.state in TERMINAL
        ]
        launched = sum(trial.num_attempts > 0 for trial in trials)
        done[row.cell] = Done(
            layouts=frozenset(trial.layout for trial in trials), num_launched=launched
        )
    return done


def _left(candidates: Candidates, done: Done) -> Candidates:
    """The candidates with those that are left in the order."""
    if not done.layouts:
        return candidates
    import numpy as np

    untried = (
        int(row)
        for row in candidates.order
        if candidates.table.layout(int(row)) not in done.layouts
    )
    return replace(candidates, order=np.fromiter(untried, dtype=candidates.order.dtype))


def failing_share(spec: SweepSpec, store: Store | None) -> float:
    """The share of the layouts that fit which should fail by their own or the code's fault, by what the sweep's own trials tell."""
    from orchestrator.core.search.expectation import share_that_fails
    from orchestrator.core.trial.lifecycle import TrialState

    found = (
        next((row for row in store.sweeps() if row.name == spec.name), None)
        if store is not None
        else None
    )
    cells = store.status(found.id) if store is not None and found is not None else []
    failed, measured = (
        sum(cell.num_trials[state] for cell in cells)
        for state in (TrialState.FAILED, TrialState.MEASURED)
    )
    return share_that_fails(num_failed=failed, num_measured=measured)


def _cost(
    known: Planning,
    planned: PlannedCost | None,
    trial: TrialCost,
    *,
    num_trials: int,
    held_hours: float,
) -> dict[str, Any]:
    from orchestrator.core.sweepfile.budget import budget_of, price_of

    search, price = known.spec.search, price_of(known.spec, known.hardware)
    budget = budget_of(known.spec, price)
    left = max(budget.gpu_seconds / 3600 - held_hours, 0.0) if budget is not None else None

    def held(hours: float) -> float:
        return hours if left is None else min(hours, left)

    p50 = held(planned.gpu_hours) if planned is not None else None
    p90 = held(planned.gpu_hours_p90) if planned is not None else None
    per_hour = price.per_gpu_hour if price is not None else None
    return {
        "gpu_hours": p50,
        "gpu_hours_p90": p90,
        "max_gpu_hours": search.max_gpu_hours,
        "max_cost": search.max_cost,
        "max_wall_time": search.max_wall_time,
        "held_gpu_hours": held_hours,
        "budget_limit": budget.limit if budget is not None else None,
        "budget_gpu_hours_left": left,
        "num_trials": num_trials,
        "num_trials_within_budget": int(num_trials * p50 / planned.gpu_hours)
        if planned is not None and p50 is not None
        else None,
        "price_per_gpu_hour": per_hour,
        "price_source": price.source if price is not None else None,
        "dollars": p50 * per_hour if p50 is not None and per_hour is not None else None,
        "dollars_p90": p90 * per_hour if p90 is not None and per_hour is not None else None,
        "launch_seconds": trial.launch_seconds,
        "is_launch_measured": known.learned.launch_seconds is not None,
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
        "num_lattice": space.lattice_size,
        "num_legal": len(candidates),
        "num_predicted_to_fit": int(candidates.fits.sum()),
        "num_expected_to_fit": fitting.expected if fitting is not None else None,
        "num_that_fit": [fitting.at_least, fitting.at_most] if fitting is not None else None,
        "num_expected_out_of_memory": out_of_memory,
        "num_expected_to_fail_otherwise": fails * (to_run - (out_of_memory or 0.0)),
        "num_to_run": to_run,
        "memory_limit_bytes": candidates.memory_limit_bytes,
        "gpu_hours": cost.gpu_hours if cost is not None else None,
        "gpu_hours_p90": cost.gpu_hours_p90 if cost is not None else None,
        "rejected": dict(space.rejected),
        "limit_warnings": limit_warnings_of(known, planned),
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
    fitting = probability_of_fitting(candidates, rows, predicted)
    time_band, memory_band = (
        (predicted.step_band(), predicted.memory_band()) if predicted is not None else (None, None)
    )
    best = []
    for place, row in enumerate(rows):
        layout = table.layout(place)
        memory = predict_memory(
            table.take(np.array([place])), cell, known.calibration(cell, layout.options).trainer
        )
        tokens, seconds = (
            float(candidates.tokens_per_second_per_gpu[row]),
            float(candidates.step_seconds[row]),
        )
        best.append(
            {
                "layout": layout.key,
                "short": layout.short,
                "predicted_tokens_per_second_per_gpu": None
                if tokens != tokens
                else tokens,  # nan: unknown
                "predicted_step_seconds": None if seconds != seconds else seconds,
                "step_seconds_band": _within(seconds, time_band, place),
                "predicted_memory_bytes": float(candidates.memory_bytes[row]),
                "memory_bytes_band": _within(
                    float(candidates.memory_bytes[row]), memory_band, place
                ),
                "memory_bytes_by_part": {
                    part: float(getattr(memory, part)[0]) for part in MEMORY_PARTS
                },
                "probability_of_fitting": float(fitting[place]) if fitting is not None else None,
                "probability_of_out_of_memory": 1.0 - float(fitting[place])
                if fitting is not None
                else None,
                "probability_of_another_failure": fails
                * (float(fitting[place]) if fitting is not None else 1.0),
                "fits": bool(candidates.fits[row]),
            }
        )
    return best


def _within(value: float, band: tuple[Floats, Floats] | None, place: int) -> list[float] | None:
    """Between which four of five measurements should lie, where `value` is predicted."""
    if band is None or value != value:  # nan: unknown
        return None
    low, high = band
    return [value * float(low[place]), value * float(high[place])]


def _print(document: dict[str, Any], known: Planning) -> None:
    cost, cells = document["cost"], document["cells"]
    write_line(
        f"sweep {document['name']}: {show_as.counted(len(cells), 'cell')}, strategy {document['strategy']}, device {document['device']}"
    )
    write_line(f"predictions: {known.based_on}")
    write_line(f"out of memory: {document['dominance']['says']}")
    for remark in document["remarks"]:
        write_line(remark, style="yellow")
    for row in cells:
        _print_cell(row)
    if cost["gpu_hours"] is None:
        return
    money = (
        f", ${cost['dollars']:,.0f} to ${cost['dollars_p90']:,.0f} (${cost['price_per_gpu_hour']:.2f} a GPU-hour: {cost['price_source']})"
        if cost["dollars"] is not None
        else ""
    )
    launch = f"{'measured' if cost['is_launch_measured'] else 'assumed'} {cost['launch_seconds']:.3g} s around {cost['steps_per_trial']:.0f} steps"
    write_line("")
    write_line(
        f"All cells: P50 {_hours(cost['gpu_hours'])}, P90 {_hours(cost['gpu_hours_p90'])} GPU-hours held{money}"
        f" if every layout to run is run ({launch} a trial){_capped(cost)}."
    )


def _capped(cost: dict[str, Any]) -> str:
    """What the budgets allow of it."""
    said = ""
    if cost["budget_limit"] is not None:
        held = (
            f" beside {_hours(cost['held_gpu_hours'])} held already"
            if cost["held_gpu_hours"]
            else ""
        )
        said = f"; search.{cost['budget_limit']} leaves {_hours(cost['budget_gpu_hours_left'])} GPU-hours{held}"
        said += f", about {cost['num_trials_within_budget']:,} of {show_as.counted(cost['num_trials'], 'trial')}"
    if cost["max_wall_time"] is not None:
        said += (
            f"; search.max_wall_time ends each call after {show_as.duration(cost['max_wall_time'])}"
        )
    return said


def _print_cell(row: dict[str, Any]) -> None:
    hours = (
        f", P50 {_hours(row['gpu_hours'])} and P90 {_hours(row['gpu_hours_p90'])} GPU-hours"
        if row["gpu_hours"] is not None
        else ""
    )
    limit = row["memory_limit_bytes"]
    fitting = (
        "memory limit unknown (name a device: device=h100-sxm)" if limit is None else _fitting(row)
    )
    write_line("")
    write_line(
        f"{row['cell']}: lattice {row['num_lattice']:,}, legal {row['num_legal']:,}, {fitting}, {_to_run(row)}{hours}",
        style="bold",
    )
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
    unit, name = (
        (GIB, "GiB")
        if max(best["predicted_memory_bytes"] for best in row["best"]) >= GIB
        else (1 << 20, "MiB")
    )
    columns = [
        Column(title="", right=True),
        Column(title="layout", wrap=True),
        Column(title="tokens/s/GPU", right=True),
        Column(title="4 of 5 within", right=True),
        Column(title=f"{name} of {limit / unit:,.1f}" if limit is not None else name, right=True),
        Column(title="4 of 5 within", right=True),
        Column(title="OOM", right=True),
        Column(title="fails", right=True),
        *(Column(title=part[:11], right=True, style="dim") for part in MEMORY_PARTS),
    ]
    write_table(columns, [_line(place, best, unit) for place, best in enumerate(row["best"], 1)])


def _to_run(row: dict[str, Any]) -> str:
    if not row["num_done"]:
        return f"to run {row['num_to_run']:,}"
    return f"known {row['num_done']:,}, left to run {row['num_to_run']:,}"


def _line(place: int, best: dict[str, Any], unit: int) -> list[str | StyledText]:
    out, rate, seconds = (
        best["probability_of_out_of_memory"],
        best["predicted_tokens_per_second_per_gpu"],
        best["predicted_step_seconds"],
    )
    times, sizes = best["step_seconds_band"], best["memory_bytes_band"]
    rates = (
        [rate * seconds / time for time in reversed(times)]
        if times is not None and rate is not None
        else None
    )
    return [
        f"{place}.",
        best["short"],
        show_as.tokens_rate(rate),
        f"{show_as.tokens_rate(rates[0])} - {show_as.tokens_rate(rates[1])}"
        if rates is not None
        else show_as.UNKNOWN,
        f"{best['predicted_memory_bytes'] / unit:,.1f}",
        f"{sizes[0] / unit:,.1f} - {sizes[1] / unit:,.1f}"
        if sizes is not None
        else show_as.UNKNOWN,
        StyledText(
            text=f"{out:.0%}" if out is not None else show_as.UNKNOWN,
            style="" if out is None or out < 0.5 else "yellow",
        ),
        f"{best['probability_of_another_failure']:.0%}",
        *(f"{size / unit:,.1f}" for size in best["memory_bytes_by_part"].values()),
    ]


def _fitting(row: dict[str, Any]) -> str:
    """How many layouts should fit, for people."""
    low, high = row["num_that_fit"] or (0, 0)
    return (
        f"predicted to fit {low:,}"
        if low == high
        else f"predicted to fit {low:,} to {high:,} (expected {row['num_expected_to_fit']:,.1f})"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"

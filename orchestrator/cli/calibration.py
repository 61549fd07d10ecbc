"""The command `calibration`: the constants of the predictions, their trials, and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Db, Json, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import Column, numbers, write_json, write_line, write_table
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from orchestrator.core.physics.fit_quality import Agreement, Fitted
    from orchestrator.sweep.prior_knowledge import PriorKnowledge

# Relative error below which a prediction is not shown among the worst.
WORTH_SHOWING = 0.01


def calibration(
    sweep: SweepArgument = None,
    worst: Annotated[
        int, typer.Option(min=0, help="How many of the worst predictions to show.")
    ] = 5,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Show the constants that a sweep's predictions use.

    Each constant with its uncertainty, before and after it was fitted; the trials of all sweeps
    that it was fitted to; and predicted against measured numbers.

    Examples:
      sweep calibration
      sweep calibration 8b --worst 10
      sweep calibration --json
    """
    from orchestrator.cli.sweep_file import planning, stored_spec

    with existing_store(db) as store:
        row = select_sweep(store, sweep)
        known = planning(stored_spec(row), store)
    record = _record(row.name, known.knowledge, worst=worst)
    if as_json:
        write_json("calibration", record)
    else:
        _print(record, known.based_on)


def _record(name: str, knowledge: PriorKnowledge, *, worst: int) -> dict[str, Any]:
    from orchestrator.core.physics.fit_quality import agreement, fitted_memory, fitted_times
    from orchestrator.sweep.prior_knowledge import sweeps_of

    prior, fitted, rows = knowledge.prior, knowledge.calibration(), knowledge.rows
    observations = [trial.observation for trial in rows]
    ids = [(trial.row.trial_id, trial.row.sweep.name) for trial in rows]
    before, after = agreement(observations, prior), agreement(observations, fitted)
    newest = next((trial.row for trial in reversed(rows) if not trial.row.out_of_memory), None)
    stack = None
    if newest is not None:
        stack = {part: getattr(newest, part) for part in ("torch", "cuda", "driver")}
    offsets = fitted.cell_offsets.items()
    return {
        "sweep": name,
        "device": knowledge.hardware.name if knowledge.hardware is not None else None,
        "workload": knowledge.spec.workload.name,
        "stack": stack,
        "num_trials": len(rows),
        "num_current": sum(trial.is_current for trial in rows),
        "num_times": fitted.num_times,
        "num_peaks": fitted.num_peaks,
        "num_out_of_memory": fitted.num_out_of_memory,
        "sweeps": sweeps_of(rows),
        "links": _links(knowledge),
        "launch_seconds": knowledge.launch_seconds,
        "step_residual_sd": fitted.step_residual_sd,
        "memory_residual_sd": fitted.memory_residual_sd,
        "step_constants": [_constant(one) for one in fitted_times(prior, fitted)],
        "memory_constants": [_constant(one) for one in fitted_memory(prior, fitted)],
        "cell_offsets": {f"{cell.key} on {device}": x for (cell, device), x in offsets},
        "step_time": _agreement(before.step_time, after.step_time, ids, worst),
        "memory": _agreement(before.memory, after.memory, ids, worst),
        "out_of_memory": {
            "num": len(after.foretold),
            "num_predicted_before": sum(before.foretold),
            "num_predicted": sum(after.foretold),
        },
    }


def _constant(fitted: Fitted) -> dict[str, Any]:
    return asdict(fitted) | {"from_data": fitted.from_data}


def _links(knowledge: PriorKnowledge) -> dict[str, Any] | None:
    """Return the links that `sweep netbench` measured; None if it measured nothing."""
    network = knowledge.network
    if network is None:
        return None
    newest = knowledge.links[-1]
    return {
        "run_token": newest.run_token,
        "at": newest.at,
        "backend": newest.backend,
        "num": network.num_samples,
        "residual_sd": network.residual_sd,
        "constants": {name: network.value(name) for name in network.names},
    }


def _agreement(
    before: Agreement, after: Agreement, ids: Sequence[tuple[int, str]], worst: int
) -> dict[str, Any]:
    return {
        "num": len(after.ratios),
        "uncalibrated": before.quantiles(),
        "calibrated": after.quantiles(),
        "worst": [
            {
                "trial_id": ids[place][0],
                "sweep": ids[place][1],
                "layout": after.layouts[place].key,
                "short": after.layouts[place].short,
                "predicted": predicted,
                "measured": measured,
                "ratio": predicted / measured,
            }
            for place, predicted, measured in after.worst(worst)
        ],
    }


def _print(record: Mapping[str, Any], based_on: str) -> None:
    stack = [f"{name} {value}" for name, value in (record["stack"] or {}).items() if value]
    device = record["device"] or "unknown device"
    title = f"Predictions for sweep {record['sweep']}: workload {record['workload']} on {device}"
    write_line(f"{title} ({', '.join(stack)})" if stack else title, style="bold")
    write_line(f"  {based_on}")
    if (links := record["links"]) is not None:
        constants = [f"{k.replace('_', ' ')} {v:.3g}" for k, v in links["constants"].items()]
        write_line(
            f"  links: {links['num']} collectives of sweep netbench, {links['backend']},"
            f" {links['at']:%Y-%m-%d}, met within {links['residual_sd']:.0%}:"
            f" {', '.join(constants)}"
        )
    if not record["num_trials"]:
        return
    counts = (
        f"  {record['num_times']:,} times, {record['num_peaks']:,} peaks,"
        f" {record['num_out_of_memory']:,} out-of-memories"
    )
    if older := record["num_trials"] - record["num_current"]:
        counts += f"; {older:,} with older software, as a prior of the others"
    write_line(counts)
    _print_constants("Step time: factors", record["step_constants"])
    _print_constants("Memory: factors, then amounts (reserve in GiB)", record["memory_constants"])
    write_line("")
    write_line("Predicted / measured", style="bold")
    titles = ("trials", "median", "p10", "p90", "median error", "within 15 %")
    lines = [*_quality("step_time", record["step_time"]), *_quality("memory", record["memory"])]
    write_table([Column(), *numbers(*titles)], lines)
    out = record["out_of_memory"]
    if out["num"]:
        write_line(
            f"  of {out['num']:,} out-of-memories {out['num_predicted']:,} are predicted,"
            f" uncalibrated {out['num_predicted_before']:,}"
        )
    _print_worst("step time", record["step_time"]["worst"], show_as.step_time)
    _print_worst("memory", record["memory"]["worst"], show_as.memory)


def _print_constants(title: str, constants: Sequence[Mapping[str, Any]]) -> None:
    write_line("")
    write_line(title, style="bold")
    spread = Column(style="dim")
    columns = [Column("constant"), *numbers("prior"), spread, *numbers("fitted"), spread]
    rows = [
        [
            f"  {one['name'].replace('_', ' ')}",
            f"{one['prior']:.3g}",
            _spread(one["prior_sd"], is_factor=one["is_factor"]),
            f"{one['fitted']:.3g}",
            _spread(one["fitted_sd"], is_factor=one["is_factor"]),
            f"{one['from_data']:.0%}",
        ]
        for one in constants
    ]
    write_table([*columns, *numbers("from data")], rows)


def _spread(sd: float, *, is_factor: bool) -> str:
    """One standard deviation; for a factor as a ratio."""
    return f"x/ {math.exp(sd):.2f}" if is_factor else f"± {sd:.2f}"


def _quality(name: str, found: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for kind in ("uncalibrated", "calibrated"):
        if (quantiles := found[kind]) is not None:
            ratios = [f"{quantiles[key]:.2f}" for key in ("median", "p10", "p90")]
            shares = [show_as.percent(quantiles[k]) for k in ("median_error", "within_15_percent")]
            lines.append(
                [f"  {name.replace('_', ' ')}, {kind}", f"{found['num']:,}", *ratios, *shares]
            )
    return lines


def _print_worst(
    name: str, worst: Sequence[Mapping[str, Any]], text: Callable[[float], str]
) -> None:
    rows = [
        [
            str(one["trial_id"]),
            one["sweep"],
            text(one["predicted"]),
            text(one["measured"]),
            f"{one['ratio']:.2f}",
            one["short"],
        ]
        for one in worst
        if abs(one["ratio"] - 1) > WORTH_SHOWING
    ]
    if not rows:
        return
    write_line("")
    write_line(f"Predicted worst, {name}", style="bold")
    columns = [*numbers("trial"), Column("sweep"), *numbers("predicted", "measured", "ratio")]
    write_table([*columns, Column("layout", wrap=True)], rows)

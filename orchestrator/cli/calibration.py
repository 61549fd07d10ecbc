"""The command `calibration`: the constants that predictions rest on, the trials that those rest on, and predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.defaults import SweepArgument, chosen_sweep, existing_store
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
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show_as

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from orchestrator.core.physics.fit_quality import Agreement, Fitted
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.sweep.prior_knowledge import PriorKnowledge

WORTH_SHOWING = 0.01  # relative: what is predicted as closely as this is no bad prediction


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        epilog=examples(
            "sweep calibration", "sweep calibration 8b --worst 10", "sweep calibration --json"
        )
    )(calibration)


def calibration(
    sweep: SweepArgument = None,
    worst: Annotated[
        int,
        typer.Option(
            "--worst", min=0, help="How many of the trials to show that are predicted worst."
        ),
    ] = 5,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the constants that a sweep's predictions rest on.

    With their uncertainty, before and after fitting, the trials of all sweeps that taught them, and predicted against measured.
    """
    from orchestrator.cli.sweep_file import planning

    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        known = planning(_spec_of(row), store)
    record = _record(row.name, known.learned, gpus_per_node=known.gpus_per_node, worst=worst)
    if as_json:
        write_json("calibration", record)
    else:
        _print(record, known.based_on)


def _spec_of(row: SweepRow) -> SweepSpec:
    from pydantic import ValidationError

    from orchestrator.core.sweepfile.spec import SweepSpec

    try:
        return SweepSpec.model_validate_json(row.spec_json)
    except ValidationError as exc:
        raise UsageInvalid(
            f"sweep {row.name} was begun by a version of this program whose sweep files are no longer read ({exc.error_count()} mistakes);"
            " `sweep run` its file again, and ask then"
        ) from None


def _record(
    name: str, learned: PriorKnowledge, *, gpus_per_node: int, worst: int
) -> dict[str, Any]:
    from orchestrator.core.physics.fit_quality import agreement, fitted_memory, fitted_times
    from orchestrator.sweep.prior_knowledge import sweeps_of

    prior, fitted = learned.prior, learned.calibration()
    observations = [taught.observation for taught in learned.rows]
    ids = [(taught.row.trial_id, taught.row.sweep.name) for taught in learned.rows]
    before, after = agreement(observations, prior), agreement(observations, fitted)
    newest = next(
        (taught.row for taught in reversed(learned.rows) if not taught.row.out_of_memory), None
    )
    return {
        "sweep": name,
        "device": learned.hardware.name if learned.hardware is not None else None,
        "workload": learned.spec.workload.name,
        "stack": {part: getattr(newest, part) for part in ("torch", "cuda", "driver")}
        if newest is not None
        else None,
        "num_trials": len(learned.rows),
        "num_current": sum(taught.is_current for taught in learned.rows),
        "num_times": fitted.num_times,
        "num_peaks": fitted.num_peaks,
        "num_out_of_memory": fitted.num_out_of_memory,
        "sweeps": sweeps_of(learned.rows),
        "links": _links(learned),
        "launch_seconds": learned.launch_seconds,
        "step_residual_sd": fitted.step_residual_sd,
        "memory_residual_sd": fitted.memory_residual_sd,
        "step_constants": [_constant(one) for one in fitted_times(prior, fitted)],
        "memory_constants": [_constant(one) for one in fitted_memory(prior, fitted)],
        "cell_offsets": {
            f"{cell.key} on {device}": offset
            for (cell, device), offset in fitted.cell_offsets.items()
        },
        "step_time": _agreement(before.step_time, after.step_time, ids, worst),
        "memory": _agreement(before.memory, after.memory, ids, worst),
        "out_of_memory": {
            "num": len(after.foretold),
            "num_predicted_before": sum(before.foretold),
            "num_predicted": sum(after.foretold),
        },
    }


def _links(learned: PriorKnowledge) -> dict[str, Any] | None:
    """What was measured of links, where anything was."""
    network = learned.network
    if network is None:
        return None
    newest = learned.links[-1]
    return {
        "run_token": newest.run_token,
        "at": newest.at,
        "backend": newest.backend,
        "num": network.num_samples,
        "residual_sd": network.residual_sd,
        "constants": {name: network.value(name) for name in network.names},
    }


def _constant(one: Fitted) -> dict[str, Any]:
    return {
        "name": one.name,
        "is_factor": one.is_factor,
        "prior": one.prior,
        "prior_sd": one.prior_sd,
        "fitted": one.fitted,
        "fitted_sd": one.fitted_sd,
        "learned": one.learned,
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
    stack = ", ".join(
        f"{name} {value}" for name, value in (record["stack"] or {}).items() if value is not None
    )
    device = record["device"] or "unknown device"
    write_line(
        f"Predictions for sweep {record['sweep']}: workload {record['workload']} on {device}{f' ({stack})' if stack else ''}",
        style="bold",
    )
    write_line(f"  {based_on}")
    if (links := record["links"]) is not None:
        constants = ", ".join(
            f"{name.replace('_', ' ')} {value:.3g}" for name, value in links["constants"].items()
        )
        write_line(
            f"  links: {links['num']} collectives of sweep netbench, {links['backend']}, {links['at']:%Y-%m-%d}, met within"
            f" {links['residual_sd']:.0%}: {constants}"
        )
    if not record["num_trials"]:
        return
    older = record["num_trials"] - record["num_current"]
    counted = f"{record['num_times']:,} times, {record['num_peaks']:,} peaks, {record['num_out_of_memory']:,} out-of-memories"
    write_line(
        f"  {counted}{f'; {older:,} with older software, as a prior of the others' if older else ''}"
    )
    _print_constants("Step time: factors", record["step_constants"])
    _print_constants("Memory: factors, then amounts (reserve in GiB)", record["memory_constants"])
    write_line("")
    write_line("Predicted / measured", style="bold")
    columns = [
        Column(title=title, right=title != "")
        for title in ("", "trials", "median", "p10", "p90", "median error", "within 15 %")
    ]
    write_table(
        columns, [line for name in ("step_time", "memory") for line in _quality(name, record[name])]
    )
    out = record["out_of_memory"]
    if out["num"]:
        write_line(
            f"  of {out['num']:,} out-of-memories {out['num_predicted']:,} are predicted, uncalibrated {out['num_predicted_before']:,}"
        )
    for name, text in (("step_time", show_as.step_time), ("memory", show_as.memory)):
        _print_worst(name, record[name]["worst"], text)


def _print_constants(title: str, constants: Sequence[Mapping[str, Any]]) -> None:
    write_line("")
    write_line(title, style="bold")
    columns = [
        Column(title="constant"),
        Column(title="prior", right=True),
        Column(title="", style="dim"),
        Column(title="fitted", right=True),
        Column(title="", style="dim"),
        Column(title="learned", right=True),
    ]
    rows: list[list[str | StyledText]] = [
        [
            f"  {one['name'].replace('_', ' ')}",
            f"{one['prior']:.3g}",
            _spread(one["prior_sd"], is_factor=one["is_factor"]),
            f"{one['fitted']:.3g}",
            _spread(one["fitted_sd"], is_factor=one["is_factor"]),
            f"{one['learned']:.0%}",
        ]
        for one in constants
    ]
    write_table(columns, rows)


def _spread(sd: float, *, is_factor: bool) -> str:
    """One standard deviation: of a factor, how many times more or less."""
    return f"x/ {2.718281828459045**sd:.2f}" if is_factor else f"± {sd:.2f}"


def _quality(name: str, found: Mapping[str, Any]) -> list[list[str | StyledText]]:
    lines: list[list[str | StyledText]] = []
    for kind in ("uncalibrated", "calibrated"):
        quantiles = found[kind]
        if quantiles is not None:
            numbers = [f"{quantiles[key]:.2f}" for key in ("median", "p10", "p90")]
            shares = [
                show_as.percent(quantiles["median_error"]),
                show_as.percent(quantiles["within_15_percent"]),
            ]
            lines.append(
                [f"  {name.replace('_', ' ')}, {kind}", f"{found['num']:,}", *numbers, *shares]
            )
    return lines


def _print_worst(name: str, worst: Sequence[Mapping[str, Any]], text: Any) -> None:
    worst = [one for one in worst if abs(one["ratio"] - 1) > WORTH_SHOWING]
    if not worst:
        return
    write_line("")
    write_line(f"Predicted worst, {name.replace('_', ' ')}", style="bold")
    columns = [
        Column(title="trial", right=True),
        Column(title="sweep"),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="ratio", right=True),
        Column(title="layout", wrap=True),
    ]
    rows: list[list[str | StyledText]] = [
        [
            str(one["trial_id"]),
            one["sweep"],
            text(one["predicted"]),
            text(one["measured"]),
            f"{one['ratio']:.2f}",
            one["short"],
        ]
        for one in worst
    ]
    write_table(columns, rows)

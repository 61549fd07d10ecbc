"""The command `export`: trials as CSV, Parquet, JSON or studies, or one as a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.export.output_file import write_bytes, write_text
from orchestrator.cli.options import Db, Json, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import SCHEMA, csv_text, note, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.frameworks.framework import Framework
from orchestrator.report.extras import how_to_install
from orchestrator.report.json_text import json_text
from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.sql.bounded_answer import Answer
    from db.store_reads import StoreReads


class Target(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"
    OPTUNA = "optuna"
    CONFIG = "config"


def export(
    target: Annotated[Target, typer.Argument(metavar="TARGET", help="The format to write.")],
    sweep: SweepArgument = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The file to write; for optuna, the URL of a storage. Default: stdout.",
        ),
    ] = None,
    sweep_option: Annotated[str | None, typer.Option("--sweep", hidden=True)] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All sweeps of the store, also simulated ones.")
    ] = False,
    to: Annotated[
        Framework | None,
        typer.Option("--to", help="For config: the framework to write a layout for."),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial", metavar="N", min=1, help="For config: a trial. Default: the winner."
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="For config: write also a layout that the framework cannot express."
        ),
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Export trials, or a layout for your framework.

    CSV, Parquet and JSON have every trial with all its numbers (the columns of v_trial); Optuna has
    a study per cell with a direction per objective: out-of-memories and failures as FAIL,
    condemned layouts as PRUNED.
    `config` writes the winner, or one trial, as the file or the arguments of a training framework.
    It says what your own program has to do, and refuses what the framework cannot express.

    Examples:
      sweep export csv -o trials.csv
      sweep export parquet 8b -o 8b.parquet
      sweep export csv --all -o everything.csv
      sweep export optuna -o sqlite:///optuna.sqlite && optuna-dashboard sqlite:///optuna.sqlite
      sweep export config 8b --to deepspeed -o ds_config.json
      sweep export config --to megatron --trial 17
    """
    _check_config_options(target, to, trial, is_partial=partial)
    name = _sweep_name(sweep, sweep_option, every=every)
    output = None if output == "-" else output
    if as_json and output is None and target in (Target.CSV, Target.PARQUET):
        raise UsageInvalid(
            f"--json and {target} cannot both go to stdout; name a file for the rows: sweep export"
            f" {target} -o FILE --json"
        )
    with existing_store(db) as store:
        if to is not None:
            from orchestrator.cli.export.config import export_config  # yaml

            needs_none = every or (trial is not None and name is None)
            export_config(
                store,
                None if needs_none else select_sweep(store, name),
                to,
                trial_id=trial,
                is_partial=partial,
                output=output,
                as_json=as_json,
            )
            return
        row = None if every else select_sweep(store, name)
        if target is Target.OPTUNA:
            rows = store.sweeps() if row is None else [row]
            _export_optuna(store, rows, output, as_json=as_json)
            return
    _export_trials(target, row, output, db=db, as_json=as_json)


def _sweep_name(sweep: str | None, option: str | None, *, every: bool) -> str | None:
    """The name that was given in one of two ways. Raises UsageInvalid if they contradict."""
    if sweep is not None and option not in (None, sweep):
        raise UsageInvalid(
            f"sweep {sweep} and --sweep {option} contradict each other; give one of them"
        )
    name = sweep or option
    if every and name is not None:
        raise UsageInvalid(f"sweep {name} and --all contradict each other; give one of them")
    return name


def _check_config_options(
    target: Target, to: Framework | None, trial: int | None, *, is_partial: bool
) -> None:
    """Raise UsageInvalid if `config` has no framework, or another target has options of it."""
    if target is Target.CONFIG:
        if to is None:
            raise UsageInvalid(f"name the framework: --to {'|'.join(Framework)}")
        return
    for option, is_given in (
        ("--to", to is not None),
        ("--trial", trial is not None),
        ("--partial", is_partial),
    ):
        if is_given:
            raise UsageInvalid(f"{option} is for `sweep export config`, not for {target}")


def _export_trials(
    target: Target, row: SweepRow | None, output: str | None, *, db: str | None, as_json: bool
) -> None:
    """Write the trials of a sweep; None: of all sweeps."""
    from db.sql.own_queries import exported_trials  # needs SQLAlchemy

    result = exported_trials(db, None if row is None else row.id)
    match target:
        case Target.PARQUET:
            _write_parquet(result, output)
        case Target.CSV:
            write_text(csv_text(result.columns, result.rows), output)
        case Target.JSON:
            trials = [dict(zip(result.columns, values, strict=True)) for values in result.rows]
            document = {"schema": SCHEMA, "command": "export", "trials": trials}
            write_text(json_text(document) + "\n", output)
    num_trials = len(result.rows)
    if output is not None and as_json:
        fields = {"target": target, "sweep": row.name if row is not None else None}
        write_json("export", fields | {"output": output, "num_trials": num_trials})
    else:
        of = "all sweeps" if row is None else f"sweep {row.name}"
        where = f" written to {output}" if output is not None else ""
        note(f"{counted(num_trials, 'trial')} of {of}{where}")


def _write_parquet(result: Answer, output: str | None) -> None:
    if output is None and sys.stdout.isatty():
        raise UsageInvalid(
            "Parquet is not for a terminal; name a file or use a pipe: sweep export parquet -o"
            " trials.parquet"
        )
    try:
        # pyarrow is an extra: only this format needs it.
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageInvalid(f"Parquet needs pyarrow, {how_to_install('export')}") from None
    columns = {
        name: _arrow_values([row[i] for row in result.rows])
        for i, name in enumerate(result.columns)
    }
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    content = buffer.getvalue().to_pybytes()
    if output is None:
        sys.stdout.buffer.write(content)
    else:
        write_bytes(content, output)


def _arrow_values(values: Sequence[Any]) -> list[Any]:
    """Values of one type: SQLite returns the whole numbers of a column of floats as integers."""
    if any(isinstance(value, float) for value in values):
        return [None if value is None else float(value) for value in values]
    if any(isinstance(value, dict | list) for value in values):
        return [None if value is None else json_text(value) for value in values]
    return list(values)


def _export_optuna(
    store: StoreReads, rows: Sequence[SweepRow], output: str | None, *, as_json: bool
) -> None:
    """Write a study SWEEP/CELL for each cell, and say what was left out."""
    # Optuna takes 0.5 s to import.
    from db.connection.foreign_storage import errors_in_one_line
    from orchestrator.core.sweepfile.objective import objectives_of
    from orchestrator.report.fronts import device_memory_bytes
    from orchestrator.search.optuna_storage import export_study
    from orchestrator.sweep.study_trials import study_trials

    if output is None:
        raise UsageInvalid(
            "name the Optuna storage to write to: sweep export optuna -o sqlite:///optuna.sqlite"
        )
    studies, left_out = {}, {}
    for row in rows:
        objectives = objectives_of(json.loads(row.spec_json).get("objective"))
        session = store.newest_session(row.id)
        for cell in store.cells(row.id):
            trials = store.trials(row.id, cell_id=cell.id)
            shown, without = study_trials(
                trials,
                store.attempt_spans(cell.id),
                objectives,
                price_per_gpu_hour=session.price_per_gpu_hour if session is not None else None,
                device_memory_bytes=device_memory_bytes(store, row),
            )
            study = f"{row.name}/{cell.cell.key}"
            attributes = {
                "sweep": row.name,
                "cell": cell.cell.key,
                "fingerprint_digest": cell.fingerprint_digest,
                "left_out": without,
            }
            with errors_in_one_line("Optuna study", example="sqlite:///optuna.db"):
                studies[study] = export_study(
                    output, study, shown, objectives=objectives, attributes=attributes
                )
            left_out[study] = without
    if as_json:
        name = rows[0].name if len(rows) == 1 else None
        fields = {"target": "optuna", "sweep": name, "studies": studies, "left_out": left_out}
        write_json("export", fields)
        return
    for study, count in studies.items():
        reasons = [f"{number} {reason}" for reason, number in sorted(left_out[study].items())]
        without_some = f"; left out: {', '.join(reasons)}" if reasons else ""
        note(f"{counted(count, 'trial')} written to study {study}{without_some}")
    if not studies:
        names = ", ".join(row.name for row in rows)
        note(f"sweep {names} has no cells yet" if rows else f"{store.url} holds no sweep yet")

"""The command `mirror`: brings MLflow and W&B up to date with a sweep."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal.output import plain, write_json, write_line
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from orchestrator.core.sweepfile.mirror_section import MirrorSection

EXIT_TRY_AGAIN = 75


def mirror(
    sweep: SweepArgument = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="A folder, or '${NAME}' for the environment variable with the tracking URI.",
        ),
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where W&B writes runs offline.")
    ] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Copy what a sweep measured to MLflow or W&B.

    Each trial that was launched and has ended becomes a run; what is there already is not written
    again. Without options it takes the section `mirror` of the sweep file. If a tracker refuses
    some, the exit code is 75, and the same command continues.

    Examples:
      sweep mirror 8b
      sweep mirror 8b --mlflow mlruns
      sweep mirror 8b --wandb wandb-offline && wandb sync wandb-offline/wandb/offline-run-*
    """
    from orchestrator.cli.mirror.targets import alone, mirrorings, missing_packages
    from orchestrator.report.mirrors.mirroring import read_runs

    with existing_store(db) as store:
        row = select_sweep(store, sweep)
        section = _section(row, mlflow, wandb)
        if missing := missing_packages(section):
            raise UsageInvalid("; ".join(missing))
        with alone(row) as is_alone:
            if not is_alone:
                raise UsageInvalid(
                    f"another process mirrors sweep {row.name} now: `sweep run` does it by itself"
                )
            runs, trackers = read_runs(store, row), mirrorings(section, row)
            passes = [tracker.catch_up(runs) for tracker in trackers]
            for tracker in trackers:
                tracker.close()
    if as_json:
        told = [
            {"tracker": it.tracker, "written": it.num_written, "left": it.num_left, "why": it.why}
            for it in passes
        ]
        write_json("mirror", {"sweep": row.name, "trials": len(runs), "trackers": told})
    else:
        for one in passes:
            text = f"{one.tracker}: {show.counted(one.num_written, 'run')} written"
            if one.why is not None:
                text += f"; {one.num_left:,} left: {plain(one.why)}"
            write_line(f"{text}, of {show.counted(len(runs), 'trial')} that have ended")
    if any(one.why is not None for one in passes):
        raise typer.Exit(EXIT_TRY_AGAIN)


def _section(row: SweepRow, mlflow: str | None, wandb: str | None) -> MirrorSection:
    from pydantic import ValidationError

    from orchestrator.core.sweepfile.mirror_section import MirrorSection

    given = {"mlflow": mlflow, "wandb": wandb}
    if mlflow is None and wandb is None:
        given = json.loads(row.spec_json).get("mirror") or {}
        if not given:
            raise UsageInvalid(
                f"the file of sweep {row.name} has no section mirror: add --mlflow WHERE or --wandb"
                " FOLDER"
            )
    try:
        return MirrorSection.model_validate(given)
    except ValidationError as exc:
        (first, *_) = exc.errors()
        where = ".".join(map(str, first["loc"]))
        raise UsageInvalid(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None

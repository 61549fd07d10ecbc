"""The commands that change what the store says: cancel, invalidate, db upgrade."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli.chosen import SweepArgument, chosen_sweep, existing_store
from orchestrator.cli.output import DbOption, JsonOption, examples, note, write_json, write_line
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.quantities import counted


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(
        epilog=examples(
            "sweep cancel                 end what runs, at once",
            "sweep cancel 8b --drain      start nothing new, let what runs finish",
        )
    )(cancel)
    app.command(
        epilog=examples(
            "sweep invalidate --where 'not is_current_fingerprint' --sweep 8b",
            "sweep invalidate --where \"torch like '2.9.%'\"",
            "sweep invalidate --where \"failure_kind = 'nccl'\" --yes",
            "sweep invalidate --where 'trial_id = 17'",
        )
    )(invalidate)
    database = typer.Typer(help="Look after the database.", no_args_is_help=True, rich_markup_mode=None)
    database.command(epilog=examples("sweep db upgrade", "SWEEP_DB=postgresql://me@host/sweeps sweep db upgrade"))(upgrade)
    app.add_typer(database, name="db")


def cancel(
    sweep: SweepArgument = None,
    drain: Annotated[bool, typer.Option("--drain", help="Let trials under way finish; only start nothing new.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running sweep to stop.

    Wherever its orchestrator runs. What is measured stays, and `sweep run` goes on later.
    """
    from db.schema import StopRequest  # needs SQLAlchemy, which takes 0.3 s

    request = StopRequest.DRAIN if drain else StopRequest.CANCEL
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        accepted = store.request_stop(row.id, request)
    holder = row.holder
    if as_json:
        host, pid = (holder.host, holder.pid) if accepted and holder is not None else (None, None)
        write_json("cancel", {"sweep": row.name, "request": request, "accepted": accepted, "host": host, "pid": pid})
        return
    if not accepted:
        write_line(f"Nobody works on sweep {row.name}: there is nothing to stop.")
        return
    who = f"host {holder.host}, pid {holder.pid}" if holder is not None else "its orchestrator"
    what = "trials under way may finish, nothing new is started" if drain else "trials under way are ended, and wait to be measured again"
    write_line(f"Asked {who} to stop sweep {row.name}: {what}. It looks every 5 s; follow it with `sweep status {row.name} --watch`.")


def invalidate(
    where: Annotated[
        str,
        typer.Option("--where", metavar="CONDITION", help="A condition over v_trial's columns; `sweep sql --schema` shows them."),
    ],
    sweep: Annotated[str | None, typer.Option("--sweep", help="Only trials of this sweep.", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have trials that match a condition measured again.

    Their old numbers are kept, but no longer count. An out-of-memory takes along the layouts that it condemned.
    """
    with existing_store(db) as store:
        counts = store.count_repeatable(where, sweep=sweep)
        total = sum(counts.values())
        if total and not as_json:
            note(
                f"{counted(total, 'matching trial')}: "
                + ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in sorted(counts.items()))
            )
        if total and not yes:
            _confirm(total, as_json=as_json)
        invalidated = store.invalidate(where, sweep=sweep) if total else 0
    if as_json:
        write_json("invalidate", {"where": where, "sweep": sweep, "matched": counts, "num_invalidated": invalidated})
    elif invalidated:
        write_line(f"{counted(invalidated, 'trial')} will be measured again by `sweep run` on their file.")
    else:
        write_line("No measured, out-of-memory, failed or pruned trial matches: nothing was changed.")


def _confirm(total: int, *, as_json: bool) -> None:
    # Without a terminal nobody can answer, and who wants JSON is a program; a script has to say so.
    if as_json or not sys.stdin.isatty():
        raise UsageInvalid(f"{counted(total, 'trial')} would be measured again; nobody is here to ask: say --yes")
    if not typer.confirm("Measure them again?", err=True):
        raise typer.Exit(1)


def upgrade(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Bring the database to this program's schema.

    A SQLite file is copied first. Stop all orchestrators before.
    """
    from db import migrate  # needs SQLAlchemy

    before, after, copy = migrate.upgrade(db)
    if as_json:
        write_json("db upgrade", {"version_before": before, "version_after": after, "copy": copy})
        return
    change = f"is at schema {after} already" if before == after else f"was brought from schema {before or 'none'} to {after}"
    write_line(f"The database {change}." + (f" A copy of it as it was: {copy}" if copy is not None and before != after else ""))

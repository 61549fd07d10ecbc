"""The commands that change what the store holds: cancel, invalidate, db upgrade."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, SweepArgument, Yes
from orchestrator.cli.store.defaults import select_sweep, writable_store
from orchestrator.cli.terminal.output import note, write_json, write_line
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store import Store
    from db.types import StopRequest

# Sweeps named in a question.
MOST_NAMED = 8


def cancel(
    sweep: SweepArgument = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Let running trials finish; only start no new ones."),
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Ask a running sweep to stop.

    It works from any machine that reaches the store. Results are kept; `sweep run` continues later.

    Examples:
      sweep cancel                 end the running trials at once
      sweep cancel 8b --drain      let the running trials finish
    """
    asked = ask_to_stop(db, sweep, drain=drain)
    if not as_json:
        write_line(asked.text)
        return
    reached = asked.sweep.holder if asked.is_accepted else None
    fields = {
        "sweep": asked.sweep.name,
        "request": asked.request,
        "accepted": asked.is_accepted,
        "host": reached.host if reached is not None else None,
        "pid": reached.pid if reached is not None else None,
    }
    write_json("cancel", fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAsked:
    """A request to stop, and what to tell the person who made it."""

    sweep: SweepRow
    request: StopRequest
    is_accepted: bool
    text: str


def ask_to_stop(db: str | None, sweep: str | None, *, drain: bool) -> StopAsked:
    """Ask the orchestrator of a sweep to stop."""
    from db.types import StopRequest

    request = StopRequest.DRAIN if drain else StopRequest.CANCEL
    with writable_store(db) as store:
        row = select_sweep(store, sweep)
        is_accepted = store.request_stop(row.id, request)
    text = f"Nobody works on sweep {row.name}: there is nothing to stop."
    if is_accepted:
        holder = row.holder
        who = f"host {holder.host}, pid {holder.pid}" if holder is not None else "its orchestrator"
        what = "running trials are ended, and will be measured by the next `sweep run`"
        if drain:
            what = "running trials may finish, no new ones are started"
        text = (
            f"Asked {who} to stop sweep {row.name}: {what}. It reads this request within 5 s;"
            f" follow it with `sweep status {row.name} --watch`."
        )
    return StopAsked(sweep=row, request=request, is_accepted=is_accepted, text=text)


def invalidate(
    where: Annotated[
        str,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="An SQL condition over the columns of v_trial (see `sweep sql --schema`).",
        ),
    ],
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="SWEEP",
            help="The sweep's name. Default: the newest sweep that is not simulated.",
        ),
    ] = None,
    all_sweeps: Annotated[
        bool, typer.Option("--all-sweeps", help="Trials of every sweep of the store.")
    ] = False,
    yes: Yes = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Have the trials that match a condition measured again.

    Their old numbers stay in the store but no longer count. If a trial that ran out of memory is
    invalidated, so are the layouts that were skipped because of it.

    Examples:
      sweep invalidate --where 'not is_current_fingerprint' --sweep 8b
      sweep invalidate --where "torch like '2.9.%'" --all-sweeps
      sweep invalidate --where "failure_kind = 'nccl'" --yes
      sweep invalidate --where 'trial_id = 17' --sweep 8b
    """
    if all_sweeps and sweep is not None:
        raise UsageInvalid("--all-sweeps and --sweep exclude each other: leave one of them out")
    with writable_store(db) as store:
        if not all_sweeps:
            sweep = select_sweep(store, sweep).name
        counts = store.count_repeatable(where, sweep=sweep)
        total = sum(counts.values())
        if total and not as_json:
            states = [f"{n} {state.replace('_', ' ')}" for state, n in sorted(counts.items())]
            matching = f"{counted(total, 'matching trial')} of {_sweeps_text(store, where, sweep)}"
            note(f"{matching}: {', '.join(states)}")
        if total and not yes:
            _confirm(total, as_json=as_json)
        num_invalidated = store.invalidate(where, sweep=sweep) if total else 0
    if as_json:
        fields = {"where": where, "sweep": sweep, "matched": counts}
        write_json("invalidate", fields | {"num_invalidated": num_invalidated})
    elif num_invalidated:
        trials = counted(num_invalidated, "trial")
        write_line(f"{trials} will be measured again by the next `sweep run` with their file.")
    else:
        write_line(
            "No measured, out-of-memory, failed or pruned trial matches: nothing was changed."
        )


def _sweeps_text(store: Store, where: str, sweep: str | None) -> str:
    """Name the sweep, or the newest that have matching trials, with their numbers."""
    if sweep is not None:
        return f"sweep {sweep}"
    nums = store.count_repeatable_by_sweep(where)
    names = [f"{name} ({num})" for name, num in nums.items()]
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED], f"and {len(names) - MOST_NAMED} more"]
    return f"{counted(len(nums), 'sweep')}, {', '.join(names)}"


def _confirm(total: int, *, as_json: bool) -> None:
    # A script has no terminal, and a program that reads JSON answers no question.
    if as_json or not sys.stdin.isatty():
        raise UsageInvalid(
            f"{counted(total, 'trial')} would be measured again: add --yes to confirm"
        )
    if not typer.confirm("Measure them again?", err=True):
        raise typer.Exit(1)


def upgrade(db: Db = None, as_json: Json = False) -> None:
    """Upgrade the database to this program's schema.

    A SQLite file is copied before. Stop all orchestrators first.

    Examples:
      sweep db upgrade
      SWEEP_DB=postgresql://me@host/sweeps sweep db upgrade
    """
    from db import migrate  # needs SQLAlchemy

    before, after, copy = migrate.upgrade(db)
    if as_json:
        write_json("db upgrade", {"version_before": before, "version_after": after, "copy": copy})
    elif before == after:
        write_line(f"The database is at schema {after} already.")
    else:
        kept = f" A copy from before: {copy}" if copy is not None else ""
        write_line(f"The database was upgraded from schema {before or 'none'} to {after}.{kept}")

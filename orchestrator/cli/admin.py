"""The commands that change what the store says, or who may read it: cancel, invalidate, db upgrade, db grant-reader."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.defaults import SweepArgument, chosen_sweep, existing_store
from orchestrator.cli.home import sweep_home
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
    database = typer.Typer(
        help="Look after the database.", no_args_is_help=True, rich_markup_mode=None
    )
    database.command(
        epilog=examples("sweep db upgrade", "SWEEP_DB=postgresql://me@host/sweeps sweep db upgrade")
    )(upgrade)
    database.command(
        epilog=examples(
            "sweep db grant-reader",
            "sweep db grant-reader --role team_reader",
            "",
            "Environment:",
            "SWEEP_DB          the store, as a role that owns its tables and has CREATEROLE",
            "SWEEP_DB_READER   afterwards, for `sweep sql`: the URL that this command prints",
        )
    )(grant_reader)
    app.add_typer(database, name="db")


def cancel(
    sweep: SweepArgument = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Let trials under way finish; only start nothing new.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a running sweep to stop.

    Wherever its orchestrator runs. What is measured stays, and `sweep run` goes on later.
    """
    from db.types import StopRequest

    request = StopRequest.DRAIN if drain else StopRequest.CANCEL
    with existing_store(db, to_read=False) as store:
        row = chosen_sweep(store, sweep)
        accepted = store.request_stop(row.id, request)
    holder = row.holder
    if as_json:
        host, pid = (holder.host, holder.pid) if accepted and holder is not None else (None, None)
        write_json(
            "cancel",
            {"sweep": row.name, "request": request, "accepted": accepted, "host": host, "pid": pid},
        )
        return
    if not accepted:
        write_line(f"Nobody works on sweep {row.name}: there is nothing to stop.")
        return
    who = f"host {holder.host}, pid {holder.pid}" if holder is not None else "its orchestrator"
    what = (
        "trials under way may finish, nothing new is started"
        if drain
        else "trials under way are ended, and wait to be measured again"
    )
    write_line(
        f"Asked {who} to stop sweep {row.name}: {what}. It looks every 5 s; follow it with `sweep status {row.name} --watch`."
    )


def invalidate(
    where: Annotated[
        str,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="A condition over v_trial's columns; `sweep sql --schema` shows them.",
        ),
    ],
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="Only trials of this sweep.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have trials that match a condition measured again.

    Their old numbers are kept, but no longer count. An out-of-memory takes along the layouts that it condemned.
    """
    with existing_store(db, to_read=False) as store:
        counts = store.count_repeatable(where, sweep=sweep)
        total = sum(counts.values())
        if total and not as_json:
            note(
                f"{counted(total, 'matching trial')}: "
                + ", ".join(
                    f"{count} {state.replace('_', ' ')}" for state, count in sorted(counts.items())
                )
            )
        if total and not yes:
            _confirm(total, as_json=as_json)
        invalidated = store.invalidate(where, sweep=sweep) if total else 0
    if as_json:
        write_json(
            "invalidate",
            {"where": where, "sweep": sweep, "matched": counts, "num_invalidated": invalidated},
        )
    elif invalidated:
        write_line(
            f"{counted(invalidated, 'trial')} will be measured again by `sweep run` on their file."
        )
    else:
        write_line(
            "No measured, out-of-memory, failed or pruned trial matches: nothing was changed."
        )


def _confirm(total: int, *, as_json: bool) -> None:
    # Without a terminal nobody can answer, and who wants JSON is a program; a script has to say so.
    if as_json or not sys.stdin.isatty():
        raise UsageInvalid(
            f"{counted(total, 'trial')} would be measured again; nobody is here to ask: say --yes"
        )
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
    change = (
        f"is at schema {after} already"
        if before == after
        else f"was brought from schema {before or 'none'} to {after}"
    )
    write_line(
        f"The database {change}."
        + (f" A copy of it as it was: {copy}" if copy is not None and before != after else "")
    )


def grant_reader(
    role: Annotated[
        str,
        typer.Option(
            "--role", metavar="NAME", help="The role to make, or to give its rights anew."
        ),
    ] = "sweep_reader",
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Give a role that is there a new password too.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a PostgreSQL role that may only read the store.

    It may connect and select the tables and views, also those that `sweep db upgrade` makes later. With its URL in SWEEP_DB_READER
    `sweep sql` asks as that role, so the server itself refuses all else. At a terminal it asks for a password; where none is given it
    makes one, and keeps it in a file that only you can read.
    """
    from db.connection import url  # needs SQLAlchemy
    from db.sql import reader_role

    store = url.resolve(db)
    if store.drivername == "sqlite":
        raise UsageInvalid(
            "a SQLite file needs no reader: `sweep sql` opens it read-only. grant-reader is for PostgreSQL: name it with SWEEP_DB"
        )
    if not role.strip() or "\0" in role or len(role.encode()) > _MAX_ROLE_BYTES:
        raise UsageInvalid(f"a role's name has 1 to {_MAX_ROLE_BYTES} bytes; give another --role")
    is_new = not reader_role.exists(store, role)
    asked = _asked_password(role, as_json=as_json) if is_new or new_password else None
    made = reader_role.new_password() if asked is None and (is_new or new_password) else None
    granted = reader_role.grant(store, role, asked or made)
    file = _password_file(role)
    if made is not None:
        _keep_password(file, url.pgpass_line(store, role, made))
    reader = url.display_login(
        store, role, passfile=str(file) if asked is None and file.exists() else None
    )
    if as_json:
        fields = {
            "role": role,
            "is_new": granted.is_new,
            "schema": granted.schema,
            "num_relations": granted.num_relations,
        }
        write_json(
            "db grant-reader",
            {
                **fields,
                "url": reader,
                "password_file": file if made is not None else None,
                "remarks": granted.remarks,
            },
        )
        return
    done = "was made" if granted.is_new else "was there, and its rights were set anew"
    write_line(
        f"Role {role} {done}: it may connect, and select {granted.num_relations} tables and views of schema {granted.schema}."
    )
    if made is not None:
        write_line(f"Its password is in {file}.")
    elif asked is not None:
        write_line("Put its password into ~/.pgpass (of mode 600).")
    else:
        write_line("Its password is as it was; --new-password gives it another.")
    write_line("For `sweep sql`:")
    write_line(f"  export {url.READER_VARIABLE}='{reader}'")
    for remark in granted.remarks:
        write_line(f"Not changed: {remark[0].lower()}{remark[1:]}")


_MAX_ROLE_BYTES = 63


def _asked_password(role: str, *, as_json: bool) -> str | None:
    """A password that a person typed; None: one is to be made."""
    if as_json or not sys.stdin.isatty():
        return None
    text: str = typer.prompt(
        f"Password for {role} (empty: one is made)",
        default="",
        show_default=False,
        hide_input=True,
        confirmation_prompt=True,
        err=True,
    )
    return text or None


def _password_file(role: str) -> Path:
    return sweep_home().absolute() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', role)}.pgpass"


def _keep_password(file: Path, line: str) -> None:
    """Write a line of libpq's password file, where only this user can read it."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(
            os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w"
        ) as out:
            out.write(line + "\n")
        unfinished.replace(file)
    except OSError as exc:
        raise UsageInvalid(
            f"cannot write {file}: {exc.strerror}. The role was made; choose another place with SWEEP_HOME, and run the command with --new-password"
        ) from exc

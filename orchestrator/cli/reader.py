"""The command `sweep db grant-reader`: a PostgreSQL role that can only read the store."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Db, Json
from orchestrator.cli.store.home import sweep_home
from orchestrator.cli.terminal.output import write_json, write_line
from orchestrator.core.errors import UsageInvalid

MAX_ROLE_BYTES = 63


def grant_reader(
    role: Annotated[
        str, typer.Option("--role", metavar="NAME", help="The role to create or to update.")
    ] = "sweep_reader",
    new_password: Annotated[
        bool, typer.Option("--new-password", help="Also give an existing role a new password.")
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Create a PostgreSQL role that can only read the store.

    The role may connect and select from tables and views, also from those that a later `sweep db
    upgrade` creates. With its URL in SWEEP_DB_READER, `sweep sql` logs in as that role, and the
    server refuses to write. On a terminal the command asks for a password. If you give none, it
    generates one and stores it in a file that only you can read.

    Examples:
      sweep db grant-reader
      sweep db grant-reader --role team_reader

    Environment:
      SWEEP_DB          the store, with a role that owns its tables and has CREATEROLE
      SWEEP_DB_READER   afterwards, for `sweep sql`: the URL that this command prints
    """
    from db.connection import url  # needs SQLAlchemy
    from db.sql import reader_role

    store = url.resolve(db)
    if store.drivername == "sqlite":
        raise UsageInvalid(
            "a SQLite file needs no reader: `sweep sql` opens it read-only. grant-reader is for"
            " PostgreSQL: name it with SWEEP_DB"
        )
    if not role.strip() or "\0" in role or len(role.encode()) > MAX_ROLE_BYTES:
        raise UsageInvalid(f"a role's name has 1 to {MAX_ROLE_BYTES} bytes; give another --role")
    needs_password = new_password or not reader_role.exists(store, role)
    asked = _ask_password(role) if needs_password and not as_json and sys.stdin.isatty() else None
    made = reader_role.new_password() if needs_password and asked is None else None
    granted = reader_role.grant(store, role, asked or made)
    file = sweep_home() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', role)}.pgpass"
    if made is not None:
        _keep_password(file, url.pgpass_line(store, role, made))
    has_file = asked is None and file.exists()
    login = url.display_login(store, role, passfile=str(file) if has_file else None)
    if as_json:
        fields = {
            "role": role,
            "is_new": granted.is_new,
            "schema": granted.schema,
            "num_relations": granted.num_relations,
            "url": login,
            "password_file": file if made is not None else None,
            "remarks": granted.remarks,
        }
        write_json("db grant-reader", fields)
        return
    done = "was created" if granted.is_new else "existed; its rights were set again"
    write_line(
        f"Role {role} {done}: it may connect, and select from {granted.num_relations} tables and"
        f" views of schema {granted.schema}."
    )
    if made is not None:
        write_line(f"Its password is in {file}.")
    elif asked is not None:
        write_line("Put its password into ~/.pgpass (with mode 600).")
    else:
        write_line("Its password did not change; --new-password gives it a new one.")
    write_line("For `sweep sql`:")
    write_line(f"  export {url.READER_VARIABLE}='{login}'")
    for remark in granted.remarks:
        write_line(f"Not changed: {remark[0].lower()}{remark[1:]}")


def _ask_password(role: str) -> str | None:
    """The password that a person typed; None if one is to be generated."""
    text: str = typer.prompt(
        f"Password for {role} (empty: generate one)",
        default="",
        show_default=False,
        hide_input=True,
        confirmation_prompt=True,
        err=True,
    )
    return text or None


def _keep_password(file: Path, line: str) -> None:
    """Write a line of libpq's password file, readable by this user only."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(unfinished, flags, 0o600), "w") as out:
            out.write(line + "\n")
        unfinished.replace(file)
    except OSError as exc:
        raise UsageInvalid(
            f"cannot write {file}: {exc.strerror}. The role was created; choose another folder with"
            " SWEEP_HOME, and repeat the command with --new-password"
        ) from exc

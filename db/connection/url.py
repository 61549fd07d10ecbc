"""The database of a store: the URL of the caller, the environment or the working folder, checked.

A URL is shown without its password and its query.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from orchestrator.core.errors import StoreUnavailable, UsageInvalid
from orchestrator.core.trial.redaction import Secrets

URL_VARIABLE = "SWEEP_DB"
READER_VARIABLE = "SWEEP_DB_READER"
DEFAULT_PATH = Path(".sweep") / "sweep.sqlite"
# Option of a SQLite URL: allow a network file system.
UNSAFE = "unsafe"
ALLOWED = "sqlite:///path/to/file or postgresql://user@host/database"
_ENCODE = "In a user name or password write @ as %40, / as %2F, : as %3A and % as %25"

# statfs(2) magic numbers of file systems that hosts share: they lack the shared memory of WAL.
NETWORK_FILE_SYSTEMS: Mapping[int, str] = MappingProxyType(
    {
        0x6969: "NFS",
        0x517B: "SMB",
        0xFF534D42: "CIFS",
        0xFE534D42: "SMB2",
        0x0BD00BD0: "Lustre",
        0x47504653: "GPFS",
        0x19830326: "BeeGFS",
        0x00C36400: "Ceph",
        0x5346414F: "AFS",
        0x20030528: "OrangeFS",
        0xAAD7AAEA: "PanFS",
    }
)


def resolve(url: str | None, *, environment: Mapping[str, str] = os.environ) -> URL:
    """The database that is meant. Raises UsageInvalid for a URL that cannot be used."""
    text = url or environment.get(URL_VARIABLE) or ""
    return _parsed(text) if text else URL.create("sqlite", database=str(DEFAULT_PATH.absolute()))


def reader_of(url: URL, *, environment: Mapping[str, str] = os.environ) -> URL | None:
    """The login for people's statements on a PostgreSQL store; None: none is given.

    Raises UsageInvalid for one of another database.
    """
    text = environment.get(READER_VARIABLE) or ""
    if not text or url.drivername == "sqlite":
        return None
    try:
        reader = _parsed(text)
    except UsageInvalid as exc:
        raise UsageInvalid(f"{READER_VARIABLE}: {exc}") from None
    if reader.drivername == "sqlite" or (
        reader.database and url.database and reader.database != url.database
    ):
        meant = f"a login for database {url.database} of {display(url)}"
        raise UsageInvalid(
            f"{READER_VARIABLE} names {display(reader)}; it should be {meant}. "
            "`sweep db grant-reader` makes one"
        )
    return reader


def libpq_arguments(url: URL) -> dict[str, Any]:
    """The arguments of psycopg for a URL. Raises UsageInvalid for an option that libpq lacks."""
    # An extra that SQLite does not need.
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    for name in sorted(set(url.query) - known):
        close = get_close_matches(name, known, n=1)
        meant = (
            f"; did you mean {close[0]}?"
            if close
            else ". Known ones: https://www.postgresql.org/docs/current/libpq-connect.html"
        )
        raise UsageInvalid(
            f"option {name!r} of the database URL is unknown to PostgreSQL's client library{meant}"
        )
    try:
        arguments: dict[str, Any] = dict(url.get_dialect()().create_connect_args(url)[1])
    except ArgumentError as exc:
        raise UsageInvalid(f"the database URL cannot be used: {exc}") from None
    # A database of encoding SQL_ASCII would return texts as bytes.
    return {**arguments, "client_encoding": "utf8"}


def _parsed(text: str) -> URL:
    try:
        parsed = make_url(text.strip())
    except (ArgumentError, ValueError):
        if not set(text) & {":", "@"}:
            path = f"sqlite:///{Path(text.strip()).absolute()}"
            raise UsageInvalid(
                f"the database URL cannot be read. It should look like {ALLOWED}; for the file"
                f" {text.strip()!r} it is {path}"
            ) from None
        # Its text is not repeated: it may hold a password.
        raise UsageInvalid(
            f"the database URL cannot be read. It should look like {ALLOWED}. {_ENCODE}"
        ) from None
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return _resolve_server(parsed).set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return _resolve_file(parsed)
    raise UsageInvalid(f"database {parsed.drivername!r} is not supported. Use {ALLOWED}")


def _resolve_server(url: URL) -> URL:
    """Split password and host at the last @: a password with a bare @ is read in part as host."""
    if "@" in (url.database or ""):
        raise UsageInvalid(
            "the database URL has an @ behind the host, so it is not clear where its password "
            f"ends. {_ENCODE}"
        )
    rest, at, host = (url.host or "").rpartition("@")
    return url.set(password=f"{url.password}@{rest}", host=host) if at else url


def _resolve_file(url: URL) -> URL:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise UsageInvalid(
            "a SQLite store is a plain file, so that it outlives the process: "
            "sqlite:///path/to/file"
        )
    if unknown := set(url.query) - {UNSAFE}:
        raise UsageInvalid(
            f"SQLite URL option {sorted(unknown)[0]!r} is unknown; the only one is ?{UNSAFE}=1"
        )
    try:
        file = Path(url.database).expanduser().absolute()
    except RuntimeError:  # ~NAME without such a user
        raise UsageInvalid(
            f"store {url.database}: there is no user of that name with a home folder; "
            "write the whole path"
        ) from None
    if (kind := _other_kind(file)) is not None:
        raise UsageInvalid(
            f"store {file} is {kind}, and a SQLite store is a plain file: "
            "name another with SWEEP_DB or --db"
        )
    return url.set(drivername="sqlite", database=str(file))


def _other_kind(file: Path) -> str | None:
    """Return what a path names instead of a plain file; None: a plain file, nothing, or unknown."""
    try:
        mode = file.stat().st_mode
    except OSError as exc:
        return "a name that is too long" if exc.errno == errno.ENAMETOOLONG else None
    except ValueError:  # a NUL
        return "no name of a file"
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), None)


def display(url: URL) -> str:
    """The URL for messages: no password, no query."""
    if url.drivername == "sqlite":
        return f"sqlite:///{url.database}"
    user = f"{url.username}@" if url.username else ""
    port = f":{url.port}" if url.port else ""
    return f"{url.drivername.split('+')[0]}://{user}{url.host or ''}{port}/{url.database or ''}"


def display_login(url: URL, role: str, *, passfile: str | None) -> str:
    """The URL for another role of the same server, without secrets."""
    public = {
        name: value
        for name, value in url.query.items()
        if "pass" not in name.lower() and name not in _OF_ONE_ROLE
    }
    query = {**public, **({"passfile": passfile} if passfile is not None else {})}
    other = URL.create(
        "postgresql",
        username=role,
        host=url.host,
        port=url.port,
        database=url.database,
        query=query,
    )
    # libpq also takes a socket's folder with plain slashes, which reads better.
    return other.render_as_string(hide_password=False).replace("%2F", "/")


_OF_ONE_ROLE = frozenset({"user", "sslcert", "sslkey", "options", "application_name"})


def pgpass_line(url: URL, role: str, password: str) -> str:
    """A line of libpq's password file, for any host: a server may have several names."""
    database = url.database or "*"
    return ":".join(
        [
            "*",
            "*",
            *(
                text.replace("\\", "\\\\").replace(":", "\\:")
                for text in (database, role, password)
            ),
        ]
    )


def redact(message: str, url: URL) -> str:
    """A driver's message without secrets: drivers echo malformed passwords."""
    values = {"password": url.password or ""}
    for name, value in url.query.items():
        if "pass" in name.lower():
            texts = [value] if isinstance(value, str) else value
            values |= {f"{name}{number or ''}": text for number, text in enumerate(texts)}
    # Also the decoded values: a driver decodes a malformed password before it echoes it.
    values |= {f"{name}, decoded": unquote(value) for name, value in values.items()}
    return Secrets(values).redact(message)


def refuse_missing_folder(url: URL) -> None:
    """Raise UsageInvalid if more than the last folder of a SQLite file is missing.

    A mistyped path would otherwise create folders, and a new and empty store in them.
    """
    folder = Path(str(url.database)).parent
    if not folder.parent.is_dir():
        raise UsageInvalid(
            f"store {display(url)}: there is no folder {folder.parent}. Correct the path, or create"
            f" it: mkdir -p {folder}"
        )


def refuse_network_file_system(url: URL) -> None:
    """Raise StoreUnavailable for a file system that hosts share, unless the URL allows it."""
    assert url.database is not None
    folder = Path(url.database).parent
    while not folder.exists():
        folder = folder.parent
    name = NETWORK_FILE_SYSTEMS.get(file_system_magic(folder) or 0)
    if name and not is_unsafe(url):
        raise StoreUnavailable(
            f"{url.database} lies on {name}, where SQLite's locks and shared memory do not hold. "
            "Put the store on a local disk (sqlite:////tmp/... or SWEEP_DB), use PostgreSQL, or, "
            f"if only this host ever opens it, add ?{UNSAFE}=1"
        )


def is_unsafe(url: URL) -> bool:
    return url.query.get(UNSAFE) in ("1", "true", "yes")


def file_system_magic(folder: Path) -> int | None:
    """The type of the folder's file system by statfs(2); None: not known."""
    if not sys.platform.startswith("linux"):
        return None
    # struct statfs is 120 bytes; its first member is the type.
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), answer) != 0:
        return None
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF

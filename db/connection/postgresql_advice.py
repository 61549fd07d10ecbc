"""Advice on errors of PostgreSQL: one line with the missing right, the role and the fix in SQL.

Uses the SQLSTATE if the server gives one, else the English words of libpq.
"""

from __future__ import annotations

import re

from sqlalchemy import URL

from db.connection import url as urls
from orchestrator.core.errors import StoreUnavailable, SweepError, UsageInvalid

# SQLSTATEs of errors that a person must fix on the server; waiting does not help.
INSUFFICIENT_PRIVILEGE = "42501"
READ_ONLY = "25006"
GONE = frozenset({"42P01", "3F000", "42704", "3D000"})  # table, schema, object, database
FOR_THE_USER = GONE | {INSUFFICIENT_PRIVILEGE, READ_ONLY}

_ADVICE = (
    (
        "password authentication failed",
        "Correct the user in the URL, or the password in ~/.pgpass (of mode 600) or PGPASSWORD",
    ),
    ("no password supplied", "Put the password into ~/.pgpass (of mode 600) or PGPASSWORD"),
    ("no pg_hba.conf entry", "Let this host, user and database in: pg_hba.conf on the server"),
    ("Connection refused", "Is PostgreSQL running there, and are host and port of the URL right?"),
    (
        "timeout expired",
        "Is PostgreSQL running there, are host and port of the URL right, "
        "and does a firewall let them through?",
    ),
    ("resolve host", "Correct the host of the URL"),
    ("translate host name", "Correct the host of the URL"),
    (
        'role "[^"]*" does not exist',
        "Correct the user of the URL, or have it made on the server: createuser",
    ),
    (
        'database "[^"]*" does not exist',
        "Correct the database of the URL, or have it made on the server: createdb",
    ),
    (
        "is starting up|is shutting down|is in recovery mode",
        "It comes or goes: the same command again in a moment",
    ),
    (
        "too many c(onnections|lients)|connection slots are reserved",
        "End other clients, or raise max_connections on the server",
    ),
)
# Errors of connecting, without a SQLSTATE, in which waiting does not help.
_FINAL = re.compile(
    r"password authentication failed|no password supplied|no pg_hba\.conf entry"
    r'|role "[^"]*" does not exist|database "[^"]*" does not exist|permission denied for database'
    r"|is not permitted to log in|is not currently accepting connections"
)
# A mistake in the URL itself.
_WRONG_URL = re.compile(
    r"invalid connection option|bad value for|invalid integer value"
    r"|unrecognized configuration parameter|invalid value for parameter|invalid \w+ value"
    r"|invalid port number|could not match \d+ port numbers"
    r'|definition of service "[^"]*" not found|root certificate file "[^"]*" does not exist'
    r'|missing "="|invalid URI'
)


def is_final(message: str) -> bool:
    """True if a server that refused a connection will refuse the next one too."""
    return _FINAL.search(message) is not None or is_wrong_url(message)


def is_wrong_url(message: str) -> bool:
    """True if libpq could not read the URL's options."""
    return _WRONG_URL.search(message) is not None


def first_line(message: str) -> str:
    # psycopg writes a line for every address that it tried; advice uses all of them.
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"


def advised(
    message: str,
    *,
    sqlstate: str | None,
    url: URL,
    statement: str = "",
    role: str | None = None,
    schema: str | None = None,
) -> str:
    """The message and what to do.

    `statement` was refused; `role` and `schema` are those of the session, if they are known.
    """
    line = first_line(urls.redact(message, url))
    advice = _mended_by(
        message, sqlstate, url, statement, role or url.username or "your_role", schema or "public"
    )
    return f"{line}. {advice}" if advice else line


def refused(exc: Exception, url: URL, *, before: str = "") -> SweepError:
    """The error for a connection that could not be made; its line begins with `before`."""
    message = str(exc)
    advice = advised(message, sqlstate=getattr(exc, "sqlstate", None), url=url)
    line = f"{before}store {urls.display(url)}: {advice}"
    return UsageInvalid(line) if is_wrong_url(message) else StoreUnavailable(line)


def _mended_by(
    message: str, sqlstate: str | None, url: URL, statement: str, role: str, schema: str
) -> str:
    role, schema = quoted(role), quoted(schema)
    denied = re.search(
        r'permission denied for (schema|table|relation|view|sequence|database) "?([^"\n]+?)"?$',
        first_line(message),
    )
    if denied is not None:
        what, name = denied.groups()
        right, mend = _grant(what, name, statement, role, schema, url)
        return f"Role {role} lacks {right}: {mend}"
    if "is not permitted to log in" in message:
        return f"Role {role} lacks LOGIN: ALTER ROLE {role} LOGIN"
    if "must be owner of" in message:
        return (
            f"Role {role} does not own it. Run the command as the owner of the tables, or: "
            f"REASSIGN OWNED BY its_owner TO {role}"
        )
    if sqlstate == READ_ONLY or "in a read-only transaction" in message or "hot standby" in message:
        return (
            "Name the primary in the URL if this is a standby, else a role that may write:"
            f" role {role}, or the database, may be set to default_transaction_read_only"
        )
    if sqlstate == "3F000":
        return (
            f"Role {role} has no schema to make tables in: CREATE SCHEMA IF NOT EXISTS {schema}; "
            f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}"
        )
    if sqlstate == "42P01":
        return (
            f"A table of the store is gone, or role {role} lacks USAGE on its schema: "
            f"put a backup back, or GRANT USAGE ON SCHEMA {schema} TO {role}"
        )
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, message)), "")


def _grant(
    what: str, name: str, statement: str, role: str, schema: str, url: URL
) -> tuple[str, str]:
    """The right that is missing, and the SQL that gives it."""
    match what:
        case "schema":
            rights = (
                "USAGE, CREATE"
                if re.match(r"\s*(create|drop|alter)\b", statement, re.IGNORECASE)
                else "USAGE"
            )
            return (
                f"{rights} on schema {name}",
                f"GRANT {rights} ON SCHEMA {quoted(name)} TO {role}",
            )
        case "database":
            return (
                f"CONNECT on database {name}",
                f"GRANT CONNECT ON DATABASE {quoted(url.database or name)} TO {role}",
            )
        case "sequence":
            return (
                f"USAGE on sequence {name}",
                f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
            )
        case _:
            right = _right(statement)
            rights = "SELECT" if right == "SELECT" else "SELECT, INSERT, UPDATE, DELETE"
            return (
                f"{right} on {what} {name}",
                f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO {role}",
            )


def _right(statement: str) -> str:
    """The right that a statement of this program needs on its first table."""
    verb = re.match(r"\s*(insert|update|delete)\b", statement, re.IGNORECASE)
    locks = re.search(r"\bfor (no key |key )?(share|update)\b", statement, re.IGNORECASE)
    return verb[1].upper() if verb is not None else "UPDATE" if locks is not None else "SELECT"


def quoted(name: str) -> str:
    """A name for SQL, in double quotes if it needs them."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'

"""The PostgreSQL role that may only select: how it is made, and checks of the role of people.

The server enforces it: such a role changes nothing with any statement. This module does
not read statements.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from db import schema
from db.connection import postgresql_advice
from db.connection import url as urls
from db.connection.postgresql_advice import quoted
from db.sql.sql_text import NamesInStatement
from orchestrator.core.errors import StoreUnavailable, UsageInvalid

NAME = "sweep_reader"
_VERSION_TABLE = "alembic_version"

# Powers that a role that only selects must not have, each with the SQL that asks for it.
_POWERS = (
    ("SUPERUSER", "rolsuper"),
    ("CREATEROLE", "rolcreaterole"),
    ("CREATEDB", "rolcreatedb"),
    ("REPLICATION", "rolreplication"),
    ("BYPASSRLS", "rolbypassrls"),
    *(
        (
            f"membership in {role}",
            f"NOT rolsuper AND pg_has_role(rolname, to_regrole('{role}')::oid, 'MEMBER')",
        )
        for role in (
            "pg_read_server_files",
            "pg_write_server_files",
            "pg_execute_server_program",
            "pg_signal_backend",
            "pg_write_all_data",
            "pg_checkpoint",
            "pg_maintain",
            "pg_create_subscription",
        )
    ),
    (
        "a right to write tables of the store",
        "NOT rolsuper AND has_table_privilege(rolname, to_regclass('trial')::oid,"
        " 'INSERT, UPDATE, DELETE, TRUNCATE')",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """A role that may only select, as `grant` left it."""

    role: str
    is_new: bool
    schema: str
    num_relations: int
    # Rights of PUBLIC in this database, and how to revoke them.
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderRole:
    """The role of people's statements."""

    name: str
    # True if it logged in itself: then it has no powers to give up.
    is_own_login: bool


def role_of_statements(url: sa.URL) -> ReaderRole:
    """The role of people's statements. Raises as `readonly.query` does if they are refused."""
    reader = urls.reader_of(url)
    with connected(url, reader) as connection:
        settle(connection, is_reader=reader is not None)
        (role,) = connection.execute("SELECT current_user").fetchone()
    return ReaderRole(name=role, is_own_login=reader is not None)


@contextmanager
def connected(url: sa.URL, reader: sa.URL | None) -> Iterator[Any]:
    """A connection of psycopg as the reader, or without one as the store's own role."""
    psycopg = _driver()
    login = reader or url
    try:
        connection = psycopg.connect(**{**_CONNECTING, **urls.libpq_arguments(login)})
    except psycopg.Error as exc:
        variable = f"{urls.READER_VARIABLE}: " if reader is not None else ""
        raise postgresql_advice.refused(exc, login, before=variable) from None
    try:
        connection.read_only = True
        yield connection
    finally:
        connection.close()


_CONNECTING: dict[str, Any] = {"connect_timeout": 10, "application_name": "layout-sweep sql"}


def _driver() -> Any:
    """Import psycopg, an extra that SQLite does not need."""
    try:
        import psycopg
    except ModuleNotFoundError:
        raise StoreUnavailable(
            "the PostgreSQL driver is not installed: pip install '.[postgres]' in the cloned folder"
        ) from None
    return psycopg


def settle(connection: Any, *, is_reader: bool) -> None:
    """Let the session only read: refuse a reader with more powers, drop those of another role."""
    (_refuse_powers if is_reader else _drop_powers)(connection)


def powers(connection: Any, role: str | None = None) -> list[str]:
    """The powers of the session's role, or of another one, beyond selecting."""
    questions = ", ".join(f"({question})" for _, question in _POWERS)
    row = connection.execute(
        f"SELECT {questions} FROM pg_roles WHERE rolname = coalesce(%s, current_user)", (role,)
    ).fetchone()
    return [word for (word, _), has in zip(_POWERS, row or (), strict=row is not None) if has]


def _refuse_powers(connection: Any) -> None:
    """Raise UsageInvalid if the session's login may do more than select."""
    if found := powers(connection):
        (role,) = connection.execute("SELECT current_user").fetchone()
        raise UsageInvalid(
            f"role {role} of {urls.READER_VARIABLE} may do more than select: "
            f"it has {', '.join(found)}. Have one made that may not: sweep db grant-reader"
        )


def _drop_powers(connection: Any) -> None:
    """Become a role that can only read, if the session's role may.

    The session could take its powers back, so this is only a second guard after sql_text. The login
    of a reader needs neither.
    """
    who_is_there = _WHO_IS_THERE.format(to_set=_may_set(connection))
    is_reader, is_super, may_read_all, is_powerful = connection.execute(who_is_there).fetchone()
    if is_reader:
        connection.execute(f"SET LOCAL ROLE {NAME}")
    elif is_super or (is_powerful and may_read_all):
        connection.execute("SET LOCAL ROLE pg_read_all_data")
    elif is_powerful:
        raise UsageInvalid(
            "this database user may run programs on the server. "
            "Ask as one that may only read: sweep db grant-reader"
        )


def _may_set(connection: Any) -> str:
    """Return the privilege of `pg_has_role` that lets a session become a role.

    From PostgreSQL 16 on a member may be one without it: so is who created the role.
    """
    return "SET" if connection.info.server_version >= 16_00_00 else "MEMBER"


_WHO_IS_THERE = f"""
SELECT coalesce(
           (rolsuper OR pg_has_role(rolname, to_regrole('{NAME}')::oid, '{{to_set}}'))
           AND has_table_privilege(
               to_regrole('{NAME}')::oid, to_regclass('v_trial')::oid, 'SELECT'
           ),
           false
       ),
       rolsuper,
       pg_has_role(rolname, 'pg_read_all_data', '{{to_set}}'),
       pg_has_role(rolname, 'pg_write_server_files', 'MEMBER')
           OR pg_has_role(rolname, 'pg_execute_server_program', 'MEMBER')
FROM pg_roles WHERE rolname = current_user
"""


def refuse_hidden_calls(connection: Any, named: NamesInStatement) -> None:
    """Raise UsageInvalid for a name that calls a function of this database without parentheses.

    `row.name` calls a function that takes the row, a cast to a domain runs its checks, and some
    words of SQL may be functions too. PostgreSQL's own functions of this kind only compute.
    """
    names = {"all": sorted(named.all), "before_parenthesis": sorted(named.before_parenthesis)}
    found = connection.execute(_HIDDEN_CALLS, names).fetchone()
    if found is not None:
        raise UsageInvalid(
            f"{found[0]} is a {found[1]} of this database, which might run; it cannot be named here"
        )


_FIRST_OF_ITS_OWN = 16384  # object ids below are PostgreSQL's
_HIDDEN_CALLS = f"""
SELECT proname, 'function' FROM pg_proc LEFT JOIN pg_type ON pg_type.oid = proargtypes[0]
WHERE pg_proc.oid >= {_FIRST_OF_ITS_OWN} AND (
    proname = ANY(%(before_parenthesis)s)
    OR (proname = ANY(%(all)s) AND pronargs - pronargdefaults <= 1 AND typtype IN ('c', 'p', 'd'))
)
UNION ALL
SELECT typname, 'type' FROM pg_type
WHERE oid >= {_FIRST_OF_ITS_OWN} AND typname = ANY(%(all)s) AND typtype = 'd'
LIMIT 1
"""


def new_password() -> str:
    return secrets.token_urlsafe(24)


def exists(database_url: sa.URL, role: str) -> bool:
    """Return whether the server has such a role. Raises as `grant` does."""
    with _as_owner(database_url) as connection:
        return _has_role(connection, role)


def grant(database_url: sa.URL, role: str, password: str | None) -> Granted:
    """Make a role that may only connect and select, or reset its rights. None keeps its password.

    Raises UsageInvalid for a role with more rights, StoreUnavailable if our rights do not suffice.
    """
    with _as_owner(database_url) as connection:
        return _grant(connection, role, password)


@contextmanager
def _as_owner(database_url: sa.URL) -> Iterator[Any]:
    """One transaction of psycopg as the store's own role."""
    psycopg = _driver()
    try:
        with psycopg.connect(**{**_CONNECTING, **urls.libpq_arguments(database_url)}) as connection:
            yield connection
    except psycopg.errors.InsufficientPrivilege as exc:
        line = postgresql_advice.first_line(str(exc))
        who = quoted(database_url.username or "your_role")
        needs = (
            f"Role {who} lacks CREATEROLE, or does not own the tables: ALTER ROLE {who} CREATEROLE"
        )
        raise StoreUnavailable(f"store {urls.display(database_url)}: {line}. {needs}") from None
    except psycopg.Error as exc:
        raise postgresql_advice.refused(exc, database_url) from None


def _has_role(connection: Any, role: str) -> bool:
    found = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,))
    return found.fetchone() is not None


def _grant(connection: Any, role: str, password: str | None) -> Granted:
    (own_role, database, own_schema) = connection.execute(
        "SELECT current_user, current_database(), current_schema()"
    ).fetchone()
    relations = _relations(connection)
    if _VERSION_TABLE not in relations:
        raise UsageInvalid(
            f"database {database} holds no store yet; begin one with `sweep run FILE`, "
            "and then grant a reader"
        )
    is_new = not _has_role(connection, role)
    name, home = quoted(role), quoted(own_schema)
    if not is_new:
        _refuse_more_than_a_reader(connection, role, own_role)
    secret = "" if password is None else f" PASSWORD '{_scrambled(connection, role, password)}'"
    connection.execute(
        f"CREATE ROLE {name} LOGIN NOINHERIT{secret}"
        if is_new
        else f"ALTER ROLE {name} LOGIN NOINHERIT{secret}"
    )
    tables = ", ".join(f"{home}.{quoted(relation)}" for relation in relations)
    for statement in (
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {home} FROM {name}",
        f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA {home} FROM {name}",
        f"REVOKE ALL ON ALL ROUTINES IN SCHEMA {home} FROM {name}",
        f"REVOKE ALL ON SCHEMA {home} FROM {name}",
        f"REVOKE ALL ON DATABASE {quoted(database)} FROM {name}",
        f"GRANT CONNECT ON DATABASE {quoted(database)} TO {name}",
        f"GRANT USAGE ON SCHEMA {home} TO {name}",
        f"GRANT SELECT ON {tables} TO {name}",
        f"ALTER DEFAULT PRIVILEGES IN SCHEMA {home} GRANT SELECT ON TABLES TO {name}",
        f"ALTER ROLE {name} IN DATABASE {quoted(database)} SET default_transaction_read_only = on",
        f"ALTER ROLE {name} IN DATABASE {quoted(database)} SET search_path = {home}",
    ):
        connection.execute(statement)
    _let_become(connection, own_role, role)
    remarks = _what_everybody_may(connection, database, own_schema)
    return Granted(
        role=role,
        is_new=is_new,
        schema=own_schema,
        num_relations=len(relations),
        remarks=tuple(remarks),
    )


def _let_become(connection: Any, own_role: str, role: str) -> None:
    """Let the store's own role become the reader, as `sweep sql` does without a login of its own.

    Only who may grant the role can do this: its creator, or a superuser, who needs no grant.
    """
    may_set, may_grant = connection.execute(
        "SELECT rolsuper OR pg_has_role(rolname, %(role)s::name, %(to_set)s),"
        " pg_has_role(rolname, %(role)s::name, 'MEMBER WITH ADMIN OPTION') OR rolcreaterole"
        " FROM pg_roles WHERE rolname = current_user",
        {"role": role, "to_set": _may_set(connection)},
    ).fetchone()
    if may_grant and not may_set:
        without = " WITH INHERIT FALSE, SET TRUE" if _may_set(connection) == "SET" else ""
        connection.execute(f"GRANT {quoted(role)} TO {quoted(own_role)}{without}")


def _relations(connection: Any) -> list[str]:
    """The tables and views of the store that exist."""
    ours = [_VERSION_TABLE, *schema.metadata.tables, *schema.VIEWS]
    rows = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
        " AND relkind IN ('r', 'v') AND relname = ANY(%s)",
        (ours,),
    )
    return [name for (name,) in rows.fetchall()]


def _refuse_more_than_a_reader(connection: Any, role: str, own_role: str) -> None:
    if role == own_role:
        raise UsageInvalid(
            f"role {role} is the one that the store is written with. "
            "Name another: sweep db grant-reader --role NAME"
        )
    # A right to write is revoked later.
    found = [power for power in powers(connection, role) if not power.startswith("a right")]
    memberships = connection.execute(
        "SELECT roleid::regrole::text FROM pg_auth_members WHERE member = to_regrole(%s)::oid",
        (quoted(role),),
    ).fetchall()
    found += [
        f"membership in {name}" for (name,) in memberships if f"membership in {name}" not in found
    ]
    owned = connection.execute(
        "SELECT relname FROM pg_class WHERE relowner = to_regrole(%s)::oid LIMIT 1", (quoted(role),)
    ).fetchone()
    if owned is not None:
        found.append(f"tables of its own ({owned[0]})")
    if found:
        raise UsageInvalid(
            f"role {role} may do more than select: it has {', '.join(found)}. "
            "Name another: sweep db grant-reader --role NAME"
        )


def _scrambled(connection: Any, role: str, password: str) -> str:
    """The password's hash as the server keeps it, so that no log of statements has the password."""
    return str(
        connection.pgconn.encrypt_password(
            password.encode(), role.encode(), b"scram-sha-256"
        ).decode()
    )


def _what_everybody_may(connection: Any, database: str, own_schema: str) -> list[str]:
    """Remarks on rights of PUBLIC, which this role has too and others may rely on."""
    home = quoted(own_schema)
    may_make, may_make_temporary = connection.execute(
        "SELECT has_schema_privilege('public', %s, 'CREATE'),"
        " has_database_privilege('public', %s, 'TEMPORARY')",
        (own_schema, database),
    ).fetchone()
    definers = connection.execute(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE oid >= %s AND prosecdef"
        " AND has_function_privilege('public', oid, 'EXECUTE')",
        (_FIRST_OF_ITS_OWN,),
    ).fetchall()
    remarks = []
    if may_make:
        remarks.append(
            f"Everybody may make tables in schema {own_schema}; "
            f"to end that: REVOKE CREATE ON SCHEMA {home} FROM PUBLIC"
        )
    if may_make_temporary:
        remarks.append(
            "Everybody may make temporary tables; "
            f"to end that: REVOKE TEMPORARY ON DATABASE {quoted(database)} FROM PUBLIC"
        )
    for (function,) in definers:
        remarks.append(
            f"Everybody may call {function}, which runs with its owner's rights; "
            f"to end that: REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC"
        )
    return remarks

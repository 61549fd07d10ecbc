"""The rights that a store needs on PostgreSQL, asked of the server before anything is written."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from db.connection.postgresql_advice import quoted
from orchestrator.core.errors import StoreUnavailable

_OF_SCHEMA = sa.text(
    "SELECT wanted FROM unnest(CAST(:rights AS text[])) AS wanted"
    " WHERE NOT has_schema_privilege(CAST(:schema AS text), wanted)"
)
_OF_TABLES = sa.text(
    "SELECT wanted, relname FROM pg_class, unnest(CAST(:rights AS text[])) AS wanted"
    " WHERE relnamespace = current_schema()::regnamespace AND relname = ANY(:tables)"
    " AND NOT has_table_privilege(oid, wanted) ORDER BY relname, wanted LIMIT 1"
)


def refuse_missing(connection: sa.Connection, tables: Collection[str]) -> None:
    """Raise StoreUnavailable for a right that a writer lacks, with the SQL that grants it.

    `tables`: of the store; none: they are still to be made.
    """
    role, found, is_read_only = connection.exec_driver_sql(
        "SELECT current_user, current_schema(),"
        " pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean"
    ).one()
    schema = found or "public"
    if is_read_only:
        raise StoreUnavailable(
            f"role {quoted(role)} can only read here: name the primary in the URL if this is a"
            " standby; else the role or the database is set to default_transaction_read_only"
        )
    if not tables:
        wanted = {"rights": ["USAGE", "CREATE"], "schema": quoted(schema)}
        lacking = connection.execute(_OF_SCHEMA, wanted).scalars().all()
        if lacking:
            raise StoreUnavailable(
                f"role {quoted(role)} lacks {' and '.join(lacking)} on schema {schema}:"
                f" GRANT USAGE, CREATE ON SCHEMA {quoted(schema)} TO {quoted(role)}"
            )
        return
    wanted = {"rights": ["SELECT", "INSERT", "UPDATE"], "tables": list(tables)}
    first = connection.execute(_OF_TABLES, wanted).first()
    if first is not None:
        raise StoreUnavailable(
            f"role {quoted(role)} lacks {first.wanted} on table {first.relname}: GRANT SELECT,"
            f" INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {quoted(schema)} TO {quoted(role)}"
        )

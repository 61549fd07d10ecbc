"""Runs the migrations in the transaction that db/migrate.py gives."""

from __future__ import annotations

from alembic import context

from db.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
    compare_type=True,
)
context.run_migrations()

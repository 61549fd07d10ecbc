"""A next version of the schema for tests of upgrades: one more column, which an upgrade fills."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from db import migrate, schema
from db.connection import url as urls

VERSION = "9000"
_MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{VERSION}", "{schema.SCHEMA_VERSION}"
branch_labels = depends_on = None


def upgrade():
    op.add_column("attempt", sa.Column("of_next_version", sa.Integer()))
    op.execute("UPDATE attempt SET of_next_version = number")
'''


@contextmanager
def in_force(folder: Path) -> Iterator[None]:
    """Have this process know the next version. `folder` is for a copy of the migrations."""
    before = migrate.MIGRATIONS, schema.SCHEMA_VERSION
    copy = folder / "migrations"
    shutil.copytree(migrate.MIGRATIONS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "versions" / "v9000_next.py").write_text(_MIGRATION)
    migrate.MIGRATIONS, schema.SCHEMA_VERSION = copy, VERSION
    try:
        yield
    finally:
        migrate.MIGRATIONS, schema.SCHEMA_VERSION = before
        shutil.rmtree(copy)


def take_back(url: str) -> None:
    """Bring a store of the next version back to this one, which only tests do."""
    engine = sa.create_engine(urls.resolve(url))
    with engine.begin() as connection:
        version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
        if version == VERSION:
            connection.exec_driver_sql("ALTER TABLE attempt DROP COLUMN of_next_version")
            connection.execute(
                sa.text("UPDATE alembic_version SET version_num = :version"),
                {"version": schema.FIRST_VERSION},
            )
    engine.dispose()

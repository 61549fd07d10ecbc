"""The first tables: all that db/schema.py names. The first release freezes them; every later change is a migration of its own."""

from __future__ import annotations

from alembic import op
from sqlalchemy.schema import CreateIndex, CreateTable

from db.schema import metadata

revision = "0008"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Without the columns' comments, each of which would be a statement: db/migrate.py writes all of them with one.
    connection = op.get_bind()
    for table in metadata.sorted_tables:
        connection.execute(CreateTable(table))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            connection.execute(CreateIndex(index))


def downgrade() -> None:
    metadata.drop_all(op.get_bind(), checkfirst=False)

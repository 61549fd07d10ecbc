"""The first tables: all of db/schema.py.

The first release freezes them; from then on each change has its own migration.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy.schema import CreateIndex, CreateTable

from db.schema import metadata

revision = "0015"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Leaves out the columns' comments, which would be a statement each: db/migrate.py writes all
    # of them with one.
    connection = op.get_bind()
    for table in metadata.sorted_tables:
        connection.execute(CreateTable(table))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            connection.execute(CreateIndex(index))

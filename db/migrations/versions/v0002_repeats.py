"""Several measurements of one trial count together, and options of the workload may be a part of its layout."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("trial", sa.Column("num_measurements", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("trial", sa.Column("options", JSON))
    op.add_column("attempt", sa.Column("pooled", sa.Boolean(), server_default=sa.false(), nullable=False))
    counting = "state = 'measured' AND NOT superseded"
    op.execute(f"UPDATE attempt SET pooled = true WHERE {counting}")
    op.execute(f"UPDATE trial SET num_measurements = 1 WHERE id IN (SELECT trial_id FROM attempt WHERE {counting})")


def downgrade() -> None:
    op.drop_column("attempt", "pooled")
    op.drop_column("trial", "options")
    op.drop_column("trial", "num_measurements")

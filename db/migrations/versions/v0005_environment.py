"""An attempt keeps the environment by which its ranks were told how to communicate; what of it changes numbers is in the fingerprint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("attempt", sa.Column("environment", JSON))
    op.add_column("fingerprint", sa.Column("settings", JSON))


def downgrade() -> None:
    op.drop_column("fingerprint", "settings")
    op.drop_column("attempt", "environment")

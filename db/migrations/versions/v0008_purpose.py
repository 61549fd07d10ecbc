"""An attempt says why it was made, and when it was measured by the clock that its sweep goes by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempt", sa.Column("purpose", sa.Text()))
    op.add_column("attempt", sa.Column("measured_at", sa.DateTime()))


def downgrade() -> None:
    op.drop_column("attempt", "measured_at")
    op.drop_column("attempt", "purpose")

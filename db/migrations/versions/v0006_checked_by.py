"""A look at a node says which orchestrator of the sweep had it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node_check", sa.Column("epoch", sa.BigInteger))


def downgrade() -> None:
    op.drop_column("node_check", "epoch")

"""The view of GPU-seconds tells cancelled attempts from failed ones: no table changes, and the views are made anew by every migration."""

from __future__ import annotations

revision = "0011"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass

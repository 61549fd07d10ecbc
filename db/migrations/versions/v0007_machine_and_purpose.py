"""An attempt says why it was made, when it was measured by the clock that its sweep goes by, and what its node was busy with meanwhile."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

LOAD = (
    "cpu_cores",
    "own_cpu_cores",
    "sweep_cpu_cores",
    "others_cpu_cores",
    "gpu_clock_ratio",
    "gpu_throttled_fraction",
    "gpu_temperature_celsius",
)


def upgrade() -> None:
    op.add_column("attempt", sa.Column("purpose", sa.Text()))
    op.add_column("attempt", sa.Column("measured_at", sa.DateTime()))
    for name in LOAD:
        op.add_column("attempt", sa.Column(name, sa.Double()))
    op.add_column("attempt", sa.Column("foreign_gpu_processes", sa.Integer()))
    op.add_column("attempt", sa.Column("gpu_throttle_reasons", sa.Text()))


def downgrade() -> None:
    for name in ("gpu_throttle_reasons", "foreign_gpu_processes", *reversed(LOAD), "measured_at", "purpose"):
        op.drop_column("attempt", name)

"""What nodes said of themselves, on which of them nothing is placed, and how fast their links are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "node_check",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("is_fit", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.Text()) for name in ("failed", "host", "boot_id", "kernel", "python", "torch", "cuda", "nccl", "driver")),
        sa.Column("device_name", sa.Text()),
        sa.Column("num_gpus", sa.Integer()),
        sa.Column("num_cores", sa.Integer()),
        sa.Column("matmul_flops", sa.Double()),
        sa.Column("free_disk_bytes", sa.BigInteger()),
        sa.Column("clock_offset_seconds", sa.Double()),
        sa.Column("checks", JSON),
        sa.Column("facts", JSON),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_node_check_sweep_id_sweep"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_check")),
    )
    op.create_index("ix_node_check_sweep_id_node", "node_check", ["sweep_id", "node"])
    op.create_table(
        "node_bench",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("until", sa.DateTime()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("is_remeasured", sa.Boolean(), nullable=False),
        sa.Column("evidence", JSON),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_node_bench_sweep_id_sweep"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node_bench")),
    )
    still = sa.text("until IS NULL")
    op.create_index("uq_node_bench_open", "node_bench", ["sweep_id", "node"], unique=True, sqlite_where=still, postgresql_where=still)
    op.create_table(
        "link",
        sa.Column("id", ID, nullable=False),
        sa.Column("run_token", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("device_name", sa.Text()),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("collective", sa.Text(), nullable=False),
        sa.Column("num_ranks", sa.Integer(), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("message_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_calls", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("algorithm_bytes_per_second", sa.Double(), nullable=False),
        sa.Column("bus_bytes_per_second", sa.Double(), nullable=False),
        sa.Column("nodes", JSON),
        sa.Column("torch", sa.Text()),
        sa.Column("nccl", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_link")),
    )
    op.create_index("ix_link_device_name", "link", ["device_name"])


def downgrade() -> None:
    op.drop_table("link")
    op.drop_table("node_bench")
    op.drop_table("node_check")

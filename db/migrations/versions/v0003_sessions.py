"""What orchestrators held, call by call, and how much of an attempt went into its steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
# Of what was measured before: the timed steps are there, as evidence; those before them are not.
SAMPLES = {"sqlite": "json_each(step_seconds)", "postgresql": "jsonb_array_elements_text(step_seconds) AS each(value)"}
LEAST = {"sqlite": "min", "postgresql": "least"}


def upgrade() -> None:
    op.create_table(
        "session",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime()),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("price_per_gpu_hour", sa.Double()),
        sa.Column("held_gpu_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("idle_gpu_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("capacity_gpu_seconds", sa.Double()),
        sa.Column("stop_reasons", JSON),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_session_sweep_id_sweep"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_session")),
        sa.UniqueConstraint("sweep_id", "epoch", name=op.f("uq_session_sweep_id_epoch")),
    )
    op.add_column("attempt", sa.Column("timed_seconds", sa.Double()))
    op.add_column("attempt", sa.Column("warmup_seconds", sa.Double()))
    dialect = op.get_bind().dialect.name
    samples = f"SELECT sum(CAST(value AS DOUBLE PRECISION)) FROM measurement, {SAMPLES[dialect]} WHERE attempt_id = attempt.id"
    held = "SELECT attempt.gpu_seconds / num_gpus FROM trial JOIN cell ON cell.id = trial.cell_id WHERE trial.id = attempt.trial_id"
    op.execute(
        f"UPDATE attempt SET timed_seconds = {LEAST[dialect]}(({samples}), ({held})) WHERE state = 'measured' AND gpu_seconds IS NOT NULL"
    )


def downgrade() -> None:
    op.drop_column("attempt", "warmup_seconds")
    op.drop_column("attempt", "timed_seconds")
    op.drop_table("session")

"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "fingerprint",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("orchestrator_version", sa.Text(), nullable=False),
        sa.Column("git_sha", sa.Text()),
        sa.Column("dirty_diff_digest", sa.Text()),
        sa.Column("python", sa.Text()),
        sa.Column("torch", sa.Text()),
        sa.Column("cuda", sa.Text()),
        sa.Column("nccl", sa.Text()),
        sa.Column("driver", sa.Text()),
        sa.Column("device_name", sa.Text()),
        sa.Column("first_seen_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_fingerprint")),
    )
    op.create_table(
        "model",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("num_layers", sa.Integer(), nullable=False),
        sa.Column("hidden_size", sa.Integer(), nullable=False),
        sa.Column("num_attention_heads", sa.Integer(), nullable=False),
        sa.Column("num_key_value_heads", sa.Integer(), nullable=False),
        sa.Column("ffn_hidden_size", sa.Integer(), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("tied_embeddings", sa.Boolean(), nullable=False),
        sa.Column("num_parameters", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_model")),
    )
    op.create_table(
        "sweep",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run_token", sa.Text(), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("conditions", JSON, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("owner_host", sa.Text()),
        sa.Column("owner_pid", sa.BigInteger()),
        sa.Column("owner_namespace", sa.Text()),
        sa.Column("owner_token", sa.Text()),
        sa.Column("owner_since", sa.DateTime()),
        sa.Column("owner_epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_until", sa.DateTime(), nullable=False),
        sa.Column("stop_requested", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweep")),
        sa.UniqueConstraint("name", name=op.f("uq_sweep_name")),
    )
    op.create_table(
        "cell",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("model_digest", sa.Text(), nullable=False),
        sa.Column("model_name", sa.Text(), nullable=False),
        sa.Column("num_gpus", sa.Integer(), nullable=False),
        sa.Column("sequence_length", sa.Integer(), nullable=False),
        sa.Column("global_batch_size", sa.Integer(), nullable=False),
        sa.Column("fingerprint_digest", sa.Text()),
        sa.ForeignKeyConstraint(["fingerprint_digest"], ["fingerprint.digest"], name=op.f("fk_cell_fingerprint_digest_fingerprint")),
        sa.ForeignKeyConstraint(["model_digest"], ["model.digest"], name=op.f("fk_cell_model_digest_model")),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_cell_sweep_id_sweep"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cell")),
        sa.UniqueConstraint(
            "sweep_id",
            "model_digest",
            "num_gpus",
            "sequence_length",
            "global_batch_size",
            name=op.f("uq_cell_sweep_id_model_digest_num_gpus_sequence_length_global_batch_size"),
        ),
    )
    op.create_table(
        "trial",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID, nullable=False),
        sa.Column("cell_id", ID, nullable=False),
        sa.Column("layout_key", sa.Text(), nullable=False),
        sa.Column("data_parallel_size", sa.Integer(), nullable=False),
        sa.Column("tensor_parallel_size", sa.Integer(), nullable=False),
        sa.Column("pipeline_parallel_size", sa.Integer(), nullable=False),
        sa.Column("context_parallel_size", sa.Integer(), nullable=False),
        sa.Column("micro_batch_size", sa.Integer(), nullable=False),
        sa.Column("grad_accum_steps", sa.Integer(), nullable=False),
        sa.Column("recompute", sa.Text(), nullable=False),
        sa.Column("recompute_policy", sa.Text()),
        sa.Column("recompute_layers", sa.Integer()),
        sa.Column("zero_stage", sa.Integer(), nullable=False),
        sa.Column("precision", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("why", sa.Text()),
        sa.Column("predicted_tokens_per_second_per_gpu", sa.Double()),
        sa.Column("predicted_memory_bytes", sa.BigInteger()),
        sa.Column("condemned_by", ID),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_trial_cell_id_cell"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["condemned_by"], ["trial.id"], name=op.f("fk_trial_condemned_by_trial"), ondelete="SET NULL"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_trial_sweep_id_sweep"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint("cell_id", "layout_key", name=op.f("uq_trial_cell_id_layout_key")),
    )
    op.create_index("ix_trial_sweep_id_cell_id_state", "trial", ["sweep_id", "cell_id", "state"], unique=False)
    op.create_table(
        "attempt",
        sa.Column("id", ID, nullable=False),
        sa.Column("trial_id", ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("superseded", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime()),
        sa.Column("nodes", JSON),
        sa.Column("shared_nodes", sa.Boolean()),
        sa.Column("start_seconds", sa.Double()),
        sa.Column("rendezvous_seconds", sa.Double()),
        sa.Column("first_step_seconds", sa.Double()),
        sa.Column("steady_seconds", sa.Double()),
        sa.Column("teardown_seconds", sa.Double()),
        sa.Column("gpu_seconds", sa.Double()),
        sa.Column("fingerprint_digest", sa.Text()),
        sa.Column("processes_killed", sa.Integer()),
        sa.Column("failure_kind", sa.Text()),
        sa.Column("failure_rank", sa.Integer()),
        sa.Column("failure_node", sa.Text()),
        sa.Column("failure_phase", sa.Text()),
        sa.Column("failure_step", sa.Integer()),
        sa.Column("failure_signal", sa.Integer()),
        sa.Column("failure_exit_code", sa.Integer()),
        sa.Column("failure_message", sa.Text()),
        sa.Column("failure_log_path", sa.Text()),
        sa.Column("failure_peak_memory_bytes", sa.BigInteger()),
        sa.Column("failure_device_memory_bytes", sa.BigInteger()),
        sa.Column("failure_evidence", sa.Text()),
        sa.Column("failure_log_tail", sa.Text()),
        sa.ForeignKeyConstraint(["fingerprint_digest"], ["fingerprint.digest"], name=op.f("fk_attempt_fingerprint_digest_fingerprint")),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_attempt_trial_id_trial"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempt")),
        sa.UniqueConstraint("trial_id", "number", name=op.f("uq_attempt_trial_id_number")),
    )
    op.create_index(
        "ix_attempt_running",
        "attempt",
        ["trial_id"],
        unique=False,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "uq_attempt_counting",
        "attempt",
        ["trial_id"],
        unique=True,
        sqlite_where=sa.text("state = 'measured' AND NOT superseded"),
        postgresql_where=sa.text("state = 'measured' AND NOT superseded"),
    )
    op.create_table(
        "event",
        sa.Column("id", ID, nullable=False),
        sa.Column("sweep_id", ID, nullable=False),
        sa.Column("trial_id", ID),
        sa.Column("attempt", sa.Integer()),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("from_state", sa.Text()),
        sa.Column("to_state", sa.Text()),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("change_id", sa.Text()),
        sa.Column("detail", JSON),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_event_sweep_id_sweep"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["trial_id"], ["trial.id"], name=op.f("fk_event_trial_id_trial"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index("ix_event_sweep_id", "event", ["sweep_id"], unique=False)
    op.create_index("ix_event_trial_id", "event", ["trial_id"], unique=False)
    op.create_table(
        "measurement",
        sa.Column("attempt_id", ID, autoincrement=False, nullable=False),
        sa.Column("tokens_per_second", sa.Double(), nullable=False),
        sa.Column("tokens_per_second_per_gpu", sa.Double(), nullable=False),
        sa.Column("step_seconds_median", sa.Double(), nullable=False),
        sa.Column("step_seconds_iqr", sa.Double(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("relative_confidence", sa.Double()),
        sa.Column("confident", sa.Boolean(), nullable=False),
        sa.Column("mfu", sa.Double()),
        sa.Column("hfu", sa.Double()),
        sa.Column("mfu_formula", sa.Text(), nullable=False),
        sa.Column("peak_flops", sa.Double()),
        sa.Column("peak_flops_source", sa.Text()),
        sa.Column("peak_memory_allocated_bytes", sa.BigInteger()),
        sa.Column("peak_memory_reserved_bytes", sa.BigInteger()),
        sa.Column("device_memory_bytes", sa.BigInteger()),
        sa.Column("allocator_retries", sa.BigInteger()),
        sa.Column("thrashing", sa.Boolean(), nullable=False),
        sa.Column("loss_first", sa.Double()),
        sa.Column("loss_last", sa.Double()),
        sa.Column("gpu_utilisation", sa.Double()),
        sa.Column("gpu_power_watts", sa.Double()),
        sa.Column("memory_by_part", JSON),
        sa.Column("step_seconds", JSON, nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempt.id"], name=op.f("fk_measurement_attempt_id_attempt"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_measurement")),
    )


def downgrade() -> None:
    for table in ("measurement", "event", "attempt", "trial", "cell", "sweep", "model", "fingerprint"):
        op.drop_table(table)

"""The tables: one row per sweep, session, cell, trial, attempt and measurement, and an append-only log of what happened.

Every layout field and headline number is a column of its own; JSON is only for evidence. Unknown is NULL. Times are UTC, by the database's clock.
"""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

SCHEMA_VERSION = "0007"  # the newest migration in migrations/versions


class SweepState(StrEnum):
    WAITING = "waiting"  # nobody has worked on it yet
    RUNNING = "running"  # an orchestrator holds it, or died while it did
    STOPPED = "stopped"  # left with work still to do
    FINISHED = "finished"


class AttemptState(StrEnum):
    RUNNING = "running"
    MEASURED = "measured"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    REQUEUED = "requeued"  # the machine's fault, or ended on request; the trial waits again
    LOST = "lost"  # its orchestrator died


class BenchReason(StrEnum):
    """Why nothing is placed on a node."""

    SLOW = "slow"  # plainly slower than the others: what was measured there is measured again
    FAULTS = "faults"  # several trials failed there by the machine's fault
    ASKED = "asked"  # by a person


class StopRequest(StrEnum):
    """What a person asks of a running orchestrator, from another process."""

    DRAIN = "drain"
    CANCEL = "cancel"


class UtcTime(TypeDecorator[dt.datetime]):
    """A point in time. Stored without a zone, in UTC; read as an aware datetime."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        return None if value is None else value.astimezone(dt.UTC).replace(tzinfo=None)

    def process_result_value(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        return None if value is None else value.replace(tzinfo=dt.UTC)


class now(FunctionElement[dt.datetime]):
    """The database's clock, in UTC; with an argument, so many seconds later. No other clock decides about a lease."""

    type = UtcTime()
    inherit_cache = True
    name = "now"


# strftime, because unixepoch('subsec') is NULL on SQLite before 3.42: a lease would never end.
@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds} || ' seconds')" if seconds else "strftime('%Y-%m-%d %H:%M:%f', 'now')"


# clock_timestamp, because now() stands still within a transaction, which may have waited for a lock.
@compiles(now, "postgresql")
def _now_postgresql(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    clock = "(clock_timestamp() AT TIME ZONE 'utc')"
    return f"({clock} + make_interval(secs => {seconds}))" if seconds else clock


Id = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by itself only where the type is INTEGER
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")  # None is NULL, not the JSON null

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sweep = Table(
    "sweep",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("run_token", Text, nullable=False),  # random, made with the row: trial ids begin at 1 in every store, folders on disk are shared
    Column("spec_json", Text, nullable=False),
    Column("conditions", Json, nullable=False),  # what makes numbers comparable
    Column("state", Text, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("owner_host", Text),  # NULL: nobody holds it
    Column("owner_pid", BigInteger),
    Column("owner_namespace", Text),  # in which the pid means anything
    Column("owner_token", Text),  # one per opened store: recognises its own lease when a commit's answer was lost
    Column("owner_since", UtcTime),
    Column("owner_epoch", BigInteger, nullable=False, server_default=text("0")),  # the fencing token: grows with each owner
    Column("lease_until", UtcTime, nullable=False),
    Column("stop_requested", Text),
)

model = Table(
    "model",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("name", Text, nullable=False),  # as first seen; the cell has the name that its sweep gives
    Column("num_layers", Integer, nullable=False),
    Column("hidden_size", Integer, nullable=False),
    Column("num_attention_heads", Integer, nullable=False),
    Column("num_key_value_heads", Integer, nullable=False),
    Column("ffn_hidden_size", Integer, nullable=False),
    Column("vocab_size", Integer, nullable=False),
    Column("tied_embeddings", Boolean, nullable=False),
    Column("num_parameters", BigInteger, nullable=False),
)

fingerprint = Table(
    "fingerprint",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("orchestrator_version", Text, nullable=False),
    Column("git_sha", Text),
    Column("dirty_diff_digest", Text),
    Column("python", Text),
    Column("torch", Text),
    Column("cuda", Text),
    Column("nccl", Text),
    Column("driver", Text),
    Column("device_name", Text),
    Column("settings", Json),  # name -> value of the environment's settings that make numbers incomparable; NULL: none
    Column("first_seen_at", UtcTime, nullable=False),
)

session = Table(
    "session",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),  # with every renewal of the lease
    Column("ended_at", UtcTime),  # of one that died: its last sign of life
    Column("num_gpus", Integer, nullable=False),  # slots of the cluster
    Column("price_per_gpu_hour", Double),
    Column("held_gpu_seconds", Double, nullable=False, server_default=text("0")),  # by its gangs until seen_at
    Column("idle_gpu_seconds", Double, nullable=False, server_default=text("0")),
    Column("capacity_gpu_seconds", Double),
    Column("stop_reasons", Json),  # why each of its cells has had enough, each reason once
    UniqueConstraint("sweep_id", "epoch"),
)

cell = Table(
    "cell",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), nullable=False),
    Column("key", Text, nullable=False),
    Column("model_digest", Text, ForeignKey("model.digest"), nullable=False),
    Column("model_name", Text, nullable=False),
    Column("num_gpus", Integer, nullable=False),
    Column("sequence_length", Integer, nullable=False),
    Column("global_batch_size", Integer, nullable=False),
    Column("fingerprint_digest", Text, ForeignKey("fingerprint.digest")),  # of the newest measurement: the current one
    UniqueConstraint("sweep_id", "model_digest", "num_gpus", "sequence_length", "global_batch_size"),
)

trial = Table(
    "trial",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), nullable=False),
    Column("cell_id", Id, ForeignKey("cell.id", ondelete="CASCADE"), nullable=False),
    Column("layout_key", Text, nullable=False),
    Column("data_parallel_size", Integer, nullable=False),
    Column("tensor_parallel_size", Integer, nullable=False),
    Column("pipeline_parallel_size", Integer, nullable=False),
    Column("context_parallel_size", Integer, nullable=False),
    Column("micro_batch_size", Integer, nullable=False),
    Column("grad_accum_steps", Integer, nullable=False),
    Column("recompute", Text, nullable=False),
    Column("recompute_policy", Text),
    Column("recompute_layers", Integer),  # NULL: all of them, where recompute is not none
    Column("zero_stage", Integer, nullable=False),
    Column("precision", Text, nullable=False),
    Column("options", Json),  # name -> value of the workload's options that are axes; NULL: none
    Column("state", Text, nullable=False),
    Column("num_attempts", Integer, nullable=False, server_default=text("0")),
    Column("num_measurements", Integer, nullable=False, server_default=text("0")),  # that its numbers are the median of
    Column("why", Text),  # the searcher's one line: why this layout, now
    Column("predicted_tokens_per_second_per_gpu", Double),
    Column("predicted_memory_bytes", BigInteger),
    Column("condemned_by", Id, ForeignKey("trial.id", ondelete="SET NULL")),  # the trial that proves a PRUNED one infeasible
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    UniqueConstraint("cell_id", "layout_key"),
    Index("ix_trial_sweep_id_cell_id_state", "sweep_id", "cell_id", "state"),
)

attempt = Table(
    "attempt",
    metadata,
    Column("id", Id, primary_key=True),
    Column("trial_id", Id, ForeignKey("trial.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("superseded", Boolean, nullable=False, server_default=false()),  # kept, but its numbers are not the trial's
    Column("pooled", Boolean, nullable=False, server_default=false()),  # one of the measurements that the trial's numbers are the median of
    Column("purpose", Text),  # why it was made; NULL: before that was noted
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    Column("measured_at", UtcTime),  # by the clock that the sweep goes by, which may be simulated; NULL: as ended_at
    Column("nodes", Json),
    Column("shared_nodes", Boolean),  # True: other gangs ran on its nodes meanwhile
    Column("start_seconds", Double),
    Column("rendezvous_seconds", Double),
    Column("first_step_seconds", Double),
    Column("steady_seconds", Double),
    Column("teardown_seconds", Double),
    Column("gpu_seconds", Double),  # held, used or not
    Column("timed_seconds", Double),  # of it, by each GPU, in timed steps
    Column("warmup_seconds", Double),  # and in the steps before them
    Column("fingerprint_digest", Text, ForeignKey("fingerprint.digest")),
    Column("processes_killed", Integer),
    Column("environment", Json),  # by which ranks were told how to communicate: name -> value, or -> value by node; NULL: by nothing
    # What its node was busy with while steps were timed; of several nodes the one where others disturbed most. CPU in cores. NULL: not known.
    Column("cpu_cores", Double),  # that it could use
    Column("own_cpu_cores", Double),
    Column("sweep_cpu_cores", Double),  # other attempts of the sweep, its orchestrator and the Ray that it started
    Column("others_cpu_cores", Double),
    Column("foreign_gpu_processes", Integer),
    Column("gpu_clock_ratio", Double),
    Column("gpu_throttled_fraction", Double),
    Column("gpu_throttle_reasons", Text),  # names with commas between them
    Column("gpu_temperature_celsius", Double),
    Column("failure_kind", Text),
    Column("failure_rank", Integer),
    Column("failure_node", Text),
    Column("failure_phase", Text),
    Column("failure_step", Integer),
    Column("failure_signal", Integer),
    Column("failure_exit_code", Integer),
    Column("failure_message", Text),
    Column("failure_log_path", Text),
    Column("failure_peak_memory_bytes", BigInteger),  # allocated when it failed, by the rank that failed
    Column("failure_device_memory_bytes", BigInteger),
    Column("failure_evidence", Text),
    Column("failure_log_tail", Text),  # last: SQLite reads the columns before a long one without it
    UniqueConstraint("trial_id", "number"),
    # At most one attempt of a trial counts, whoever writes.
    Index(
        "uq_attempt_counting",
        "trial_id",
        unique=True,
        sqlite_where=text("state = 'measured' AND NOT superseded"),
        postgresql_where=text("state = 'measured' AND NOT superseded"),
    ),
    Index("ix_attempt_running", "trial_id", sqlite_where=text("state = 'running'"), postgresql_where=text("state = 'running'")),
)

measurement = Table(
    "measurement",
    metadata,
    Column("attempt_id", Id, ForeignKey("attempt.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("tokens_per_second", Double, nullable=False),
    Column("tokens_per_second_per_gpu", Double, nullable=False),
    Column("step_seconds_median", Double, nullable=False),
    Column("step_seconds_iqr", Double, nullable=False),
    Column("num_steps", Integer, nullable=False),
    Column("relative_confidence", Double),
    Column("confident", Boolean, nullable=False),
    Column("mfu", Double),
    Column("hfu", Double),
    Column("mfu_formula", Text, nullable=False),
    Column("peak_flops", Double),
    Column("peak_flops_source", Text),
    Column("peak_memory_allocated_bytes", BigInteger),
    Column("peak_memory_reserved_bytes", BigInteger),
    Column("device_memory_bytes", BigInteger),
    Column("allocator_retries", BigInteger),
    Column("thrashing", Boolean, nullable=False),
    Column("loss_first", Double),
    Column("loss_last", Double),
    Column("gpu_utilisation", Double),
    Column("gpu_power_watts", Double),
    Column("memory_by_part", Json),
    Column("step_seconds", Json, nullable=False),  # every sample: the evidence
)

event = Table(
    "event",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), nullable=False),
    Column("trial_id", Id, ForeignKey("trial.id", ondelete="CASCADE")),
    Column("attempt", Integer),
    Column("at", UtcTime, nullable=False),
    Column("event", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text),
    Column("epoch", BigInteger, nullable=False),
    Column("change_id", Text),  # one per write: tells whether a commit whose answer was lost has happened
    Column("detail", Json),
    Index("ix_event_sweep_id", "sweep_id"),
    Index("ix_event_trial_id", "trial_id"),
)

node_check = Table(
    "node_check",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE")),  # NULL: asked for by `sweep doctor`
    Column("epoch", BigInteger),  # of the orchestrator that had it looked at; NULL: none had
    Column("at", UtcTime, nullable=False),
    Column("node", Text, nullable=False),
    Column("is_fit", Boolean, nullable=False),
    Column("failed", Text),  # why it is not
    Column("host", Text),
    Column("boot_id", Text),
    Column("kernel", Text),
    Column("python", Text),
    Column("torch", Text),
    Column("cuda", Text),
    Column("nccl", Text),
    Column("driver", Text),
    Column("device_name", Text),
    Column("num_gpus", Integer),
    Column("num_cores", Integer),
    Column("matmul_flops", Double),  # of its slowest device
    Column("free_disk_bytes", BigInteger),
    Column("clock_offset_seconds", Double),
    Column("checks", Json),  # each with what was found
    Column("facts", Json),  # all that the node said
    Index("ix_node_check_sweep_id_node", "sweep_id", "node"),
)

node_bench = Table(
    "node_bench",
    metadata,
    Column("id", Id, primary_key=True),
    Column("sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), nullable=False),
    Column("node", Text, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("until", UtcTime),  # NULL: nothing is placed there
    Column("reason", Text, nullable=False),
    Column("is_remeasured", Boolean, nullable=False),  # what was measured there counts no more
    Column("evidence", Json),
    # A node is benched once, whoever says so.
    Index(
        "uq_node_bench_open",
        "sweep_id",
        "node",
        unique=True,
        sqlite_where=text("until IS NULL"),
        postgresql_where=text("until IS NULL"),
    ),
)

link = Table(
    "link",
    metadata,
    Column("id", Id, primary_key=True),
    Column("run_token", Text, nullable=False),  # one per `sweep netbench`
    Column("at", UtcTime, nullable=False),
    Column("device_name", Text),  # NULL: processor cores whose name nobody knows
    Column("backend", Text, nullable=False),
    Column("collective", Text, nullable=False),
    Column("num_ranks", Integer, nullable=False),
    Column("num_nodes", Integer, nullable=False),
    Column("message_bytes", BigInteger, nullable=False),
    Column("num_calls", Integer, nullable=False),
    Column("seconds", Double, nullable=False),  # the median of the calls, of the slowest rank
    Column("algorithm_bytes_per_second", Double, nullable=False),
    Column("bus_bytes_per_second", Double, nullable=False),
    Column("nodes", Json),
    Column("torch", Text),
    Column("nccl", Text),
    Index("ix_link_device_name", "device_name"),
)

VIEWS = ("v_trial", "v_best", "v_oom", "v_scaling", "v_failure", "v_event", "v_gpu_seconds", "v_run")  # in the order of their creation

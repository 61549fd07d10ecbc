"""The tables: one row per sweep, session, cell, trial, attempt and measurement, and an append-only log of what happened.

Every layout field and headline number is a column of its own; JSON is only for evidence. Unknown is NULL. Times are UTC, by the database's clock.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
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
from sqlalchemy.types import TypeEngine

from db.types import Id, Json, UtcTime
from orchestrator.core.problem.layout import LAYOUT_COLUMNS

SCHEMA_VERSION = "0008"  # the newest migration in migrations/versions
FIRST_VERSION = "0008"  # the oldest that can be upgraded: what came before was never released

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_SQL_TYPES: dict[type, type[Integer] | type[Text] | TypeEngine[Any]] = {
    int: Integer,
    str: Text,
    dict: Json,
}

sweep = Table(
    "sweep",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "name",
        Text,
        nullable=False,
        unique=True,
        comment="the sweep's name; a model's as first seen",
    ),
    Column(
        "run_token",
        Text,
        nullable=False,
        comment="random, made with the sweep: tells its run folders from those of a sweep of the same name in another store",
    ),
    Column(
        "spec_json",
        Text,
        nullable=False,
        comment="the sweep file as it was last run, validated, as JSON",
    ),
    Column(
        "conditions",
        Json,
        nullable=False,
        comment="what makes numbers incomparable when it changes",
    ),
    Column(
        "state",
        Text,
        nullable=False,
        comment="of a trial: see [states](architecture.md#the-life-of-a-trial); of a sweep: waiting, running, "
        "stopped, finished; of an attempt: running, measured, out_of_memory, failed, requeued, lost",
    ),
    Column("created_at", UtcTime, nullable=False, comment="when the row was made"),
    Column("owner_host", Text, comment="host of the orchestrator; NULL: nobody holds the sweep"),
    Column("owner_pid", BigInteger, comment="its process id"),
    Column(
        "owner_namespace",
        Text,
        comment="in which `owner_pid` means anything: machine boot and pid namespace",
    ),
    Column("owner_token", Text, comment="one per opened store"),
    Column("owner_since", UtcTime, comment="since when it holds the sweep"),
    Column(
        "owner_epoch",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="the fencing token: grows with each owner",
    ),
    Column(
        "lease_until",
        UtcTime,
        nullable=False,
        comment="until when the owner holds the sweep, unless renewed",
    ),
    Column("stop_requested", Text, comment="drain or cancel, asked for by `sweep cancel`"),
)

model = Table(
    "model",
    metadata,
    Column("digest", Text, primary_key=True, comment="identity by content: 16 hex digits"),
    Column("name", Text, nullable=False, comment="the sweep's name; a model's as first seen"),
    Column("num_layers", Integer, nullable=False, comment="transformer layers"),
    Column("hidden_size", Integer, nullable=False, comment="width of the model"),
    Column("num_attention_heads", Integer, nullable=False, comment="query heads"),
    Column("num_key_value_heads", Integer, nullable=False, comment="key and value heads"),
    Column("ffn_hidden_size", Integer, nullable=False, comment="width of the feed-forward"),
    Column("vocab_size", Integer, nullable=False, comment="token ids"),
    Column(
        "tied_embeddings",
        Boolean,
        nullable=False,
        comment="whether the output head is the input embedding",
    ),
    Column("num_parameters", BigInteger, nullable=False, comment="weights of the model"),
)

fingerprint = Table(
    "fingerprint",
    metadata,
    Column("digest", Text, primary_key=True, comment="identity by content: 16 hex digits"),
    Column("orchestrator_version", Text, nullable=False, comment="of this program"),
    Column("git_sha", Text, comment="commit of the measured code; NULL: not a git checkout"),
    Column(
        "dirty_diff_digest",
        Text,
        comment="of the uncommitted changes, with the named files that git does not track; without a checkout [of "
        "a program's files](measuring.md#what-a-number-was-measured-with); `unknown`: git did not tell; "
        "NULL: none",
    ),
    Column("python", Text, comment="version of Python"),
    Column("torch", Text, comment="version of torch"),
    Column("cuda", Text, comment="version of CUDA"),
    Column("nccl", Text, comment="version of NCCL"),
    Column("driver", Text, comment="version of the GPU driver"),
    Column("device_name", Text, comment="what the driver calls the device"),
    Column(
        "settings",
        Json,
        comment="settings of the ranks' environment that make numbers incomparable, as JSON: name to value; NULL: none",
    ),
    Column(
        "first_seen_at",
        UtcTime,
        nullable=False,
        comment="when this fingerprint first measured something",
    ),
)

session = Table(
    "session",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the sweep",
    ),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="of the orchestrator that wrote it: grows with each new owner of the sweep",
    ),
    Column(
        "host", Text, nullable=False, comment="of the orchestrator; in `node_check` of the node"
    ),
    Column("pid", BigInteger, nullable=False, comment="its process id"),
    Column(
        "started_at",
        UtcTime,
        nullable=False,
        comment="when the attempt began, or the session: when it got the sweep",
    ),
    Column("seen_at", UtcTime, nullable=False, comment="when it last renewed its lease"),
    Column(
        "ended_at",
        UtcTime,
        comment="when the attempt, or the session, ended; NULL: it runs, or its orchestrator died. Of one that died: its last sign of life",
    ),
    Column(
        "num_gpus",
        Integer,
        nullable=False,
        comment="GPUs of the gang (cores, where there are none); of a session: of the cluster",
    ),
    Column(
        "price_per_gpu_hour",
        Double,
        comment="US dollars, as its file or the device's list price said; NULL: not known",
    ),
    Column(
        "held_gpu_seconds",
        Double,
        nullable=False,
        server_default=text("0"),
        comment="the sum of these; in `session` by its gangs until `seen_at`",
    ),
    Column(
        "idle_gpu_seconds",
        Double,
        nullable=False,
        server_default=text("0"),
        comment="leased, and no attempt on them; NULL: not known by cell",
    ),
    Column(
        "capacity_gpu_seconds",
        Double,
        comment="all slots of the cluster, as long as the orchestrator worked; NULL: not known by cell, or for a replay through Ray",
    ),
    Column(
        "stop_reasons",
        Json,
        comment="why its cells had had enough, each reason once; NULL: it goes on, or died",
    ),
    UniqueConstraint("sweep_id", "epoch"),
)

cell = Table(
    "cell",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the sweep",
    ),
    Column("key", Text, nullable=False, comment="the cell's readable name"),
    Column(
        "model_digest",
        Text,
        ForeignKey("model.digest"),
        nullable=False,
        comment="its identity: two definitions have two",
    ),
    Column("model_name", Text, nullable=False, comment="the model's name in the sweep"),
    Column(
        "num_gpus",
        Integer,
        nullable=False,
        comment="GPUs of the gang (cores, where there are none); of a session: of the cluster",
    ),
    Column("sequence_length", Integer, nullable=False, comment="tokens of a sequence"),
    Column("global_batch_size", Integer, nullable=False, comment="sequences of an optimizer step"),
    Column(
        "fingerprint_digest",
        Text,
        ForeignKey("fingerprint.digest"),
        comment="what it was measured with; of a cell: its newest measurement's",
    ),
    UniqueConstraint(
        "sweep_id", "model_digest", "num_gpus", "sequence_length", "global_batch_size"
    ),
)

trial = Table(
    "trial",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the sweep",
    ),
    Column(
        "cell_id",
        Id,
        ForeignKey("cell.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the cell",
    ),
    Column("layout_key", Text, nullable=False, comment="the same"),
    *(
        Column(each.name, _SQL_TYPES[each.type], nullable=each.is_nullable, comment=each.means)
        for each in LAYOUT_COLUMNS
    ),
    Column(
        "state",
        Text,
        nullable=False,
        comment="of a trial: see [states](architecture.md#the-life-of-a-trial); of a sweep: waiting, running, "
        "stopped, finished; of an attempt: running, measured, out_of_memory, failed, requeued, lost",
    ),
    Column(
        "num_attempts", Integer, nullable=False, server_default=text("0"), comment="launches so far"
    ),
    Column(
        "num_measurements",
        Integer,
        nullable=False,
        server_default=text("0"),
        comment="that count together; the numbers are those of the median one, of an even number the slower in the middle",
    ),
    Column(
        "why",
        Text,
        comment="the search's one line: why this layout, now; of a pruned trial: the proof",
    ),
    Column(
        "predicted_tokens_per_second_per_gpu",
        Double,
        comment="predicted before the trial; NULL on an unknown device",
    ),
    Column("predicted_memory_bytes", BigInteger, comment="predicted peak of allocated memory"),
    Column(
        "condemned_by",
        Id,
        ForeignKey("trial.id", ondelete="SET NULL"),
        comment="of a pruned trial: the trial whose out-of-memory proves that this one cannot fit",
    ),
    Column("created_at", UtcTime, nullable=False, comment="when the row was made"),
    Column("updated_at", UtcTime, nullable=False, comment="when the trial last changed its state"),
    UniqueConstraint("cell_id", "layout_key"),
    Index("ix_trial_sweep_id_cell_id_state", "sweep_id", "cell_id", "state"),
)

attempt = Table(
    "attempt",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "trial_id",
        Id,
        ForeignKey("trial.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the trial: what `sweep show` takes",
    ),
    Column("number", Integer, nullable=False, comment="of the attempt, from 1"),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="of the orchestrator that wrote it: grows with each new owner of the sweep",
    ),
    Column(
        "state",
        Text,
        nullable=False,
        comment="of a trial: see [states](architecture.md#the-life-of-a-trial); of a sweep: waiting, running, "
        "stopped, finished; of an attempt: running, measured, out_of_memory, failed, requeued, lost",
    ),
    Column(
        "superseded",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="kept, but its numbers are not the trial's: invalidated, another came first, or another of the pool is the median",
    ),
    Column(
        "pooled",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="one of the measurements that the trial's numbers are the median of",
    ),
    Column(
        "purpose",
        Text,
        comment="why it was made: `new`, `retry`, and of what is measured `doubt` (its neighbours contradict it), "
        "`physics` (a layout that does more work was faster), `anchor` (to see whether the machine has "
        "changed), `confirmation`; NULL: not known",
    ),
    Column(
        "started_at",
        UtcTime,
        nullable=False,
        comment="when the attempt began, or the session: when it got the sweep",
    ),
    Column(
        "ended_at",
        UtcTime,
        comment="when the attempt, or the session, ended; NULL: it runs, or its orchestrator died. Of one that died: its last sign of life",
    ),
    Column(
        "measured_at",
        UtcTime,
        comment="when it was measured, by the clock that the sweep goes by: a simulation has dates of its own; "
        "NULL in `attempt`: as `ended_at`",
    ),
    Column("nodes", Json, comment="names of the nodes that it ran on"),
    Column(
        "shared_nodes",
        Boolean,
        comment="whether other gangs of its orchestrator ran on its nodes meanwhile; NULL: it never had nodes, or was lost",
    ),
    Column("start_seconds", Double, comment="time in phase start, slowest rank"),
    Column("rendezvous_seconds", Double, comment="time in phase rendezvous, slowest rank"),
    Column("first_step_seconds", Double, comment="time in phase first_step, slowest rank"),
    Column("steady_seconds", Double, comment="time in phase steady, slowest rank"),
    Column(
        "teardown_seconds",
        Double,
        comment="from the end of the last step to the end of the last process; for a program that reports no steps, from the program's end",
    ),
    Column(
        "gpu_seconds",
        Double,
        comment="GPUs held x seconds, placement to clean-up; in `v_trial` of the last attempt",
    ),
    Column("timed_seconds", Double, comment="of its held time, in timed steps"),
    Column(
        "warmup_seconds",
        Double,
        comment="of its held time, in the steps before these; NULL: nobody said",
    ),
    Column(
        "fingerprint_digest",
        Text,
        ForeignKey("fingerprint.digest"),
        comment="what it was measured with; of a cell: its newest measurement's",
    ),
    Column(
        "processes_killed", Integer, comment="processes that were left beyond the ranks, and killed"
    ),
    Column(
        "environment",
        Json,
        comment="settings of NCCL, gloo and their like that its ranks got, as JSON: name to value, or to the value on each node",
    ),
    # What its node was busy with while steps were timed; of several nodes the one where others disturbed most. NULL: not known.
    Column(
        "cpu_cores",
        Double,
        comment="cores that the attempt could use: its affinity, or the limit of its container",
    ),
    Column(
        "own_cpu_cores",
        Double,
        comment="cores' worth of CPU time of the attempt's own processes while steps were timed",
    ),
    Column(
        "sweep_cpu_cores",
        Double,
        comment="cores' worth of CPU time of the sweep's other attempts, and of its orchestrator and the Ray that "
        "it started where they are on the node",
    ),
    Column(
        "others_cpu_cores",
        Double,
        comment="cores' worth of CPU time that went to somebody else while steps were timed: [the load by "
        "others](measuring.md#the-load-by-others)",
    ),
    Column(
        "foreign_gpu_processes",
        Integer,
        comment="processes that were not the attempt's, on its GPUs while steps were timed (NVML); NULL: not told",
    ),
    Column(
        "gpu_clock_ratio",
        Double,
        comment="mean SM clock of its GPUs over the most that they can, while steps were timed (NVML)",
    ),
    Column(
        "gpu_throttled_fraction",
        Double,
        comment="fraction of samples in which heat, power supply or hardware slowed a GPU down",
    ),
    Column(
        "gpu_throttle_reasons",
        Text,
        comment="why its GPUs ran below their highest clock, in NVML's words, with commas; `sw_power_cap` alone spoils nothing",
    ),
    Column(
        "gpu_temperature_celsius",
        Double,
        comment="of its hottest GPU while steps were timed (NVML)",
    ),
    Column(
        "failure_kind",
        Text,
        comment="what went wrong: [kinds](troubleshooting.md#kinds-of-failure)",
    ),
    Column("failure_rank", Integer, comment="the first bad rank"),
    Column("failure_node", Text, comment="node of the first bad rank"),
    Column("failure_phase", Text, comment="phase of the first bad rank"),
    Column("failure_step", Integer, comment="optimizer step that it had begun"),
    Column("failure_signal", Integer, comment="signal that it died of"),
    Column("failure_exit_code", Integer, comment="exit code of the first bad rank"),
    Column("failure_message", Text, comment="one line for a person"),
    Column("failure_log_path", Text, comment="the rank's log, on the node that ran it"),
    Column(
        "failure_peak_memory_bytes",
        BigInteger,
        comment="of an out-of-memory: allocated when it struck",
    ),
    Column(
        "failure_device_memory_bytes",
        BigInteger,
        comment="of an out-of-memory: the device's memory",
    ),
    Column("failure_evidence", Text, comment="the text or fact that shows the kind"),
    Column(
        "failure_memory",
        Json,
        comment="of an out-of-memory, as JSON: `asked_bytes` by the allocation that failed, `held_bytes` "
        "by tensors then, `device_bytes`; `is_reported`: by an allocator, so it proves a misfit",
    ),
    # Last: SQLite reads the columns before a long one without it.
    Column("failure_log_tail", Text, comment="its last lines"),
    UniqueConstraint("trial_id", "number"),
    # At most one attempt of a trial counts, whoever writes.
    Index(
        "uq_attempt_counting",
        "trial_id",
        unique=True,
        sqlite_where=text("state = 'measured' AND NOT superseded"),
        postgresql_where=text("state = 'measured' AND NOT superseded"),
    ),
    Index(
        "ix_attempt_running",
        "trial_id",
        sqlite_where=text("state = 'running'"),
        postgresql_where=text("state = 'running'"),
    ),
)

measurement = Table(
    "measurement",
    metadata,
    Column(
        "attempt_id",
        Id,
        ForeignKey("attempt.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
        comment="the attempt that was measured",
    ),
    Column("tokens_per_second", Double, nullable=False, comment="of the whole gang"),
    Column("tokens_per_second_per_gpu", Double, nullable=False, comment="what is optimised"),
    Column(
        "step_seconds_median", Double, nullable=False, comment="median time of an optimizer step"
    ),
    Column(
        "step_seconds_iqr", Double, nullable=False, comment="interquartile range of the timed steps"
    ),
    Column("num_steps", Integer, nullable=False, comment="timed steps"),
    Column(
        "relative_confidence",
        Double,
        comment="half-width of the median's 95 % interval over the median; NULL: fewer than 6 steps",
    ),
    Column(
        "confident", Boolean, nullable=False, comment="whether the precision asked for was reached"
    ),
    Column("mfu", Double, comment="model FLOPs utilisation, 0 to 1; NULL: no peak is known"),
    Column("hfu", Double, comment="hardware FLOPs utilisation, 0 to 1: recomputed FLOPs count"),
    Column("mfu_formula", Text, nullable=False, comment="FLOPs per token that `mfu` rests on"),
    Column("peak_flops", Double, comment="FLOP/s of one device that `mfu` rests on"),
    Column(
        "peak_flops_source",
        Text,
        comment="`table: ...` (data sheet) or `measured: ...` (how, and in which trial: one for all trials of a node)",
    ),
    Column(
        "peak_memory_allocated_bytes",
        BigInteger,
        comment="highest allocated memory, worst rank; on a CPU live tensors",
    ),
    Column(
        "peak_memory_reserved_bytes",
        BigInteger,
        comment="highest memory that the allocator held, worst rank; NULL on a CPU",
    ),
    Column("device_memory_bytes", BigInteger, comment="memory of one device, as the rank saw it"),
    Column(
        "allocator_retries",
        BigInteger,
        comment="times that the GPU's allocator had to free its cache and try again",
    ),
    Column(
        "thrashing",
        Boolean,
        nullable=False,
        comment="ran at the memory edge with allocator retries: slower than it looks like",
    ),
    Column("loss_first", Double, comment="loss of the first step"),
    Column("loss_last", Double, comment="loss of the last step"),
    Column(
        "gpu_utilisation",
        Double,
        comment="mean share of time that a kernel ran, 0 to 1, while steps were timed (NVML)",
    ),
    Column("gpu_power_watts", Double, comment="mean power of a GPU while steps were timed (NVML)"),
    Column("memory_by_part", Json, comment="bytes at the peak by part, worst rank"),
    Column(
        "step_seconds",
        Json,
        nullable=False,
        comment="every timed step of the slowest rank: the evidence",
    ),
)

event = Table(
    "event",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the sweep",
    ),
    Column(
        "trial_id",
        Id,
        ForeignKey("trial.id", ondelete="CASCADE"),
        comment="number of the trial: what `sweep show` takes",
    ),
    Column(
        "attempt",
        Integer,
        comment="number of the attempt, from 1; in `v_trial` the one that counts",
    ),
    Column("at", UtcTime, nullable=False, comment="when it happened"),
    Column(
        "event",
        Text,
        nullable=False,
        comment="what happened: an event of the lifecycle, `added`, or `superseded`",
    ),
    Column("from_state", Text, comment="the trial's state before"),
    Column("to_state", Text, comment="the trial's state after"),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="of the orchestrator that wrote it: grows with each new owner of the sweep",
    ),
    Column(
        "change_id",
        Text,
        comment="one per write; tells whether a commit whose answer was lost has happened",
    ),
    Column("detail", Json, comment="what else is known of the event"),
    Index("ix_event_sweep_id", "sweep_id"),
    Index("ix_event_trial_id", "trial_id"),
)

node_check = Table(
    "node_check",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id", Id, ForeignKey("sweep.id", ondelete="CASCADE"), comment="number of the sweep"
    ),
    Column(
        "epoch",
        BigInteger,
        comment="of the orchestrator that wrote it: grows with each new owner of the sweep",
    ),
    Column("at", UtcTime, nullable=False, comment="when it happened"),
    Column("node", Text, nullable=False, comment="the node, as the scheduler calls it"),
    Column("is_fit", Boolean, nullable=False, comment="no check failed"),
    Column("failed", Text, comment="the checks that failed; NULL: none"),
    Column("host", Text, comment="of the orchestrator; in `node_check` of the node"),
    Column(
        "boot_id",
        Text,
        comment="the kernel's name for this boot; the same on two nodes: they are simulated on one machine",
    ),
    Column("kernel", Text, comment="version of the kernel"),
    Column("python", Text, comment="version of Python"),
    Column("torch", Text, comment="version of torch"),
    Column("cuda", Text, comment="version of CUDA"),
    Column("nccl", Text, comment="version of NCCL"),
    Column("driver", Text, comment="version of the GPU driver"),
    Column("device_name", Text, comment="what the driver calls the device"),
    Column(
        "num_gpus",
        Integer,
        comment="GPUs of the gang (cores, where there are none); of a session: of the cluster",
    ),
    Column("num_cores", Integer, comment="cores of the node that processes may use"),
    Column(
        "matmul_flops",
        Double,
        comment="FLOP/s of the node's slowest device, kept up over two seconds",
    ),
    Column("free_disk_bytes", BigInteger, comment="where run folders go"),
    Column(
        "clock_offset_seconds", Double, comment="how far the node's clock is ahead of the head's"
    ),
    Column("checks", Json, comment="each check: name, status, what was found, advice"),
    Column("facts", Json, comment="all that the node said of itself"),
    Index("ix_node_check_sweep_id_node", "sweep_id", "node"),
)

node_bench = Table(
    "node_bench",
    metadata,
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=False,
        comment="number of the sweep",
    ),
    Column("node", Text, nullable=False, comment="the node, as the scheduler calls it"),
    Column("since", UtcTime, nullable=False, comment="from when on nothing is placed on the node"),
    Column("until", UtcTime, comment="when it was used again; NULL: it is benched"),
    Column("reason", Text, nullable=False, comment="`slow`, `faults`, `asked`"),
    Column(
        "is_remeasured", Boolean, nullable=False, comment="what was measured there counts no more"
    ),
    Column("evidence", Json, comment="why, in numbers"),
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
    Column("id", Id, primary_key=True, comment="number of the row"),
    Column(
        "run_token",
        Text,
        nullable=False,
        comment="random, made with the sweep: tells its run folders from those of a sweep of the same name in another store",
    ),
    Column("at", UtcTime, nullable=False, comment="when it happened"),
    Column("device_name", Text, comment="what the driver calls the device"),
    Column("backend", Text, nullable=False, comment="what carried it: `nccl`, `gloo`"),
    Column(
        "collective",
        Text,
        nullable=False,
        comment="`all_reduce`, `all_gather`, `reduce_scatter`, `send_recv`",
    ),
    Column("num_ranks", Integer, nullable=False, comment="ranks that took part"),
    Column("num_nodes", Integer, nullable=False, comment="nodes that took part"),
    Column(
        "message_bytes",
        BigInteger,
        nullable=False,
        comment="of a collective: all that is reduced, gathered or sent",
    ),
    Column("num_calls", Integer, nullable=False, comment="calls that a time rests on"),
    Column(
        "seconds", Double, nullable=False, comment="of one call: the median, of the slowest rank"
    ),
    Column(
        "algorithm_bytes_per_second", Double, nullable=False, comment="message bytes over seconds"
    ),
    Column(
        "bus_bytes_per_second",
        Double,
        nullable=False,
        comment="algorithm bandwidth times the collective's factor, which makes numbers of ranks comparable",
    ),
    Column("nodes", Json, comment="names of the nodes that it ran on"),
    Column("torch", Text, comment="version of torch"),
    Column("nccl", Text, comment="version of NCCL"),
    Index("ix_link_device_name", "device_name"),
)

VIEWS = (
    "v_trial",
    "v_best",
    "v_oom",
    "v_scaling",
    "v_failure",
    "v_event",
    "v_gpu_seconds",
    "v_run",
)  # in the order of their creation

"""Tables of trials: their attempts and measurements, and the append-only log of what happened."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.types import TypeEngine

from db.tables.columns import metadata, optional, required, row_id, sweep_id
from db.types import Id, Json, UtcTime
from orchestrator.core.problem.layout import LAYOUT_COLUMNS

_SQL_TYPES: dict[type, TypeEngine[Any]] = {int: Integer(), str: Text(), dict: Json}

trial = Table(
    "trial",
    metadata,
    row_id(),
    sweep_id(),
    required("cell_id", Id, "number of the cell", ForeignKey("cell.id", ondelete="CASCADE")),
    required("layout_key", Text, "the layout's readable name; `layout` in views"),
    *(
        (optional if each.is_nullable else required)(each.name, _SQL_TYPES[each.type], each.means)
        for each in LAYOUT_COLUMNS
    ),
    required("state", Text),
    required("num_attempts", Integer, "launches so far", server_default=text("0")),
    required(
        "num_measurements",
        Integer,
        "measurements that count together; the trial's numbers are those of the median one, "
        "of an even number the slower in the middle",
        server_default=text("0"),
    ),
    optional(
        "why",
        Text,
        "one line of the search: why it chose this layout now; of a pruned trial: the proof",
    ),
    optional(
        "predicted_tokens_per_second_per_gpu",
        Double,
        "predicted before the trial; NULL on an unknown device",
    ),
    optional("predicted_memory_bytes", BigInteger, "predicted peak of allocated memory"),
    optional(
        "condemned_by",
        Id,
        "of a pruned trial: the trial whose out-of-memory proves that this one cannot fit",
        ForeignKey("trial.id", ondelete="SET NULL"),
    ),
    optional(
        "reused_from",
        Id,
        "the trial of another sweep whose measurements these are, by `sweep run --reuse`; NULL: it "
        "was measured in its own sweep, or that sweep was removed",
        ForeignKey("trial.id", ondelete="SET NULL"),
    ),
    required("created_at", UtcTime),
    required("updated_at", UtcTime, "when the trial last changed its state"),
    UniqueConstraint("cell_id", "layout_key"),
    Index("ix_trial_sweep_id_cell_id_state", "sweep_id", "cell_id", "state"),
    # Without these, the removal of a trial reads all others.
    *(
        Index(
            f"ix_trial_{name}",
            name,
            sqlite_where=text(f"{name} IS NOT NULL"),
            postgresql_where=text(f"{name} IS NOT NULL"),
        )
        for name in ("condemned_by", "reused_from")
    ),
)

attempt = Table(
    "attempt",
    metadata,
    row_id(),
    required("trial_id", Id, "", ForeignKey("trial.id", ondelete="CASCADE")),
    required("number", Integer),
    required("epoch", BigInteger),
    required("state", Text),
    required(
        "superseded",
        Boolean,
        "kept, but not the source of the trial's numbers: it is invalidated, another came "
        "first, or another of the pool is the median",
        server_default=false(),
    ),
    required(
        "pooled",
        Boolean,
        "one of the measurements whose median gives the trial's numbers",
        server_default=false(),
    ),
    optional(
        "purpose",
        Text,
        "why it was made: `new`, `retry`, and for a measured trial `doubt` (its neighbours "
        "contradict it), `physics` (a layout with more work was faster), `anchor` (to see "
        "whether the machine has changed), `confirmation`; NULL: not known",
    ),
    required("started_at", UtcTime),
    optional("ended_at", UtcTime),
    optional(
        "measured_at",
        UtcTime,
        "when it was measured, by the sweep's clock (a simulation has its own); NULL in "
        "`attempt`: as `ended_at`",
    ),
    optional("nodes", Json),
    optional(
        "shared_nodes",
        Boolean,
        "whether other gangs of its orchestrator ran on its nodes at the same time; NULL: "
        "it never had nodes, or was lost",
    ),
    optional("start_seconds", Double, "time in phase start, slowest rank"),
    optional("rendezvous_seconds", Double, "time in phase rendezvous, slowest rank"),
    optional("first_step_seconds", Double, "time in phase first_step, slowest rank"),
    optional("steady_seconds", Double, "time in phase steady, slowest rank"),
    optional(
        "teardown_seconds",
        Double,
        "from the end of the last step to the end of the last process; if a program reports "
        "no steps, from the program's end",
    ),
    optional("gpu_seconds", Double),
    optional("timed_seconds", Double, "seconds in timed steps"),
    optional("warmup_seconds", Double, "seconds in the steps before these; NULL: not reported"),
    optional("fingerprint_digest", Text, "", ForeignKey("fingerprint.digest")),
    optional("processes_killed", Integer, "processes that were left after the ranks, and killed"),
    optional(
        "environment",
        Json,
        "settings of NCCL, gloo and similar libraries that its ranks got, as JSON: name to "
        "value, or to the value on each node",
    ),
    optional(
        "bound_cpus",
        Json,
        "cores to which its ranks were bound, those of their GPU's NUMA node, as JSON: node to a "
        "list for each rank; NULL: to none",
    ),
    # Load of its node while steps were timed; of several nodes the one with most load by others.
    optional(
        "cpu_cores",
        Double,
        "cores that the attempt could use: its affinity, or the limit of its container",
    ),
    optional(
        "own_cpu_cores",
        Double,
        "cores' worth of CPU time of the attempt's own processes while steps were timed",
    ),
    optional(
        "sweep_cpu_cores",
        Double,
        "cores' worth of CPU time of the sweep's other attempts, and of its orchestrator "
        "and the Ray that it started, if these run on the node",
    ),
    optional(
        "others_cpu_cores",
        Double,
        "cores' worth of CPU time of everything else while steps were timed: [the load by "
        "others](measuring.md#the-load-by-others)",
    ),
    optional(
        "foreign_gpu_processes",
        Integer,
        "processes of others on its GPUs while steps were timed (NVML); NULL: not known",
    ),
    optional(
        "gpu_clock_ratio",
        Double,
        "mean SM clock of its GPUs over their highest clock, while steps were timed (NVML)",
    ),
    optional(
        "gpu_throttled_fraction",
        Double,
        "fraction of samples in which heat, power supply or hardware slowed a GPU down",
    ),
    optional(
        "gpu_throttle_reasons",
        Text,
        "why its GPUs ran below their highest clock, in NVML's words, with commas; "
        "`sw_power_cap` alone is harmless",
    ),
    optional(
        "gpu_temperature_celsius",
        Double,
        "temperature of its hottest GPU while steps were timed (NVML)",
    ),
    optional("failure_kind", Text),
    optional("failure_rank", Integer, "the first bad rank"),
    optional("failure_node", Text, "node of the first bad rank"),
    optional("failure_phase", Text, "phase of the first bad rank"),
    optional("failure_step", Integer, "the optimizer step that it had begun"),
    optional(
        "failure_step_part",
        Text,
        "of an out-of-memory: where in a step memory ran out, by the rank's traceback: `init` "
        "(before the first step), `forward`, `backward`, `optimizer`; NULL: it does not show it",
    ),
    optional("failure_signal", Integer, "the signal that killed it"),
    optional("failure_exit_code", Integer, "exit code of the first bad rank"),
    optional("failure_message", Text),
    optional("failure_log_path", Text, "the rank's log, on the node that ran it"),
    optional(
        "failure_peak_memory_bytes",
        BigInteger,
        "of an out-of-memory: bytes allocated at that moment",
    ),
    optional("failure_device_memory_bytes", BigInteger, "of an out-of-memory: the device's memory"),
    optional("failure_evidence", Text, "the text or fact that shows the kind"),
    optional(
        "failure_memory",
        Json,
        "of an out-of-memory, as JSON: `asked_bytes` by the allocation that failed, `live_bytes`"
        " by tensors then, `device_bytes`; `is_reported`: by an allocator, so it proves a misfit",
    ),
    # Last: SQLite reads the columns before a long one without it.
    optional("failure_log_tail", Text, "last lines of the rank's log"),
    UniqueConstraint("trial_id", "number"),
    # At most one attempt of a trial counts; every writer is held to that.
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
    required(
        "attempt_id",
        Id,
        "the attempt that was measured",
        ForeignKey("attempt.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    required("tokens_per_second", Double, "of the whole gang"),
    required("tokens_per_second_per_gpu", Double, "what is optimised"),
    required("step_seconds_median", Double, "median time of an optimizer step"),
    required("step_seconds_iqr", Double, "interquartile range of the timed steps"),
    required("num_steps", Integer),
    optional(
        "relative_confidence",
        Double,
        "half-width of the median's 95 % interval over the median; NULL: fewer than 6 steps",
    ),
    required("confident", Boolean, "whether the requested precision was reached"),
    optional(
        "implausible",
        Text,
        "why the numbers cannot be true, with the fix: they never win; NULL: nothing shows it",
    ),
    optional(
        "unsteady",
        Text,
        "why its steps do not show the speed of a long run: a trend, or too few seconds; NULL: "
        "nothing shows it",
    ),
    optional(
        "unchecked",
        Text,
        "what nothing checks, with the fix: when the lines of its step times came, so that only "
        "the time that the program ran bounds them; whether each is that of one step; or whether "
        "what varies reaches the program. NULL: all was checked, there are too few steps, nobody "
        "saw the program, or the numbers are implausible",
    ),
    optional(
        "step_seconds_bound",
        Double,
        "a step takes at least so long: the trial was ended early, since it cannot be the best; "
        "its numbers are of a few steps, and never win; NULL: it was timed to its end",
    ),
    optional("mfu", Double, "model FLOPs utilisation, 0 to 1; NULL: no peak is known"),
    optional("hfu", Double, "hardware FLOPs utilisation, 0 to 1: recomputed FLOPs count"),
    required("mfu_formula", Text, "FLOPs per token that `mfu` rests on"),
    optional("peak_flops", Double, "FLOP/s of one device that `mfu` rests on"),
    optional(
        "peak_flops_source",
        Text,
        "`table: ...` (data sheet) or `measured: ...` (how, and in which trial; one for all "
        "trials of a node)",
    ),
    optional(
        "peak_memory_allocated_bytes",
        BigInteger,
        "highest allocated memory, worst rank; on a CPU live tensors",
    ),
    optional(
        "peak_memory_reserved_bytes",
        BigInteger,
        "highest memory that the allocator reserved, worst rank; NULL on a CPU",
    ),
    optional(
        "peak_memory_driver_bytes",
        BigInteger,
        "highest memory as the driver or the kernel saw it, fullest device or rank: what the "
        "allocator held and what it does not know of; never used for predictions",
    ),
    optional(
        "peak_memory_driver_kind",
        Text,
        "`nvml`: used on the device, less what was used before the attempt; `rss`: resident memory "
        "of the program's largest process, on a CPU",
    ),
    optional(
        "peak_memory_active_bytes",
        BigInteger,
        "highest memory of blocks that the allocator could not give away, worst rank: allocated, "
        "or still in use by another stream",
    ),
    optional(
        "inactive_split_bytes",
        BigInteger,
        "free rests of split blocks at their highest, worst rank: what fragmentation costs",
    ),
    optional(
        "device_used_bytes",
        BigInteger,
        "memory in use on the fullest device after the timed steps, by everything: the "
        "allocator's, the context, communication buffers, other processes",
    ),
    optional(
        "device_memory_bytes",
        BigInteger,
        "memory of one device, as its rank told it, else as its driver did",
    ),
    optional(
        "allocator_retries",
        BigInteger,
        "times that the GPU's allocator freed its cache and tried again",
    ),
    optional(
        "allocator_ooms", BigInteger, "out-of-memory errors that the program's allocator raised"
    ),
    required(
        "thrashing",
        Boolean,
        "ran at the memory edge with allocator retries, and so slower than it could",
    ),
    optional("attention_kernel", Text, "the kernel of attention that ran, as the program names it"),
    optional(
        "compile_seconds",
        Double,
        "seconds of compiling, slowest rank; they are part of the attempt's phases, most of them "
        "of `first_step_seconds`; 0: nothing was compiled; NULL: not reported",
    ),
    optional("loss_first", Double, "loss of the first step"),
    optional("loss_last", Double, "loss of the last step"),
    # Taken over the time in which steps were timed; NULL if that was less than 2 s, or not told.
    optional(
        "gpu_busy",
        Double,
        "mean share of time in which at least one kernel ran, however small (NVML's utilisation), "
        "0 to 1: [what it means](measuring.md#what-a-gpu-did)",
    ),
    optional("gpu_power_watts", Double, "mean power of a GPU (NVML)"),
    optional("gpu_energy_joules", Double, "energy of all its GPUs (NVML's counter at both ends)"),
    optional("joules_per_token", Double, "power of a GPU over its tokens per second"),
    optional(
        "gpu_clock_mhz", Double, "median SM clock of the slowest GPU while steps were timed (NVML)"
    ),
    optional("gpu_lowest_clock_mhz", Double, "lowest SM clock seen of any GPU (NVML)"),
    optional(
        "sm_activity",
        Double,
        "share of the multiprocessors that were busy, 0 to 1 (NVML's GPM: Hopper and newer)",
    ),
    optional("tensor_activity", Double, "share of time in which tensor cores worked (GPM)"),
    optional("dram_activity", Double, "share of the device memory's bandwidth that was used (GPM)"),
    optional(
        "extra",
        Json,
        "fields of the program's own, as JSON, the last value of each: "
        "[what the program returns](workloads.md#what-the-program-returns); NULL: none",
    ),
    optional("memory_by_part", Json, "bytes at the peak by part, worst rank"),
    required("step_seconds", Json, "every timed step of the slowest rank: the evidence"),
    Index(
        "ix_measurement_implausible",
        "attempt_id",
        sqlite_where=text("implausible IS NOT NULL"),
        postgresql_where=text("implausible IS NOT NULL"),
    ),
)

event = Table(
    "event",
    metadata,
    row_id(),
    sweep_id(),
    optional("trial_id", Id, "", ForeignKey("trial.id", ondelete="CASCADE")),
    optional("attempt", Integer, "number of the attempt, from 1; in `v_trial` the one that counts"),
    required("at", UtcTime),
    required(
        "event",
        Text,
        "what happened: an event of the lifecycle, `added`, `superseded`, or what a person asked "
        "for: `enqueued`, `retry_asked`",
    ),
    optional("from_state", Text, "the trial's state before"),
    optional("to_state", Text, "the trial's state after"),
    required("epoch", BigInteger),
    optional(
        "change_id", Text, "one per write; shows whether a commit happened if its answer was lost"
    ),
    optional("detail", Json, "what else is known of the event"),
    Index("ix_event_sweep_id", "sweep_id"),
    Index("ix_event_trial_id", "trial_id"),
)

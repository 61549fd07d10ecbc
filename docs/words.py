"""What the keys of a sweep file, the columns of the store and the kinds of failure mean: one line each, for the tables in the documents.

`docs.generate` fails when a key, column or kind of the code has no line here, or a line here no longer belongs to any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.physics.trainer import TRAINERS
from orchestrator.core.trial.failures import FailureKind


@dataclass(frozen=True, kw_only=True)
class KeyWords:
    """What a key takes, and what it means."""

    takes: str
    means: str


def _key(takes: str, means: str) -> KeyWords:
    return KeyWords(takes=takes, means=means)


_LIMIT = "`auto`, duration"
_COUNTS = "`auto`, a number, a list"
_BYTES = "number (per token), or [bytes](#bytes)"

# By section, in the order of the classes in core/sweepfile/spec.py.
KEYS: Mapping[str, Mapping[str, KeyWords]] = {
    "sweep": {
        "name": _key(
            "text", "Names the sweep in the store and its folder: 1 to 63 of `a-z 0-9 . _ -`. The same name goes on with the same sweep"
        ),
        "model": _key("preset, sizes, or a list", "What is trained; see [Models](#models)"),
        "sequence_length": _key("number or list, `8K`", "Tokens of a sequence. `8K` = 8 x 1024"),
        "global_batch_size": _key("number or list", "Sequences of an optimizer step, over all GPUs, the same for every layout"),
        "global_batch_tokens": _key(
            "number or list, `4M`", "The same in tokens, instead of `global_batch_size`; a multiple of `sequence_length`. `4M` = 4 x 2^20"
        ),
        "precision": _key(
            "`fp32`, `bf16`, `fp16`, `fp8`, or a list", "Of the weights and products in training. Several: an axis like the others"
        ),
        "gpus": _key("number or list", "GPUs of a gang; on a machine without GPUs, cores. More than a node has must be whole nodes"),
        "gpus_per_node": _key(
            "`auto`, a number", "`auto`: as many as the cluster's largest node has; `sweep plan` without a GPU at hand assumes 8"
        ),
        "device": _key(
            "`auto`, `cpu`, or a device",
            "Where to run, and which data sheet predictions use; see [Devices](#devices). `auto`: GPUs if there are any",
        ),
        "device_memory_gib": _key("number", "Memory of one GPU for predictions, in place of the data sheet's"),
        "price_per_gpu_hour": _key(
            "number",
            "US dollars that you pay, for the costs that `sweep plan` shows and for `search.max_cost`; none: see [Devices](#devices)",
        ),
        "axes": _key("section", "What may vary: [axes](#axes)"),
        "tensor_parallel_across_nodes": _key("`true`, `false`", "Also allow tensor-parallel groups larger than a node"),
        "constraints": _key("expression or list", "What must hold for a layout to be legal: [constraints](#constraints)"),
        "measurement": _key("section", "How steps are timed: [measurement](#measurement)"),
        "search": _key("section", "What is tried next, and when to stop: [search](#search)"),
        "objective": _key("`tokens_per_second_per_gpu`, `step_seconds`", "What is optimised: the first is made large, the second small"),
        "workload": _key(
            "`llama`, `synthetic`, `command`, `replay`, or a section", "The program that ranks run: [workloads.md](workloads.md)"
        ),
        "trainer": _key("a name, or a section", "What is known of its memory, for predictions: [trainer](#trainer)"),
    },
    "axes": {
        "data_parallel_size": _key(_COUNTS, "Replicas. `auto`: the divisors of the number of GPUs"),
        "micro_batch_size": _key(_COUNTS, "Sequences per replica and forward pass. `auto`: the divisors of the global batch"),
        "grad_accum_steps": _key(_COUNTS, "Micro-batches per replica and optimizer step. `auto`: the divisors of the global batch"),
        "recompute": _key(
            "`auto`, a mode, a list",
            "`none`, `full`, `selective_ops` (= `selective`), `selective_attention`; all but `none` with an optional `:LAYERS`"
            " (`full:8`: the first 8). `auto`: none, both selective ones, and full for a quarter, a half, three quarters and all of the layers",
        ),
        "zero_stage": _key(
            "`auto`, 0 to 3, a list",
            "ZeRO: 1 shards optimizer states, 2 gradients too, 3 weights too. `auto`: every stage that the workload can do",
        ),
        "tensor_parallel_size": _key(_COUNTS, "Ranks that share each layer. `auto`: the divisors of the number of GPUs"),
        "pipeline_parallel_size": _key(_COUNTS, "Stages of layers. `auto`: likewise"),
        "context_parallel_size": _key(_COUNTS, "Ranks that share a sequence. `auto`: likewise"),
        "options": _key("mapping of lists", "Options of the workload that vary: [options that vary](#options-that-vary)"),
    },
    "measurement": {
        "warmup_steps": _key("number, at least 2", "First steps that are not timed"),
        "min_steps": _key("number, at least 2", "Timed steps at least. An interval needs 6"),
        "max_steps": _key("number", "Timed steps at most"),
        "precision": _key("fraction", "Stop once the 95 % interval of the median step time is this narrow: half its width over the median"),
        "limits": _key("section", "Time limits: [limits](#limits)"),
        "exclusive": _key(
            "`none`, `node`",
            "`node`: nobody else on a gang's nodes, for cleaner numbers. `none`: gangs of less than a node share one (column `shared_nodes` of an attempt says whether they did)",
        ),
        "preflight": _key("`true`, `false`", "Look at a node before its first trial, and use none that is not fit: [nodes.md](nodes.md)"),
        "wait_for_nodes": _key(
            "duration",
            "How long a cell whose gangs the nodes that are left cannot hold waits for those that are gone, or for others in their place: from when the"
            " last of them went. Others go on meanwhile; then the call ends with exit code 75. (For nodes that are not there yet at its start: `--wait-for-nodes`)",
        ),
    },
    "limits": {
        "start": _key(_LIMIT, "Process start to the workload's `main`. `auto`: 120 s"),
        "rendezvous": _key(_LIMIT, "Process group, model and optimizer. `auto`: 120 s, and 0.5 s for each rank"),
        "first_step": _key(_LIMIT, "The first optimizer step, compilation included. `auto`: 300 s, and 5 times the predicted step"),
        "steady": _key(
            _LIMIT,
            "From one later step to the next. `auto`: 60 s, 5 times the predicted step, or 5 times the slowest step so far: the longest of them",
        ),
        "teardown": _key(_LIMIT, "After the result was written. `auto`: 20 s"),
        "total": _key(
            _LIMIT,
            "The whole attempt. `auto`: 1800 s, or what is around its steps and twice the time of `warmup_steps` + `max_steps` steps, if that is longer",
        ),
    },
    "search": {
        "strategy": _key(
            "`auto`, `exhaustive`, `random`, `tpe`, `gp`",
            "`auto`: what is predicted, by physics and by what this cell has shown, to gain most per GPU-second: [search.md](search.md)."
            " `gp`: a Gaussian process for the first 200 outcomes of a cell, then TPE; needs the extra `gp`",
        ),
        "seed": _key("number", "Of the search, of the weights and of the tokens"),
        "max_trials": _key("number", "Launched trials per cell"),
        "max_gpu_hours": _key(
            "number", "GPU-hours held for the sweep by all calls: attempts, failed ones included, and leases that stand idle"
        ),
        "max_cost": _key(
            "number", "The same in US dollars, by `price_per_gpu_hour` or the [list price](#devices); refused where neither is known"
        ),
        "max_wall_time": _key("duration", "Of one `sweep run`: nothing is started after it"),
        "max_parallel_trials": _key("`auto`, a number", "Trials under way at once. `auto`: as many as fit; without GPUs, one"),
        "plateau": _key("section", "Stop a cell that no longer gains: [plateau](#plateau)"),
        "bound": _key(
            "fraction",
            "Stop a cell when no untried layout is expected to gain that much over its best ([search.md](search.md)); only `auto` can tell",
        ),
        "confirm": _key("section", "Measure what stands at the top again, once the search has ended: [confirm](#confirm)"),
        "anchor_every": _key(
            "number",
            "Measure one layout again after so many measured trials of a cell (by default 8; then 16, 32 and at most 64 while the machine stays"
            " as it was), after pauses, and before anything is confirmed: [drift](search.md#a-machine-that-drifts). 0: never. Where"
            " `confirm.repeats` is 0 there are neither anchors nor confirmations; results that neighbours contradict are still repeated.",
        ),
        "dominance": _key(
            "`auto`, `trusted`, `confirmed`, `off`",
            "What a layout that runs out of memory rules out: [search.md](search.md#what-an-out-of-memory-rules-out)",
        ),
    },
    "plateau": {
        "trials": _key("number", "So many finished trials"),
        "gain": _key("fraction", "that brought less than this over the best before them"),
    },
    "confirm": {
        "contenders": _key(
            "number",
            "How many of those that could be the fastest take part; half of them stay in each further round. Where the machine was seen to drift,"
            " all of them do, 16 at most",
        ),
        "repeats": _key("number", "Of each at most, beside its first run, on top of `max_trials`. 0: the fastest single run is believed"),
    },
    "workload": {
        "name": _key("`llama`, `synthetic`, `command`, `replay`", "Which program"),
        "options": _key("mapping", "The program's own: [workloads.md](workloads.md)"),
    },
    "trainer": {
        "profile": _key(", ".join(f"`{name}`" for name in TRAINERS), "A trainer that is known; `trainer: nanotron` alone says it too"),
        "bytes_per_parameter": _key("number or section", "In mixed precision, unsharded: 16, 18, 20, or its [parts](#bytes_per_parameter)"),
        "activations": _key("mapping", "What layers and head hold, by recompute mode: [activations](#activations); `none` is required"),
    },
    "bytes-per-parameter": {
        "parameters": _key("number", "2 in bf16; 4 where weights are fp32 and rounded at each use"),
        "gradients": _key("number", "2 in bf16, 4 in fp32, 6 where bf16 ones are added to an fp32 copy"),
        "optimizer": _key("number", "Adam's moments, 8, and 4 of an fp32 master"),
    },
    "activations": {
        "kept": _key(_BYTES, "By one layer, for its backward pass"),
        "backward": _key(_BYTES, "Beyond what all layers keep, when the last layer's backward pass is at its fullest"),
        "head": _key(_BYTES, "The same, when the head and the loss are"),
        "end": _key(_BYTES, "Above the states, when the backward pass of all layers is over: the embedding's gradient before it is added"),
    },
    "bytes": {
        "per_token": _key("number", "Times the tokens of a micro-batch"),
        "per_token_and_position": _key("number", "Times these, times the sequence length: attention that keeps its scores"),
        "fixed": _key("number", "Whatever the tokens: rounded copies of weights, a weight's gradient before it is added"),
    },
    "model": {
        "preset": _key("preset", "Sizes to start from"),
        "name": _key("text", "A label; made up where none is given. Two definitions need two names"),
        "num_layers": _key("number", "Transformer layers"),
        "hidden_size": _key("number", "Width; a multiple of `num_attention_heads`"),
        "num_attention_heads": _key("number", "Query heads; a multiple of `num_key_value_heads`"),
        "num_key_value_heads": _key("number", "Key and value heads"),
        "ffn_hidden_size": _key("number", "Width of the SwiGLU feed-forward"),
        "vocab_size": _key("number", "Token ids"),
        "tied_embeddings": _key(
            "`true`, `false`", "Whether the output head is the input embedding. `false` where neither preset nor file says"
        ),
    },
}

# Of tables and views alike: a column of one name means one thing, the table's own object where it is about one.
COLUMNS: Mapping[str, str] = {
    "algorithm_bytes_per_second": "message bytes over seconds",
    "allocator_retries": "times that the GPU's allocator had to free its cache and try again",
    "at": "when it happened",
    "attempt": "number of the attempt, from 1; in `v_trial` the one that counts",
    "attempt_id": "the attempt that was measured",
    "backend": "what carried it: `nccl`, `gloo`",
    "boot_id": "the kernel's name for this boot; the same on two nodes: they are simulated on one machine",
    "bus_bytes_per_second": "algorithm bandwidth times the collective's factor, which makes numbers of ranks comparable",
    "cell": "the cell's key, such as `llama-3.1-8b_64gpu_s4096_gb1024`",
    "cell_id": "number of the cell",
    "change_id": "one per write; tells whether a commit whose answer was lost has happened",
    "checks": "each check: name, status, what was found, advice",
    "clock_offset_seconds": "how far the node's clock is ahead of the head's",
    "collective": "`all_reduce`, `all_gather`, `reduce_scatter`, `send_recv`",
    "condemned_by": "of a pruned trial: the trial whose out-of-memory proves that this one cannot fit",
    "condemned_by_layout": "that trial's layout",
    "conditions": "what makes numbers incomparable when it changes",
    "confident": "whether the precision asked for was reached",
    "context_parallel_size": "ranks that share a sequence",
    "cpu_cores": "cores that the attempt could use: its affinity, or the limit of its container",
    "created_at": "when the row was made",
    "cuda": "version of CUDA",
    "data_parallel_size": "replicas",
    "detail": "what else is known of the event",
    "device_memory_bytes": "memory of one device, as the rank saw it",
    "device_name": "what the driver calls the device",
    "digest": "identity by content: 16 hex digits",
    "dirty_diff_digest": "of the uncommitted changes, with the named files that git does not track; without a checkout [of a program's files](measuring.md#what-a-number-was-measured-with); `unknown`: git did not tell; NULL: none",
    "driver": "version of the GPU driver",
    "efficiency": "tokens/s/GPU against the best of the smallest number of GPUs",
    "ended_at": "when the attempt, or the session, ended; NULL: it runs, or its orchestrator died. Of one that died: its last sign of life",
    "environment": "settings of NCCL, gloo and their like that its ranks got, as JSON: name to value, or to the value on each node",
    "epoch": "of the orchestrator that wrote it: grows with each new owner of the sweep",
    "event": "what happened: an event of the lifecycle, `added`, or `superseded`",
    "event_id": "number of the event; grows",
    "evidence": "why, in numbers",
    "facts": "all that the node said of itself",
    "failed": "the checks that failed; NULL: none",
    "failure_device_memory_bytes": "of an out-of-memory: the device's memory",
    "failure_evidence": "the text or fact that shows the kind",
    "failure_exit_code": "exit code of the first bad rank",
    "failure_kind": "what went wrong: [kinds](troubleshooting.md#kinds-of-failure)",
    "failure_log_path": "the rank's log, on the node that ran it",
    "failure_log_tail": "its last lines",
    "failure_message": "one line for a person",
    "failure_node": "node of the first bad rank",
    "failure_peak_memory_bytes": "of an out-of-memory: allocated when it struck",
    "failure_phase": "phase of the first bad rank",
    "failure_rank": "the first bad rank",
    "failure_signal": "signal that it died of",
    "failure_step": "optimizer step that it had begun",
    "ffn_hidden_size": "width of the feed-forward",
    "fingerprint_digest": "what it was measured with; of a cell: its newest measurement's",
    "first_seen_at": "when this fingerprint first measured something",
    "first_step_seconds": "time in phase first_step, slowest rank",
    "foreign_gpu_processes": "processes that were not the attempt's, on its GPUs while steps were timed (NVML); NULL: not told",
    "free_disk_bytes": "where run folders go",
    "from_state": "the trial's state before",
    "git_sha": "commit of the measured code; NULL: not a git checkout",
    "global_batch_size": "sequences of an optimizer step",
    "gpu_clock_ratio": "mean SM clock of its GPUs over the most that they can, while steps were timed (NVML)",
    "gpu_temperature_celsius": "of its hottest GPU while steps were timed (NVML)",
    "gpu_throttle_reasons": "why its GPUs ran below their highest clock, in NVML's words, with commas; `sw_power_cap` alone spoils nothing",
    "gpu_throttled_fraction": "fraction of samples in which heat, power supply or hardware slowed a GPU down",
    "gpu_power_watts": "mean power of a GPU while steps were timed (NVML)",
    "gpu_seconds": "GPUs held x seconds, placement to clean-up; in `v_trial` of the last attempt",
    "useful_gpu_seconds": "in timed steps of measurements that count: [held GPU-seconds](measuring.md#held-gpu-seconds)",
    "warmup_gpu_seconds": "in the steps before these",
    "startup_gpu_seconds": "in the rest of these attempts, around and between their steps",
    "failed_gpu_seconds": "in attempts without a measurement that counts, but for the two kinds that follow",
    "out_of_memory_gpu_seconds": "in attempts that ran out of memory",
    "lost_gpu_seconds": "in attempts that were lost with their node or orchestrator, or preempted",
    "cancelled_gpu_seconds": "in attempts that somebody ended: a second Ctrl-C, SIGTERM, `sweep cancel`",
    "in_flight_gpu_seconds": "in attempts that have not ended, when the orchestrator was last seen; NULL: not known by cell",
    "idle_gpu_seconds": "leased, and no attempt on them; NULL: not known by cell",
    "held_gpu_seconds": "the sum of these; in `session` by its gangs until `seen_at`",
    "capacity_gpu_seconds": "all slots of the cluster, as long as the orchestrator worked; NULL: not known by cell, or for a replay through Ray",
    "timed_seconds": "of its held time, in timed steps",
    "warmup_seconds": "of its held time, in the steps before these; NULL: nobody said",
    "pid": "its process id",
    "seen_at": "when it last renewed its lease",
    "price_per_gpu_hour": "US dollars, as its file or the device's list price said; NULL: not known",
    "stop_reasons": "why its cells had had enough, each reason once; NULL: it goes on, or died",
    "gpu_utilisation": "mean share of time that a kernel ran, 0 to 1, while steps were timed (NVML)",
    "grad_accum_steps": "micro-batches per replica and optimizer step",
    "hfu": "hardware FLOPs utilisation, 0 to 1: recomputed FLOPs count",
    "hidden_size": "width of the model",
    "host": "of the orchestrator; in `node_check` of the node",
    "id": "number of the row",
    "is_comparable": "whether both points of the efficiency have the same fingerprint",
    "is_current": "whether the fingerprint is the one of the cell's newest measurement",
    "is_current_fingerprint": "the same for a trial; NULL: not measured",
    "is_fit": "no check failed",
    "is_remeasured": "what was measured there counts no more",
    "kernel": "version of the kernel",
    "key": "the cell's readable name",
    "change_since_first": "of a repeat: its step time over that of its trial's first run, less 1; NULL: it is the first",
    "last_attempt_state": "how the last attempt ended",
    "layout": "the layout's key, such as `dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16`",
    "layout_key": "the same",
    "lease_until": "until when the owner holds the sweep, unless renewed",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "matmul_flops": "FLOP/s of the node's slowest device, kept up over two seconds",
    "measured_at": "when it was measured, by the clock that the sweep goes by: a simulation has dates of its own; NULL in `attempt`: as `ended_at`",
    "memory_by_part": "bytes at the peak by part, worst rank",
    "message_bytes": "of a collective: all that is reduced, gathered or sent",
    "mfu": "model FLOPs utilisation, 0 to 1; NULL: no peak is known",
    "mfu_formula": "FLOPs per token that `mfu` rests on",
    "micro_batch_size": "sequences per replica and forward pass",
    "model": "the model's name in the sweep",
    "model_digest": "its identity: two definitions have two",
    "model_name": "the model's name in the sweep",
    "name": "the sweep's name; a model's as first seen",
    "nccl": "version of NCCL",
    "node": "the node, as the scheduler calls it",
    "nodes": "names of the nodes that it ran on",
    "num_attempts": "launches so far",
    "num_calls": "calls that a time rests on",
    "num_cores": "cores of the node that processes may use",
    "num_measurements": "that count together; the numbers are those of the median one, of an even number the slower in the middle",
    "num_attention_heads": "query heads",
    "num_gpus": "GPUs of the gang (cores, where there are none); of a session: of the cluster",
    "num_key_value_heads": "key and value heads",
    "num_layers": "transformer layers",
    "num_nodes": "nodes that took part",
    "num_parameters": "weights of the model",
    "num_ranks": "ranks that took part",
    "num_steps": "timed steps",
    "number": "of the attempt, from 1",
    "options": "of a trial: the workload's options that vary, as JSON; NULL: none",
    "orchestrator_version": "of this program",
    "others_cpu_cores": "cores' worth of CPU time that went to somebody else while steps were timed: [the load by others](measuring.md#the-load-by-others)",
    "own_cpu_cores": "cores' worth of CPU time of the attempt's own processes while steps were timed",
    "owner_epoch": "the fencing token: grows with each owner",
    "owner_host": "host of the orchestrator; NULL: nobody holds the sweep",
    "owner_namespace": "in which `owner_pid` means anything: machine boot and pid namespace",
    "owner_pid": "its process id",
    "owner_since": "since when it holds the sweep",
    "owner_token": "one per opened store",
    "peak_flops": "FLOP/s of one device that `mfu` rests on",
    "peak_flops_source": "`table: ...` (data sheet) or `measured: ...` (how, and in which trial: one for all trials of a node)",
    "peak_memory_allocated_bytes": "highest allocated memory, worst rank; on a CPU live tensors",
    "peak_memory_reserved_bytes": "highest memory that the allocator held, worst rank; NULL on a CPU",
    "pipeline_parallel_size": "pipeline stages",
    "precision": "fp32, bf16, fp16 or fp8",
    "predicted_memory_bytes": "predicted peak of allocated memory",
    "predicted_tokens_per_second_per_gpu": "predicted before the trial; NULL on an unknown device",
    "processes_killed": "processes that were left beyond the ranks, and killed",
    "purpose": "why it was made: `new`, `retry`, and of what is measured `doubt` (its neighbours contradict it), `physics` (a layout that does more work was faster), `anchor` (to see whether the machine has changed), `confirmation`; NULL: before that was noted",
    "python": "version of Python",
    "reason": "`slow`, `faults`, `asked`",
    "recompute": "none, selective or full",
    "recompute_layers": "for how many layers from the first; NULL: all",
    "recompute_policy": "of selective: attention or ops",
    "relative_confidence": "half-width of the median's 95 % interval over the median; NULL: fewer than 6 steps",
    "rendezvous_seconds": "time in phase rendezvous, slowest rank",
    "seconds": "of one call: the median, of the slowest rank",
    "sequence_length": "tokens of a sequence",
    "settings": "settings of the ranks' environment that make numbers incomparable, as JSON: name to value; NULL: none",
    "shared_nodes": "whether other gangs of its orchestrator ran on its nodes meanwhile; NULL: it never had nodes, or was lost",
    "since": "from when on nothing is placed on the node",
    "smallest_num_gpus": "the number of GPUs that it is compared with",
    "run_token": "random, made with the sweep: tells its run folders from those of a sweep of the same name in another store",
    "spec_json": "the sweep file as it was last run, validated, as JSON",
    "speed_up": "tokens/s against the best of the smallest number of GPUs",
    "start_seconds": "time in phase start, slowest rank",
    "started_at": "when the attempt began, or the session: when it got the sweep",
    "state": "of a trial: see [states](architecture.md#the-life-of-a-trial); of a sweep: waiting, running, stopped, finished; of an attempt: running, measured, out_of_memory, failed, requeued, lost",
    "steady_seconds": "time in phase steady, slowest rank",
    "step_seconds": "every timed step of the slowest rank: the evidence",
    "step_seconds_iqr": "interquartile range of the timed steps",
    "step_seconds_median": "median time of an optimizer step",
    "stop_requested": "drain or cancel, asked for by `sweep cancel`",
    "superseded": "kept, but its numbers are not the trial's: invalidated, another came first, or another of the pool is the median",
    "pooled": "one of the measurements that the trial's numbers are the median of",
    "sweep": "the sweep's name",
    "sweep_cpu_cores": "cores' worth of CPU time of the sweep's other attempts, and of its orchestrator and the Ray that it started where they are on the node",
    "sweep_id": "number of the sweep",
    "teardown_seconds": "from the end of the last step to the end of the last process; for a program that reports no steps, from the program's end",
    "tensor_parallel_size": "ranks that share each layer",
    "thrashing": "ran at the memory edge with allocator retries: slower than it looks like",
    "tied_embeddings": "whether the output head is the input embedding",
    "to_state": "the trial's state after",
    "tokens_per_second": "of the whole gang",
    "tokens_per_second_per_gpu": "what is optimised",
    "torch": "version of torch",
    "trial_id": "number of the trial: what `sweep show` takes",
    "until": "when it was used again; NULL: it is benched",
    "updated_at": "when the trial last changed its state",
    "vocab_size": "token ids",
    "why": "the search's one line: why this layout, now; of a pruned trial: the proof",
    "zero_stage": "0 to 3",
}


@dataclass(frozen=True, kw_only=True)
class FailureWords:
    means: str
    do: str


def _failure(means: str, do: str) -> FailureWords:
    return FailureWords(means=means, do=do)


_K = FailureKind
FAILURES: Mapping[FailureKind, FailureWords] = {
    _K.OOM_GPU: _failure(
        "the device's allocator, or a library on the device, found no memory", "nothing: it is a result. `v_oom` lists what it rules out"
    ),
    _K.OOM_HOST: _failure(
        "the kernel's OOM killer, or malloc; tried once more with no other gang running",
        "give the node or container more memory; fewer `num_threads` or loader workers",
    ),
    _K.CONFIG_REJECTED: _failure("the workload says that it cannot run this layout", "add a constraint, so that it is not tried at all"),
    _K.NOT_FINITE: _failure(
        "the training diverged: a loss or gradient norm is NaN or infinite, as the program reports or raises it",
        "lower the learning rate or widen the precision; the message names the step",
    ),
    _K.USER_ERROR: _failure(
        "an exception or exit code of the program", "`sweep logs TRIAL`: its traceback; mend it, then `sweep invalidate`"
    ),
    _K.SEGFAULT: _failure(
        "SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS; on a GPU what the driver says that the program did (Xid 13, 31, 32, 43)",
        "its log has Python's stack (faulthandler); often a library's bug with this layout",
    ),
    _K.KILLED: _failure("SIGKILL from outside, and no sign of memory", "somebody or something killed the rank: look at the node's log"),
    _K.PREEMPTED: _failure(
        "SIGTERM, SIGINT or SIGHUP that this program did not send, or a batch system's word: preemption, time limit, a spot node that goes",
        "nothing: the trial waits; where it repeats, a longer time limit or nodes that stay. A program that ends itself with SIGTERM is counted as preempted too",
    ),
    _K.BAD_RESULT: _failure(
        "it ended well, but what it wrote is no result, or breaks physics (MFU above 1)", "the message says what is wrong with it"
    ),
    _K.HUNG: _failure(
        "no progress within the phase's limit, after the first step began",
        "its log ends with every rank's stack; if it was only slow, the message says which limit to change",
    ),
    _K.START_TIMEOUT: _failure(
        "the limit of `start` or `rendezvous` passed",
        "a slow import or a network that does not connect; if it was only slow, the message says which limit to change",
    ),
    _K.NCCL: _failure(
        "communication failed, and no rank did worse before", "`NCCL_DEBUG=INFO` before `sweep run`; the network, the firewall, `ulimit -l`"
    ),
    _K.DEVICE_ERROR: _failure(
        "an illegal access far from the memory limit that the driver does not explain, or no usable device",
        "`nvidia-smi`, `dmesg`; take the node out if it repeats",
    ),
    _K.XID: _failure(
        "the GPU's hardware failed, as NVIDIA's driver says: ECC, NVLink, off the bus, firmware; the message has the number",
        "`dmesg` on that node; reset the GPU or take the node out. Two such trials bench the node by themselves",
    ),
    _K.STORAGE: _failure(
        "disk full, over quota, read-only, stale or broken file system, or too many open files",
        "`df`, the quota, `ulimit -n` and the mounts of the node that it names",
    ),
    _K.PORT_CLASH: _failure("a port was taken", "a program that picks its own port: let it use MASTER_PORT"),
    _K.LAUNCH_FAILED: _failure(
        "the launcher could not start the ranks, or got no nodes", "the message says why: folder, foreign process on the GPU, no slots"
    ),
    _K.NODE_LOST: _failure("the node, or its agent, is gone", "look after the node; what is left of the cluster goes on"),
    _K.ORCHESTRATOR_LOST: _failure(
        "the attempt's orchestrator was killed; found by the next `sweep run`",
        "nothing: the trial waits again; where it failed so, see whether it takes the machine down, then `sweep invalidate`",
    ),
    _K.CANCELLED: _failure(
        "ended by Ctrl-C, SIGTERM, a closed terminal or `sweep cancel`", "nothing: the trial waits for the next `sweep run`"
    ),
}

# What an option takes. What it means and its default stand in core/sweepfile/workload_options.py.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "llama": {
        "attention": "`sdpa`, `eager`",
        "gradient_dtype": "`bf16`, `fp32`",
        "learning_rate": "number",
        "token_file": "path",
        "token_dtype": "`uint16`, `uint32`",
        "num_threads": "number",
        "memory_limit_bytes": "number",
    },
    "synthetic": {
        "device_name": "device",
        "device_memory_bytes": "number",
        "noise": "fraction",
        "time_scale": "number",
        "sleep": "`true`, `false`",
        "one_rank_per_node": "`true`, `false`",
        "faults": "list",
        "drift": "list",
    },
    "command": {
        "argv": "list of texts",
        "env": "mapping of texts",
        "env_from": "list of names",
        "pass_env": "list of names and patterns",
        "cwd": "absolute path",
    },
    "replay": {"table": "path", "table_id": "text", "through_ray": "`true`, `false`"},
}

DRIFTS: Mapping[str, str] = {
    "slow_start": "steps take `1 + size` times as long until `seconds` have passed",
    "step": "the same from `seconds` on; a negative `size` is faster",
    "wave": "slower and back again within every `seconds`, by `size` at most",
    "slow_node": "gangs with this `node` take `1 + size` times as long, always",
}
FAULTS: Mapping[str, str] = {
    "oom": "torch's out-of-memory error",
    "host_oom": "MemoryError",
    "config_rejected": "the workload refuses the layout",
    "crash": "an exception",
    "exit": "exit code 1, no word said",
    "segfault": "SIGSEGV",
    "abort": "SIGABRT",
    "nan_loss": "the loss is NaN",
    "preempted": "SIGTERM",
    "xid": "the driver's Xid 79 in the log, and a CUDA error",
    "lost_rank": "SIGKILL",
    "hang": "sleeps for ever",
    "hang_in_c": "hangs without giving the interpreter back",
    "hang_ignoring_signals": "hangs, and ignores every signal that can be ignored",
    "stop": "SIGSTOP",
    "nccl_noise": "harmless NCCL words in the log",
    "nccl_error": "an NCCL error",
    "port_clash": "an address already in use",
    "rubbish_result": "a result that is none",
    "no_result": "ends well, without a result",
    "leak_children": "leaves a child, a grandchild, daemons and loader workers behind",
    "leak_unmarked_child": "leaves a child in a session of its own, with an empty environment",
    "log_flood": "prints 30 MB",
}

PLACEHOLDERS: Mapping[str, str] = {
    "data_parallel_size": "the layout's",
    "tensor_parallel_size": "the layout's",
    "pipeline_parallel_size": "the layout's",
    "context_parallel_size": "the layout's",
    "micro_batch_size": "the layout's",
    "grad_accum_steps": "the layout's",
    "recompute": "as in the sweep file: `full:8`",
    "zero_stage": "the layout's",
    "precision": "the layout's",
    "world_size": "ranks of the gang",
    "global_batch_size": "sequences of an optimizer step",
    "sequence_length": "tokens of a sequence",
    "num_steps": "`warmup_steps` + `max_steps`",
    "seed": "`search.seed`",
    "run_dir": "a folder for this attempt",
    "result_file": "where its result goes",
    "metrics_file": "where its lines go",
}

RESULT: Mapping[str, str] = {
    "step_seconds": "seconds of each timed optimizer step, in order; required",
    "warmup_seconds": "those of the warm-up",
    "tokens_per_step": "of all ranks; without it, global batch x sequence length",
    "phase_seconds": "seconds in `start`, `rendezvous`, `first_step`, `steady`, `teardown`",
    "peak_memory_allocated_bytes": "highest allocated memory",
    "peak_memory_reserved_bytes": "highest memory that the allocator held",
    "memory_bytes_by_part": 'bytes at the peak by part, such as `{"parameters": 123}`',
    "device_memory_bytes": "memory of the device",
    "allocator_retries": "how often the allocator freed its cache and tried again",
    "peak_flops": "peak FLOP/s of one device at this precision; without it there is no MFU",
    "peak_flops_source": "where that comes from",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step; NaN, infinite, or null after a `loss_first` that is a number: the training diverged (`not_finite`)",
    "gradient_norm": "of the last step; not finite: the training diverged",
    "collectives": "of workload netbench: each collective and message size with its seconds",
    "stack": "`python`, `torch`, `cuda`, `nccl`, `driver`, `device_name`: part of the fingerprint",
}

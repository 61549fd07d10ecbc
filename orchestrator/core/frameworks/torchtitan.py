"""Command-line arguments of torchtitan, to add to --module and --config.

Checked with torchtitan 0.3. Before 0.3 the same names were keys of a TOML file, except
activation_checkpoint, whose mode was a key there.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import Expression, derived, impossible, named, written
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode, SelectivePolicy


def _data_parallel(job: Job) -> Expression:
    size, is_sharded = job.layout.data_parallel_size, job.layout.zero_stage >= 2
    return named(
        {
            "parallelism.data_parallel_replicate_degree": 1 if is_sharded else size,
            "parallelism.data_parallel_shard_degree": size if is_sharded else 1,
        }
    )


def _micro_batch(job: Job) -> Expression:
    """A pipeline splits its local batch into micro-batches; nothing else accumulates in it."""
    layout = job.layout
    if layout.pipeline_parallel_size == 1:
        return named({"training.local_batch_size": layout.micro_batch_size})
    return named(
        {
            "training.local_batch_size": layout.micro_batch_size * layout.grad_accum_steps,
            "parallelism.pipeline_parallel_microbatch_size": layout.micro_batch_size,
        }
    )


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if job.recomputed_layers is not None:
        return impossible("torchtitan recomputes all layers or none")
    if recompute.policy is SelectivePolicy.ATTENTION:
        return impossible("torchtitan's selective policy keeps attention: selective_ops")
    mode = "none" if recompute.mode is RecomputeMode.NONE else recompute.mode.value
    return named({"activation_checkpoint:": mode})


def _zero(job: Job) -> Expression:
    match job.layout.zero_stage:
        case 0:
            return Expression()
        case 1:
            return impossible("torchtitan shards gradients with the optimizer: ZeRO 2 or 3")
        case stage:
            # FSDP2 keeps the gathered parameters from forward to backward if it does not reshard.
            policy = "always" if stage == 3 else "never"
            return named({"parallelism.fsdp_reshard_after_forward": policy})


def _precision(job: Job) -> Expression:
    match job.layout.precision:
        case Precision.BF16:
            dtype = "bfloat16"
        case Precision.FP32:
            dtype = "float32"
        case Precision.FP8:
            return impossible("torchtitan has fp8 in its --config functions, not as an argument")
        case Precision.FP16:
            return impossible("torchtitan has bfloat16 and float32")
    return named({"training.mixed_precision_param": dtype})


RULES = {
    "data_parallel_size": _data_parallel,
    "tensor_parallel_size": written("tensor_parallel_size", "parallelism.tensor_parallel_degree"),
    "pipeline_parallel_size": written(
        "pipeline_parallel_size", "parallelism.pipeline_parallel_degree"
    ),
    "context_parallel_size": written(
        "context_parallel_size", "parallelism.context_parallel_degree"
    ),
    "micro_batch_size": _micro_batch,
    "grad_accum_steps": derived,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": written("sequence_length", "training.seq_len"),
    "global_batch_size": written("global_batch_size", "training.global_batch_size"),
    "processes": derived,
}

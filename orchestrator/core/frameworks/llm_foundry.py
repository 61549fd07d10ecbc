"""Keys of MosaicML llm-foundry's YAML file (`composer train.py FILE`).

Checked with llm-foundry 0.22. Recomputation is a part of FSDP there.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    DERIVED,
    Expression,
    derived,
    impossible,
    named,
    settings,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_SHARDING = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
_PRECISIONS = {
    Precision.FP32: "fp32",
    Precision.BF16: "amp_bf16",
    Precision.FP16: "amp_fp16",
    Precision.FP8: "amp_fp8",
}


def _tensor_parallel(job: Job) -> Expression:
    if job.layout.tensor_parallel_size == 1:
        return DERIVED
    return impossible("llm-foundry's tensor parallelism splits feed-forward layers alone")


def _pipeline_parallel(job: Job) -> Expression:
    if job.layout.pipeline_parallel_size == 1:
        return DERIVED
    return impossible("llm-foundry has no pipeline parallelism")


def _context_parallel(job: Job) -> Expression:
    if job.layout.context_parallel_size == 1:
        return DERIVED
    return impossible("llm-foundry has no context parallelism")


def _micro_batch(job: Job) -> Expression:
    return settings(device_train_microbatch_size=job.layout.micro_batch_size)


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.SELECTIVE:
        return impossible("llm-foundry recomputes whole modules")
    if recompute.mode is RecomputeMode.FULL and job.cell.num_gpus == 1:
        return impossible("llm-foundry recomputes with FSDP only: more than one GPU")
    found = {"fsdp_config.activation_checkpointing": job.is_fully_recomputed}
    if job.recomputed_layers is None:
        return named(found)
    target = {"model.activation_checkpointing_target.mptblock": f"first-{job.recomputed_layers}"}
    return named(found | target)


def _zero(job: Job) -> Expression:
    strategy = _SHARDING.get(job.layout.zero_stage)
    if strategy is None:
        return impossible("FSDP shards gradients with the optimizer: ZeRO 2 or 3")
    return named({"fsdp_config.sharding_strategy": strategy})


def _precision(job: Job) -> Expression:
    return settings(precision=_PRECISIONS[job.layout.precision])


def _sequence_length(job: Job) -> Expression:
    return settings(max_seq_len=job.cell.sequence_length)


def _global_batch(job: Job) -> Expression:
    return settings(global_train_batch_size=job.cell.global_batch_size)


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": _tensor_parallel,
    "pipeline_parallel_size": _pipeline_parallel,
    "context_parallel_size": _context_parallel,
    "micro_batch_size": _micro_batch,
    "grad_accum_steps": derived,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": _sequence_length,
    "global_batch_size": _global_batch,
    "processes": derived,
}

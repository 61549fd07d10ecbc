"""Keys of MosaicML llm-foundry's YAML file (`composer train.py FILE`).

Checked with llm-foundry 0.22. Recomputation is a part of FSDP there.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    Expression,
    derived,
    impossible,
    named,
    only_one,
    settings,
    written,
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


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": only_one(
        "tensor_parallel_size", "llm-foundry's tensor parallelism splits feed-forward layers alone"
    ),
    "pipeline_parallel_size": only_one(
        "pipeline_parallel_size", "llm-foundry has no pipeline parallelism"
    ),
    "context_parallel_size": only_one(
        "context_parallel_size", "llm-foundry has no context parallelism"
    ),
    "micro_batch_size": written("micro_batch_size", "device_train_microbatch_size"),
    "grad_accum_steps": derived,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": written("sequence_length", "max_seq_len"),
    "global_batch_size": written("global_batch_size", "global_train_batch_size"),
    "processes": derived,
}

"""The configuration file of DeepSpeed (ds_config.json).

Checked with DeepSpeed 0.18. Pipelines and recomputation are calls in the user's program there.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    DERIVED,
    Expression,
    derived,
    impossible,
    named,
    only_one,
    program,
    sequence_length_of_dataset,
    written,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode


def _tensor_parallel(job: Job) -> Expression:
    size = job.layout.tensor_parallel_size
    if size == 1:
        return DERIVED
    if job.layout.zero_stage == 3:
        return impossible("DeepSpeed's AutoTP goes with ZeRO 0, 1 and 2")
    return named({"tensor_parallel.autotp_size": size})


def _pipeline_parallel(job: Job) -> Expression:
    size = job.layout.pipeline_parallel_size
    if size == 1:
        return DERIVED
    if job.layout.zero_stage >= 2:
        return impossible("DeepSpeed's pipelines go with ZeRO 0 and 1")
    return program(f"build deepspeed.pipe.PipelineModule(num_stages={size})")


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.NONE:
        return DERIVED
    layers = f"the first {job.recomputed_layers}" if job.recomputed_layers else "all"
    what = "whole layers"
    if recompute.policy is not None:
        what = f"the {recompute.policy} of layers"
    return program(f"recompute {what} with torch.utils.checkpoint, for {layers} layers")


def _precision(job: Job) -> Expression:
    if job.has(Precision.FP8):
        return impossible("DeepSpeed's file has no fp8")
    return named(
        {
            "bf16.enabled": job.has(Precision.BF16),
            "fp16.enabled": job.has(Precision.FP16),
        }
    )


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": _tensor_parallel,
    "pipeline_parallel_size": _pipeline_parallel,
    "context_parallel_size": only_one(
        "context_parallel_size",
        "DeepSpeed splits sequences in the program (Ulysses), not in its file",
    ),
    "micro_batch_size": written("micro_batch_size", "train_micro_batch_size_per_gpu"),
    "grad_accum_steps": written("grad_accum_steps", "gradient_accumulation_steps"),
    "recompute": _recompute,
    "zero_stage": written("zero_stage", "zero_optimization.stage"),
    "precision": _precision,
    "sequence_length": sequence_length_of_dataset,
    "global_batch_size": written("global_batch_size", "train_batch_size"),
    "processes": derived,
}

"""TrainingArguments of Hugging Face transformers, as a JSON file for HfArgumentParser.

Checked with transformers 5.17 and 5.24. Every version before 6 knows gradient_checkpointing; from
5.23 on it is the old name of activation_checkpointing.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    DERIVED,
    Expression,
    derived,
    impossible,
    named,
    only_1f1b,
    only_one,
    sequence_length_of_dataset,
    settings,
    written,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_ACCELERATE = "TrainingArguments takes it as an object, from no file: accelerate's file has it"


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.SELECTIVE:
        return impossible("the Trainer recomputes whole layers, or nothing")
    if job.recomputed_layers is not None:
        return impossible("the Trainer recomputes all layers, or every n-th of them")
    if job.layout.zero_stage >= 2:
        return named(
            {
                "fsdp_config.activation_checkpointing": job.is_fully_recomputed,
                # FSDP recomputes instead of the model: both together are an error.
                "gradient_checkpointing": False,
            }
        )
    return settings(gradient_checkpointing=job.is_fully_recomputed)


def _zero(job: Job) -> Expression:
    match job.layout.zero_stage:
        case 0:
            return DERIVED
        case 1:
            return named(
                {
                    "deepspeed.zero_optimization.stage": 1,
                    "deepspeed.train_micro_batch_size_per_gpu": "auto",
                    "deepspeed.gradient_accumulation_steps": "auto",
                    "deepspeed.bf16.enabled": "auto",
                    "deepspeed.fp16.enabled": "auto",
                }
            )
        case stage:
            # FSDP2 keeps the gathered parameters from forward to backward if it does not reshard.
            return named(
                {
                    "fsdp": True,
                    "fsdp_config.version": 2,
                    "fsdp_config.reshard_after_forward": stage == 3,
                }
            )


def _precision(job: Job) -> Expression:
    if job.has(Precision.FP8):
        return impossible("TrainingArguments has no fp8: accelerate's file has it")
    return settings(bf16=job.has(Precision.BF16), fp16=job.has(Precision.FP16))


# transformers prefers the new name, so a user's key of that name would win over the layout.
NEW_NAMES = frozenset({"activation_checkpointing"})
RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": only_one("tensor_parallel_size", _ACCELERATE),
    "pipeline_parallel_size": only_one(
        "pipeline_parallel_size", "the Trainer has no pipeline parallelism"
    ),
    "context_parallel_size": only_one("context_parallel_size", _ACCELERATE),
    "micro_batch_size": written("micro_batch_size", "per_device_train_batch_size"),
    "grad_accum_steps": written("grad_accum_steps", "gradient_accumulation_steps"),
    "pipeline_schedule": only_1f1b("the Trainer has no pipeline parallelism"),
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": sequence_length_of_dataset,
    "global_batch_size": derived,
    "processes": derived,
}

"""Sections of nanotron's YAML file (`run_train.py --config-file`).

Checked with the dataclasses of April 2026. Release 0.4 lacks recomputation and context parallelism.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import Expression, derived, impossible, named, written
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.SELECTIVE or job.recomputed_layers is not None:
        return impossible("nanotron recomputes whole layers, all of them or none")
    return named({"parallelism.recompute_layer": job.is_fully_recomputed})


def _zero(job: Job) -> Expression:
    stage = job.layout.zero_stage
    if stage > 1:
        return impossible(f"nanotron has ZeRO 0 and 1, not {stage}")
    return named({"optimizer.zero_stage": stage})


def _precision(job: Job) -> Expression:
    dtype = _DTYPES.get(job.layout.precision)
    if dtype is None:
        return impossible("nanotron trains in bfloat16, float16 and float32")
    return named({"model.dtype": dtype})


RULES = {
    "data_parallel_size": written("data_parallel_size", "parallelism.dp"),
    "tensor_parallel_size": written("tensor_parallel_size", "parallelism.tp"),
    "pipeline_parallel_size": written("pipeline_parallel_size", "parallelism.pp"),
    "context_parallel_size": written("context_parallel_size", "parallelism.context_parallel_size"),
    "micro_batch_size": written("micro_batch_size", "tokens.micro_batch_size"),
    "grad_accum_steps": written("grad_accum_steps", "tokens.batch_accumulation_per_replica"),
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": written("sequence_length", "tokens.sequence_length"),
    "global_batch_size": derived,
    "processes": derived,
}

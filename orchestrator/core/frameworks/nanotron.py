"""Sections of nanotron's YAML file (`run_train.py --config-file`).

Checked with the dataclasses of April 2026. Release 0.4 lacks recomputation and context parallelism.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    Expression,
    derived,
    impossible,
    named,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}


def _data_parallel(job: Job) -> Expression:
    return named({"parallelism.dp": job.layout.data_parallel_size})


def _tensor_parallel(job: Job) -> Expression:
    return named({"parallelism.tp": job.layout.tensor_parallel_size})


def _pipeline_parallel(job: Job) -> Expression:
    return named({"parallelism.pp": job.layout.pipeline_parallel_size})


def _context_parallel(job: Job) -> Expression:
    return named({"parallelism.context_parallel_size": job.layout.context_parallel_size})


def _micro_batch(job: Job) -> Expression:
    return named({"tokens.micro_batch_size": job.layout.micro_batch_size})


def _accumulation(job: Job) -> Expression:
    return named({"tokens.batch_accumulation_per_replica": job.layout.grad_accum_steps})


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


def _sequence_length(job: Job) -> Expression:
    return named({"tokens.sequence_length": job.cell.sequence_length})


RULES = {
    "data_parallel_size": _data_parallel,
    "tensor_parallel_size": _tensor_parallel,
    "pipeline_parallel_size": _pipeline_parallel,
    "context_parallel_size": _context_parallel,
    "micro_batch_size": _micro_batch,
    "grad_accum_steps": _accumulation,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": _sequence_length,
    "global_batch_size": derived,
    "processes": derived,
}

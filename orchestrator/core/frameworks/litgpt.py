"""The configuration file of litgpt (`litgpt pretrain --config`).

Checked with litgpt 0.5. Its pretraining shards within a node, whatever is asked.
"""

from __future__ import annotations

from collections.abc import Callable

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


def _only_data_parallel(name: str) -> Callable[[Job], Expression]:
    def rule(job: Job) -> Expression:
        if getattr(job.layout, name) == 1:
            return DERIVED
        return impossible("litgpt's pretraining is data-parallel only")

    return rule


def _micro_batch(job: Job) -> Expression:
    return named({"train.micro_batch_size": job.layout.micro_batch_size})


def _recompute(job: Job) -> Expression:
    if job.layout.recompute.mode is RecomputeMode.NONE:
        return DERIVED
    return impossible("litgpt's pretraining recomputes nothing")


def _zero(job: Job) -> Expression:
    stage, num_gpus = job.layout.zero_stage, job.cell.num_gpus
    if num_gpus == 1 and stage == 0:
        return DERIVED
    if num_gpus > 1 and stage == 3 and job.num_nodes == 1:
        return DERIVED
    return impossible("litgpt's pretraining is ZeRO 3 within each node, and 0 on one GPU")


def _precision(job: Job) -> Expression:
    match job.layout.precision:
        case Precision.BF16:
            return settings(precision="bf16-mixed")
        case Precision.FP32:
            return settings(precision="32-true")
        case precision:
            return impossible(f"litgpt's pretraining has bf16 and fp32, not {precision}")


def _sequence_length(job: Job) -> Expression:
    return named({"train.max_seq_length": job.cell.sequence_length})


def _global_batch(job: Job) -> Expression:
    return named({"train.global_batch_size": job.cell.global_batch_size})


def _processes(job: Job) -> Expression:
    return settings(devices=job.gpus_per_node, num_nodes=job.num_nodes)


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": _only_data_parallel("tensor_parallel_size"),
    "pipeline_parallel_size": _only_data_parallel("pipeline_parallel_size"),
    "context_parallel_size": _only_data_parallel("context_parallel_size"),
    "micro_batch_size": _micro_batch,
    "grad_accum_steps": derived,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": _sequence_length,
    "global_batch_size": _global_batch,
    "processes": _processes,
}

"""The configuration file of litgpt (`litgpt pretrain --config`).

Checked with litgpt 0.5. Its pretraining always shards within a node.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    DERIVED,
    Expression,
    derived,
    impossible,
    only_1f1b,
    only_one,
    settings,
    written,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_DATA_PARALLEL = "litgpt's pretraining is data-parallel only"


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


def _processes(job: Job) -> Expression:
    return settings(devices=job.gpus_per_node, num_nodes=job.num_nodes)


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": only_one("tensor_parallel_size", _DATA_PARALLEL),
    "pipeline_parallel_size": only_one("pipeline_parallel_size", _DATA_PARALLEL),
    "context_parallel_size": only_one("context_parallel_size", _DATA_PARALLEL),
    "micro_batch_size": written("micro_batch_size", "train.micro_batch_size"),
    "grad_accum_steps": derived,
    "pipeline_schedule": only_1f1b(_DATA_PARALLEL),
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": written("sequence_length", "train.max_seq_length"),
    "global_batch_size": written("global_batch_size", "train.global_batch_size"),
    "processes": _processes,
}

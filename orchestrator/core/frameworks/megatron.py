"""Command-line arguments of Megatron-LM (pretrain_gpt.py).

Checked with the parser of August 2026. Its ranks are started by torchrun.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import (
    DERIVED,
    Expression,
    derived,
    impossible,
    named,
    written,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode, SelectivePolicy


def _tensor_parallel(job: Job) -> Expression:
    size = job.layout.tensor_parallel_size
    return _with_one_connection(job, "tensor-model-parallel-size", size)


def _context_parallel(job: Job) -> Expression:
    return _with_one_connection(job, "context-parallel-size", job.layout.context_parallel_size)


def _with_one_connection(job: Job, name: str, size: int) -> Expression:
    """Megatron asks for one connection to a GPU before Blackwell, but its FSDP for more."""
    if size == 1 or job.layout.zero_stage >= 2:
        return named({name: size})
    return Expression(
        settings={name: size},
        program="set CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell",
    )


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.NONE:
        return DERIVED
    if recompute.mode is RecomputeMode.FULL:
        return _full(job)
    if recompute.policy is SelectivePolicy.OPS:
        return impossible("Megatron's selective recomputation is that of attention")
    if job.recomputed_layers is not None:
        return impossible("Megatron recomputes attention in all layers or none")
    return named({"recompute-granularity": "selective", "recompute-modules": "core_attn"})


def _full(job: Job) -> Expression:
    num_layers = job.recomputed_layers
    if num_layers is None:
        return named(
            {
                "recompute-granularity": "full",
                "recompute-method": "uniform",
                "recompute-num-layers": 1,
            }
        )
    if job.layout.pipeline_parallel_size > 1:
        return impossible("with a pipeline Megatron counts the layers of each stage")
    return named(
        {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": num_layers,
        }
    )


def _zero(job: Job) -> Expression:
    match job.layout.zero_stage:
        case 0:
            return DERIVED
        case 1:
            return named({"use-distributed-optimizer": True})
        case stage:
            strategy = "optim_grads_params" if stage == 3 else "optim_grads"
            return named(
                {
                    "use-distributed-optimizer": True,
                    "use-megatron-fsdp": True,
                    "data-parallel-sharding-strategy": strategy,
                    "no-gradient-accumulation-fusion": True,
                    "ckpt-format": "fsdp_dtensor",
                }
            )


def _precision(job: Job) -> Expression:
    match job.layout.precision:
        case Precision.FP32:
            return DERIVED
        case Precision.FP8:
            return named({"bf16": True, "fp8-format": "hybrid"})
        case precision:
            return named({precision.value: True})


def _sequence_length(job: Job) -> Expression:
    length = job.cell.sequence_length
    return named({"seq-length": length, "max-position-embeddings": length})


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": _tensor_parallel,
    "pipeline_parallel_size": written("pipeline_parallel_size", "pipeline-model-parallel-size"),
    "context_parallel_size": _context_parallel,
    "micro_batch_size": written("micro_batch_size", "micro-batch-size"),
    "grad_accum_steps": derived,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": _sequence_length,
    "global_batch_size": written("global_batch_size", "global-batch-size"),
    "processes": derived,
}

"""The configuration file of Hugging Face accelerate (`accelerate launch --config_file`).

Checked with accelerate 1.15. ZeRO 1 is DeepSpeed there, 2 and 3 are FSDP2.
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
    settings,
)
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import Precision, RecomputeMode

_NEEDS_FSDP = "accelerate has it with FSDP2 only: ZeRO 2 or 3"


def _mesh(job: Job, size: int, name: str) -> Expression:
    if size == 1:
        return DERIVED
    if job.layout.zero_stage < 2:
        return impossible(_NEEDS_FSDP)
    shards = job.layout.data_parallel_size
    return named(
        {
            "parallelism_config.parallelism_config_dp_shard_size": shards,
            f"parallelism_config.parallelism_config_{name}_size": size,
        }
    )


def _tensor_parallel(job: Job) -> Expression:
    return _mesh(job, job.layout.tensor_parallel_size, "tp")


def _context_parallel(job: Job) -> Expression:
    return _mesh(job, job.layout.context_parallel_size, "cp")


def _micro_batch(job: Job) -> Expression:
    return program(f"give your DataLoader batch_size={job.layout.micro_batch_size}")


def _accumulation(job: Job) -> Expression:
    steps = job.layout.grad_accum_steps
    if job.layout.zero_stage == 1:
        return named({"deepspeed_config.gradient_accumulation_steps": steps})
    return program(f"create Accelerator(gradient_accumulation_steps={steps})")


def _recompute(job: Job) -> Expression:
    recompute = job.layout.recompute
    if recompute.mode is RecomputeMode.SELECTIVE or job.recomputed_layers is not None:
        return impossible("accelerate recomputes whole layers, all of them or none")
    if job.layout.zero_stage >= 2:
        return named({"fsdp_config.fsdp_activation_checkpointing": job.is_fully_recomputed})
    if job.is_fully_recomputed:
        return program("call model.gradient_checkpointing_enable()")
    return DERIVED


def _zero(job: Job) -> Expression:
    match job.layout.zero_stage:
        case 0:
            kind = "MULTI_GPU" if job.cell.num_gpus > 1 else "NO"
            return settings(distributed_type=kind)
        case 1:
            return named({"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": 1})
        case stage:
            return named(
                {
                    "distributed_type": "FSDP",
                    "fsdp_config.fsdp_version": 2,
                    "fsdp_config.fsdp_reshard_after_forward": stage == 3,
                    "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                }
            )


def _precision(job: Job) -> Expression:
    match job.layout.precision:
        case Precision.FP32:
            return settings(mixed_precision="no")
        case Precision.FP8:
            return Expression(
                settings={"mixed_precision": "fp8"},
                program="choose fp8_config.backend: TE or AO",
            )
        case precision:
            return settings(mixed_precision=precision.value)


def _processes(job: Job) -> Expression:
    return Expression(
        settings={
            "compute_environment": "LOCAL_MACHINE",
            "num_machines": job.num_nodes,
            "num_processes": job.cell.num_gpus,
        },
        program="on node N start it with --machine_rank=N --main_process_ip=HOST, of node 0"
        if job.num_nodes > 1
        else None,
    )


RULES = {
    "data_parallel_size": derived,
    "tensor_parallel_size": _tensor_parallel,
    "pipeline_parallel_size": only_one(
        "pipeline_parallel_size", "accelerate has pipelines only through Megatron-LM"
    ),
    "context_parallel_size": _context_parallel,
    "micro_batch_size": _micro_batch,
    "grad_accum_steps": _accumulation,
    "recompute": _recompute,
    "zero_stage": _zero,
    "precision": _precision,
    "sequence_length": sequence_length_of_dataset,
    "global_batch_size": derived,
    "processes": _processes,
}

"""A training run that never happens: how much memory it would take, and how long a step, in closed form.

Deliberately another model than the one that plans: a planner that was tested against its own formulas would always be right.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.hardware import Hardware
from orchestrator.core.layout import Layout, Precision, RecomputeMode
from orchestrator.core.model_shape import ModelShape

_PEAK_EFFICIENCY = 0.6  # of the device's FLOP/s, for endlessly large matrices
_HALF_EFFICIENCY_TOKENS = 1024.0  # tokens a micro-batch at which half of that is reached
_KERNEL_SECONDS_PER_LAYER = 60e-6  # launch overhead, forward and backward, whatever the size
_OVERLAPPED = 0.7  # of gradient communication, behind the backward pass
_RUNTIME_BYTES = 1 << 30  # CUDA context, NCCL buffers, fragmentation


@dataclass(frozen=True, kw_only=True)
class MemoryByPhase:
    """Bytes in use on the fullest rank, as a run goes on: optimizer states appear at the end of the first step."""

    init: int
    forward: int
    step_2: int


def memory(model: ModelShape, layout: Layout, sequence_length: int) -> MemoryByPhase:
    parameters = model.num_parameters / (layout.tensor_parallel_size * layout.pipeline_parallel_size)
    width = 4 if layout.precision is Precision.FP32 else 2
    shards = layout.data_parallel_size * layout.context_parallel_size
    weights = width * parameters / (shards if layout.zero_stage >= 3 else 1)
    gradients = width * parameters / (shards if layout.zero_stage >= 2 else 1)
    states = (16 - 2 * width) * parameters / (shards if layout.zero_stage >= 1 else 1)  # Adam, and fp32 master weights where needed
    activations = _activations(model, layout, sequence_length)
    return MemoryByPhase(
        init=int(_RUNTIME_BYTES + weights),
        forward=int(_RUNTIME_BYTES + weights + gradients + activations),
        step_2=int(_RUNTIME_BYTES + weights + gradients + states + activations),
    )


def _activations(model: ModelShape, layout: Layout, sequence_length: int) -> float:
    """Bytes on the first pipeline stage, which holds as many micro-batches as there are stages."""
    tokens = layout.micro_batch_size * sequence_length / layout.context_parallel_size
    per_token = 34 * model.hidden_size / layout.tensor_parallel_size  # Korthikanti et al. 2022, with flash attention
    kept = {RecomputeMode.NONE: 1.0, RecomputeMode.SELECTIVE: 0.6, RecomputeMode.FULL: 2 / 34}[layout.recompute.mode]
    recomputed = layout.recompute.layers_of(model.num_layers)
    layers = (recomputed * kept + (model.num_layers - recomputed)) / layout.pipeline_parallel_size
    in_flight = min(layout.pipeline_parallel_size, layout.grad_accum_steps)
    logits = 6 * tokens * model.vocab_size / layout.tensor_parallel_size
    return tokens * per_token * layers * in_flight + logits


def step_seconds(model: ModelShape, layout: Layout, sequence_length: int, hardware: Hardware) -> float:
    """Seconds of one optimizer step of the gang."""
    tokens = layout.micro_batch_size * sequence_length / layout.context_parallel_size
    flops = model.flops_per_token(sequence_length) + model.recomputed_flops_per_token(sequence_length, layout.recompute)
    model_parallel = layout.tensor_parallel_size * layout.pipeline_parallel_size
    efficiency = _PEAK_EFFICIENCY * tokens / (tokens + _HALF_EFFICIENCY_TOKENS * layout.tensor_parallel_size)
    compute = tokens * flops / model_parallel / (hardware.peak_flops[layout.precision] * efficiency)
    layers = model.num_layers / layout.pipeline_parallel_size
    tensor = 0.0
    if layout.tensor_parallel_size > 1:  # four all-reduces a layer, ring, 2 bytes a value
        tensor = layers * 4 * 2 * (layout.tensor_parallel_size - 1) / layout.tensor_parallel_size * tokens * model.hidden_size * 2
        tensor /= hardware.intra_node_bandwidth
    micro_batch = compute + tensor + layers * _KERNEL_SECONDS_PER_LAYER
    bubble = (layout.pipeline_parallel_size - 1) * micro_batch
    return layout.grad_accum_steps * micro_batch + bubble + _gradient_seconds(model, layout, hardware)


def _gradient_seconds(model: ModelShape, layout: Layout, hardware: Hardware) -> float:
    shards = layout.data_parallel_size * layout.context_parallel_size
    if shards == 1:
        return 0.0
    gradient_bytes = 2 * model.num_parameters / (layout.tensor_parallel_size * layout.pipeline_parallel_size)
    bandwidth = hardware.intra_node_bandwidth if layout.world_size <= 8 else hardware.inter_node_bandwidth
    seconds = 2 * gradient_bytes * (shards - 1) / shards / bandwidth
    gathers = layout.grad_accum_steps if layout.zero_stage >= 3 else 0  # weights, once per forward and backward of each micro-batch
    return (1 - _OVERLAPPED) * seconds * (1 + gathers)

"""A simulated training run in closed form: its memory, its step times and its faults.

This model deliberately differs from the planner's, which would otherwise be tested against its own
formulas. Random numbers derive from names: an attempt is the same in a rank and in a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from math import cos, exp, pi
from statistics import NormalDist

from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Layout, Precision, RecomputeMode
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.synthetic_options import (
    DriftKind,
    SyntheticDrift,
    SyntheticFault,
    SyntheticOptions,
)
from orchestrator.core.trial.protocol import TrialRequest

_PEAK_EFFICIENCY = 0.6  # of the device's FLOP/s, at most
_HALF_EFFICIENCY_TOKENS = 1024.0  # per micro-batch, for half of that
_KERNEL_SECONDS_PER_LAYER = 60e-6  # launches, forward and backward
_OVERLAPPED = 0.7  # of gradient communication
_RUNTIME_BYTES = 1 << 30  # CUDA context, NCCL buffers, fragmentation


@dataclass(frozen=True, kw_only=True)
class MemoryByPhase:
    """Bytes in use on the fullest rank. Optimizer states appear at the end of the first step."""

    init: int
    forward: int
    step_2: int


def memory(model: ModelShape, layout: Layout, sequence_length: int) -> MemoryByPhase:
    parameters = _parameters(model, layout)
    width = 4 if layout.precision is Precision.FP32 else 2
    shards = layout.data_parallel_size * layout.context_parallel_size
    weights = width * parameters / (shards if layout.zero_stage >= 3 else 1)
    gradients = width * parameters / (shards if layout.zero_stage >= 2 else 1)
    # Adam, and fp32 master weights if the weights have another precision.
    states = (16 - 2 * width) * parameters / (shards if layout.zero_stage >= 1 else 1)
    activations = _activations(model, layout, sequence_length)
    return MemoryByPhase(
        init=int(_RUNTIME_BYTES + weights),
        forward=int(_RUNTIME_BYTES + weights + gradients + activations),
        step_2=int(_RUNTIME_BYTES + weights + gradients + states + activations),
    )


def noisy_steps(
    request: TrialRequest, options: SyntheticOptions, hardware: Hardware
) -> Iterator[float]:
    """Yield step times forever. All ranks draw the same noise, since they wait for each other."""
    seconds = options.time_scale * step_seconds(
        request.model, request.layout, request.sequence_length, hardware
    )
    seconds *= slowness(options.drift, request.elapsed_seconds, request.nodes)
    name = request.seed, request.layout.key, request.attempt
    for step in count(1):
        yield seconds * log_normal(options.noise, *name, step)


def slowness(
    drifts: Sequence[SyntheticDrift], elapsed_seconds: float, nodes: Sequence[str]
) -> float:
    """Return the factor on the step time of an attempt that began then, on these nodes."""
    factor = 1.0
    for drift in drifts:
        if drift.node is None or drift.node in nodes:
            factor *= 1.0 + drift.size * _strength(drift, elapsed_seconds)
    return factor


def _strength(drift: SyntheticDrift, elapsed_seconds: float) -> float:
    """Return the share of the drift's size, 0 to 1."""
    match drift.kind:
        case DriftKind.SLOW_START:
            return float(elapsed_seconds < drift.seconds)
        case DriftKind.STEP:
            return float(elapsed_seconds >= drift.seconds)
        case DriftKind.WAVE:
            return (1.0 - cos(2 * pi * elapsed_seconds / drift.seconds)) / 2
        case DriftKind.SLOW_NODE:
            return 1.0


def strikes(fault: SyntheticFault, request: TrialRequest, rank: int) -> bool:
    """True if the fault hits this rank in this attempt."""
    if fault.rank is not None and fault.rank != rank:
        return False
    if fault.first_attempt_only and request.attempt > 1:
        return False
    layout = request.layout
    if any(str(getattr(layout, name)) != str(value) for name, value in fault.only_if.items()):
        return False
    return chance(request.seed, layout.key, request.attempt, fault.fault) < fault.probability


def out_of_memory_text(
    device: int, *, wanted_bytes: int, used_bytes: int, capacity_bytes: int
) -> str:
    """Return the message of torch's allocator."""
    gib = 1 << 30
    free_bytes = max(0, capacity_bytes - used_bytes)
    return (
        f"CUDA out of memory. Tried to allocate {wanted_bytes / gib:.2f} GiB."
        f" GPU {device} has a total capacity of {capacity_bytes / gib:.2f} GiB"
        f" of which {free_bytes / gib:.2f} GiB is free."
    )


def chance(*name: object) -> float:
    """Return a number between 0 and 1, uniform over names."""
    digest = sha256("/".join(map(str, name)).encode()).digest()
    return (int.from_bytes(digest[:7]) + 0.5) / (1 << 56)


def log_normal(sd: float, *name: object) -> float:
    """Return a factor near 1 whose logarithm has this standard deviation."""
    return exp(_NORMAL.inv_cdf(chance(*name)) * sd) if sd else 1.0


_NORMAL = NormalDist()


def _activations(model: ModelShape, layout: Layout, sequence_length: int) -> float:
    """Bytes on the first rank of a pipeline, which holds the most micro-batches."""
    tokens = layout.micro_batch_size * sequence_length / layout.context_parallel_size
    # Korthikanti et al. 2022, with flash attention.
    per_token = 34 * model.hidden_size / layout.tensor_parallel_size
    kept = {RecomputeMode.NONE: 1.0, RecomputeMode.SELECTIVE: 0.6, RecomputeMode.FULL: 2 / 34}[
        layout.recompute.mode
    ]
    recomputed = layout.recompute.layers_of(model.num_layers)
    layers = (recomputed * kept + (model.num_layers - recomputed)) / layout.pipeline_parallel_size
    in_flight = layout.pipeline_schedule.num_in_flight(
        num_ranks=layout.pipeline_parallel_size, num_micro_batches=layout.grad_accum_steps
    )
    logits = 6 * tokens * model.vocab_size / layout.tensor_parallel_size
    return tokens * per_token * layers * in_flight + logits


def step_seconds(
    model: ModelShape, layout: Layout, sequence_length: int, hardware: Hardware
) -> float:
    """Seconds of one optimizer step of the gang."""
    tokens = layout.micro_batch_size * sequence_length / layout.context_parallel_size
    flops = model.flops_per_token(sequence_length) + model.recomputed_flops_per_token(
        sequence_length, layout.recompute
    )
    model_parallel = layout.tensor_parallel_size * layout.pipeline_parallel_size
    tp = layout.tensor_parallel_size
    efficiency = _PEAK_EFFICIENCY * tokens / (tokens + _HALF_EFFICIENCY_TOKENS * tp)
    compute = tokens * flops / model_parallel / (hardware.peak_flops[layout.precision] * efficiency)
    layers = model.num_layers / layout.pipeline_parallel_size
    # Four ring all-reduces per layer, 2 bytes per value; none for tp = 1.
    tensor_bytes = layers * 4 * 2 * (tp - 1) / tp * tokens * model.hidden_size * 2
    tensor = tensor_bytes / hardware.intra_node_bandwidth
    micro_batch = compute + tensor + layers * _KERNEL_SECONDS_PER_LAYER
    stages = layout.pipeline_schedule.virtual_stages
    bubble = (layout.pipeline_parallel_size - 1) / stages * micro_batch
    return (
        layout.grad_accum_steps * micro_batch + bubble + _gradient_seconds(model, layout, hardware)
    )


def _parameters(model: ModelShape, layout: Layout) -> float:
    """Return the parameters of one rank."""
    return model.num_parameters / (layout.tensor_parallel_size * layout.pipeline_parallel_size)


def _gradient_seconds(model: ModelShape, layout: Layout, hardware: Hardware) -> float:
    shards = layout.data_parallel_size * layout.context_parallel_size
    if shards == 1:
        return 0.0
    in_node = layout.world_size <= 8
    bandwidth = hardware.intra_node_bandwidth if in_node else hardware.inter_node_bandwidth
    seconds = 2 * 2 * _parameters(model, layout) * (shards - 1) / shards / bandwidth
    # Weights, once per forward and backward pass of each micro-batch.
    gathers = layout.grad_accum_steps if layout.zero_stage >= 3 else 0
    return (1 - _OVERLAPPED) * seconds * (1 + gathers)

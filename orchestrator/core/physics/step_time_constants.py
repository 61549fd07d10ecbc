"""The constants of step time that no data sheet has, each with its meaning and its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPrior:
    """The belief in a positive constant before anything is measured: its logarithm is normal."""

    median: float
    # 0.7: two thirds of all stacks within a factor of 2.
    log_sd: float


def _prior(median: float, *, log_sd: float) -> Any:
    return field(default=median, metadata={"prior": LogPrior(median=median, log_sd=log_sd)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeConstants:
    """Constants of a software stack on a device: positive numbers.

    The defaults are those of well-run training in plain torch. `log_sd` is how far stacks differ:
    efficiency is known best; latencies of hosts and networks, worst.
    """

    peak_efficiency: float = _prior(0.6, log_sd=0.15)
    """Share of the data sheet's FLOP/s that large kernels reach: 0.55-0.7 in large dense models on
    A100 and H100."""
    half_efficiency_seconds: float = _prior(60e-6, log_sd=0.8)
    """Time that a layer's widest product would take at the data sheet's peak, when it reaches half
    of that peak: small kernels idle a GPU."""
    kernel_seconds_per_layer: float = _prior(150e-6, log_sd=0.8)
    """Seconds of a layer's forward and backward that no GPU work hides: some 30 kernel launches of
    5 us."""
    host_seconds_per_layer: float = _prior(0.6e-3, log_sd=0.7)
    """Seconds of the host for a layer's forward and backward in plain torch, nothing recomputed; a
    quicker device waits. Only in workload llama."""
    activation_traffic_bytes: float = _prior(60.0, log_sd=0.5)
    """Bytes that unfused elementwise kernels move per element of a layer's activation: norms,
    rotations, SwiGLU, residuals and casts."""
    intra_node_share: float = _prior(0.6, log_sd=0.35)
    """Share of the data sheet's bandwidth that ring collectives reach inside a node (155 of
    300 GB/s on A100: Galvatron's table)."""
    inter_node_share: float = _prior(0.4, log_sd=0.5)
    """The same, between nodes: 44.7 of 200 GB/s for 16 A100 in two nodes (Galvatron's table), more
    if rails are not shared."""
    collective_seconds: float = _prior(30e-6, log_sd=0.7)
    """Seconds of a collective beyond its bytes, inside a node of 8: start and one hop per doubling
    of the members."""
    inter_node_collective_seconds: float = _prior(150e-6, log_sd=0.8)
    """The same for a group that spans nodes. Gradients pay it for each bucket of 25 MiB."""
    exposed_data_parallel_share: float = _prior(0.5, log_sd=0.4)
    """Share of the data-parallel traffic that does not hide behind the backward pass."""
    exposed_zero_1_share: float = _prior(0.9, log_sd=0.3)
    """The same at ZeRO stages 1 and 2, which often scatter gradients and gather new weights after
    the backward pass."""
    zero_1_passes: float = _prior(3.0, log_sd=0.3)
    """Ring passes over the weights at ZeRO stages 1 and 2: gradients are all-reduced (2), new
    weights gathered (1)."""
    pipeline_hop_seconds: float = _prior(300e-6, log_sd=1.0)
    """Seconds that one micro-batch spends between two stages beyond its bytes: host work of the
    schedule, and waiting."""
    bubble_factor: float = _prior(1.1, log_sd=0.25)
    """Factor on the ideal bubble, (p - 1) micro-batches of the fullest stage: uneven stages and
    schedules that overlap badly make it larger."""
    optimizer_traffic_bytes: float = _prior(28.0, log_sd=0.4)
    """Bytes moved per weight by the optimizer: gradient, master, and both moments read; master and
    moments written."""
    fixed_seconds: float = _prior(5e-3, log_sd=1.0)
    """Seconds of a step that nothing divides: host work, synchronisation."""
    node_congestion: float = _prior(0.1, log_sd=0.8)
    """Share by which each doubling of the nodes that a group spans slows it."""


PRIORS: Mapping[str, LogPrior] = MappingProxyType(
    {f.name: f.metadata["prior"] for f in fields(StepTimeConstants)}
)
CONSTANTS: tuple[str, ...] = tuple(PRIORS)

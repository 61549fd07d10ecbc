"""The load by others on a node during an attempt's timed steps, and the error that it may cause.

The launcher reads the counters: `orchestrator/node/cpu_watch.py`,
`orchestrator/node/gpu_monitor.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import TypeVar

_T = TypeVar("_T")

# A share of the node's cores, or of the time. Less is normal (daemons, rounding of counters).
UNNOTICED = 0.1
# An attempt that used fewer cores than this allows waited for something else than a core.
MOST_CPU_SLOWDOWN = 4.0
# Two threads of one physical core halve each other's speed.
SHARED_CORE_SLOWDOWN = 2.0
# While others took most of the cores: an attempt with less of one also waited for something else.
MOST_STARVATION = 100.0
# At most, if another process uses the device: its kernels alternate with ours.
FOREIGN_GPU_SLOWDOWN = 2.0
# NVML's reasons why a device ran slower than it can for long. A power cap is none: large matrix
# products reach it on a healthy device.
HARMFUL_REASONS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLoad:
    """The load of one node during an attempt's timed steps. Unknown is None.

    CPU in cores: seconds of CPU time per second.
    """

    # Cores that the attempt could use: its affinity, or the limit of its container.
    cpu_cores: float | None = None
    own_cpu_cores: float | None = None  # of ranks, their children, their launcher
    # Used by the rest of its sweep on the node: other attempts, the orchestrator and its Ray.
    sweep_cpu_cores: float | None = None
    others_cpu_cores: float | None = None  # of anybody else, or the hypervisor
    foreign_gpu_processes: int | None = None  # on the attempt's devices
    gpu_clock_ratio: float | None = None  # mean SM clock over the highest
    # Fraction of samples in which heat, power supply or hardware slowed a device down.
    gpu_throttled_fraction: float | None = None
    gpu_throttle_reasons: tuple[str, ...] = ()  # in NVML's words, harmless ones included
    gpu_temperature_celsius: float | None = None  # of the hottest device

    @property
    def is_known(self) -> bool:
        return self is not NO_LOAD and self != NO_LOAD


NO_LOAD = MachineLoad()


def relative_sd(load: MachineLoad) -> float:
    """Return the relative standard deviation that the load adds to the step time; 0: none is known.

    How much of the others' time on cores and devices fell on the attempt's critical path is
    unknown: the slow-down is log-uniform between none and all of it.
    """
    parts = (_cpu_slowdown(load), _foreign_slowdown(load), _throttle_slowdown(load))
    return sqrt(sum(log(most) ** 2 / 12 for most in parts))


def most_slowdown(load: MachineLoad) -> float:
    """Return the factor by which the load may have slowed single steps down; 1: not at all.

    An attempt that got 2 % of a core may have run 50 times slower while it did.
    """
    return _starvation(load) * _foreign_slowdown(load) * _throttle_slowdown(load)


def is_disturbed(load: MachineLoad) -> bool:
    """Return whether a number measured under this load needs a repeat before it is trusted."""
    return relative_sd(load) > 0


def disturbance_text(load: MachineLoad) -> str | None:
    """Describe what disturbed a result. None: nothing did."""
    texts = []
    if _cpu_slowdown(load) > 1:
        used = f"{load.others_cpu_cores:.1f} of {load.cpu_cores:g} cores"
        texts.append(f"the machine was busy: {used} were somebody else's")
    if _foreign_slowdown(load) > 1:
        number = load.foreign_gpu_processes
        texts.append(f"{number} other process{'' if number == 1 else 'es'} ran on its GPUs")
    if _throttle_slowdown(load) > 1:
        harmful = [reason for reason in load.gpu_throttle_reasons if reason in HARMFUL_REASONS]
        reasons = ", ".join(harmful).replace("_", " ") or "reason unknown"
        clock = load.gpu_clock_ratio
        texts.append(
            f"its GPUs were slowed down for {load.gpu_throttled_fraction:.0%} of the time "
            f"({reasons})" + ("" if clock is None else f", at {clock:.0%} of their clock")
        )
    return "; ".join(texts) or None


def of_gang(loads: Iterable[MachineLoad]) -> MachineLoad:
    """Merge the loads of a gang's nodes, since the gang waits for its slowest.

    The CPU is that of the most disturbed node; of the devices the worst values count.
    """
    known = [load for load in loads if load.is_known]
    if len(known) < 2:
        return known[0] if known else NO_LOAD
    disturbed = max(known, key=lambda load: (_cpu_slowdown(load), load.others_cpu_cores or 0.0))
    foreign = _known(load.foreign_gpu_processes for load in known)
    reasons = {reason for load in known for reason in load.gpu_throttle_reasons}
    throttled = _known(load.gpu_throttled_fraction for load in known)
    return replace(
        disturbed,
        foreign_gpu_processes=sum(foreign) if foreign else None,
        gpu_clock_ratio=min(_known(load.gpu_clock_ratio for load in known), default=None),
        gpu_throttled_fraction=max(throttled, default=None),
        gpu_throttle_reasons=tuple(sorted(reasons)),
        gpu_temperature_celsius=max(
            _known(load.gpu_temperature_celsius for load in known), default=None
        ),
    )


def _cpu_slowdown(load: MachineLoad) -> float:
    """The most that others' use of the cores may have slowed the attempt down.

    They took none of its cores if as many were idle as they used. While they took most of them, an
    attempt that got little of one core may have wanted a whole one.
    """
    ours, own, contended = _ours(load), load.own_cpu_cores, _contended(load)
    if not contended:
        return 1.0
    most = MOST_CPU_SLOWDOWN
    if own and _is_starved(load, contended):
        most = max(most, min(SHARED_CORE_SLOWDOWN / own, MOST_STARVATION))
    return min((ours + contended) / ours, most) if ours > 0 else most


def _starvation(load: MachineLoad) -> float:
    """The factor if the attempt alone would have got all that others took.

    If others took fewer than half of the cores, the attempt was free to run, and waited.
    """
    own, contended = load.own_cpu_cores, _contended(load)
    if not contended or not load.cpu_cores:
        return 1.0
    factor = (own + contended) / own if own else MOST_CPU_SLOWDOWN
    return min(factor, MOST_STARVATION if _is_starved(load, contended) else MOST_CPU_SLOWDOWN)


def _is_starved(load: MachineLoad, contended: float) -> bool:
    """Return whether others took most of the cores."""
    return load.cpu_cores is not None and contended > load.cpu_cores / 2


def _contended(load: MachineLoad) -> float:
    """The cores that others used beyond the idle ones; 0: too few to matter, or unknown."""
    cores, others = load.cpu_cores, load.others_cpu_cores
    if not cores or others is None:
        return 0.0
    idle = max(0.0, cores - _ours(load) - others)
    contended = others - idle
    return contended if contended > UNNOTICED * cores else 0.0


def _ours(load: MachineLoad) -> float:
    return (load.own_cpu_cores or 0.0) + (load.sweep_cpu_cores or 0.0)


def _foreign_slowdown(load: MachineLoad) -> float:
    return FOREIGN_GPU_SLOWDOWN if load.foreign_gpu_processes else 1.0


def _throttle_slowdown(load: MachineLoad) -> float:
    share = load.gpu_throttled_fraction or 0.0
    if share <= UNNOTICED:
        return 1.0
    # A hardware slow-down at least halves the clock.
    slower = 1 / load.gpu_clock_ratio if load.gpu_clock_ratio else 2.0
    return 1.0 + share * (max(slower, 1.0) - 1.0)


def _known(values: Iterable[_T | None]) -> list[_T]:
    return [value for value in values if value is not None]

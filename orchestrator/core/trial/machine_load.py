"""The load by others on a node while an attempt's steps were timed, and how far off the measured number may be because of it.

Values in, values out: the launcher reads the counters (`orchestrator/node/cpu_watch.py`, `orchestrator/node/gpu_monitor.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log, sqrt

# Of the node's cores, or of the time: less is what a machine does by itself (daemons, the counters' own rounding), and spoils nothing.
UNNOTICED = 0.1
MOST_CPU_SLOWDOWN = 4.0  # an attempt that used so few cores waits for other things than cores
# At most, where another process uses the device: its kernels take turns with ours.
FOREIGN_GPU_SLOWDOWN = 2.0
# Reasons of NVML that say that a device ran slower than it can for long. A power cap is none: large products reach it on a healthy device.
HARMFUL_REASONS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLoad:
    """The load of one node while an attempt's steps were timed. Unknown is None. CPU in cores: seconds of CPU time in a second."""

    # Cores that the attempt could use: its affinity, or the limit of its container.
    cpu_cores: float | None = None
    own_cpu_cores: float | None = None  # that its ranks, all below them and their launcher used
    sweep_cpu_cores: float | None = (
        None  # that its sweep used beside it: other attempts, and the orchestrator with the Ray that it started, where it is on the node
    )
    others_cpu_cores: float | None = None  # that anybody else used, or the hypervisor took
    foreign_gpu_processes: int | None = None  # on the attempt's devices, not its own
    gpu_clock_ratio: float | None = None  # mean SM clock of its devices over the most that they can
    # The fraction of samples in which a device was slowed down by heat, power supply or hardware.
    gpu_throttled_fraction: float | None = None
    # The reasons seen, in NVML's words, the harmless power cap included.
    gpu_throttle_reasons: tuple[str, ...] = ()
    gpu_temperature_celsius: float | None = None  # of the hottest device

    @property
    def is_known(self) -> bool:
        return self != NO_LOAD


NO_LOAD = MachineLoad()


def relative_sd(load: MachineLoad) -> float:
    """The relative standard deviation that the load adds to the step time. 0: not spoiled, or nothing is known.

    Others take turns with the attempt for cores and devices. How much of their turns fell on its critical path is not known: the slow-down is
    taken as log-uniform between none and all of it.
    """
    parts = (_cpu_slowdown(load), _foreign_slowdown(load), _throttle_slowdown(load))
    return sqrt(sum(log(most) ** 2 / 12 for most in parts))


def spoils(load: MachineLoad) -> bool:
    """Say whether a number that was measured under this load needs a repeat before it is believed."""
    return relative_sd(load) > 0


def said_of(load: MachineLoad) -> str | None:
    """Say in words what spoils a result. None: nothing does."""
    texts = []
    if _cpu_slowdown(load) > 1:
        texts.append(
            f"the machine was busy: {cores_text(load.others_cpu_cores, load.cpu_cores)} were somebody else's"
        )
    if _foreign_slowdown(load) > 1:
        number = load.foreign_gpu_processes or 0
        texts.append(f"{number} other process{'' if number == 1 else 'es'} ran on its GPUs")
    if _throttle_slowdown(load) > 1:
        reasons = ", ".join(
            reason.replace("_", " ")
            for reason in load.gpu_throttle_reasons
            if reason in HARMFUL_REASONS
        )
        clock = (
            f", at {load.gpu_clock_ratio:.0%} of their clock"
            if load.gpu_clock_ratio is not None
            else ""
        )
        texts.append(
            f"its GPUs were slowed down for {load.gpu_throttled_fraction:.0%} of the time ({reasons or 'reason not told'}){clock}"
        )
    return "; ".join(texts) or None


def cores_text(used: float | None, cores: float | None) -> str:
    """`1.8 of 2 cores`."""
    return f"{used:.1f} of {cores:g} cores" if used is not None and cores is not None else "unknown"


def of_gang(loads: Iterable[MachineLoad]) -> MachineLoad:
    """One value for the nodes of a gang, which waits for its slowest: the CPU of the node where others disturbed most, the worst of the devices."""
    known = [load for load in loads if load.is_known]
    if len(known) < 2:
        return known[0] if known else NO_LOAD
    cpu = max(known, key=lambda load: (_cpu_slowdown(load), load.others_cpu_cores or 0.0))
    return MachineLoad(
        cpu_cores=cpu.cpu_cores,
        own_cpu_cores=cpu.own_cpu_cores,
        sweep_cpu_cores=cpu.sweep_cpu_cores,
        others_cpu_cores=cpu.others_cpu_cores,
        foreign_gpu_processes=_sum([load.foreign_gpu_processes for load in known]),
        gpu_clock_ratio=min(_known([load.gpu_clock_ratio for load in known]), default=None),
        gpu_throttled_fraction=max(
            _known([load.gpu_throttled_fraction for load in known]), default=None
        ),
        gpu_throttle_reasons=tuple(
            sorted({reason for load in known for reason in load.gpu_throttle_reasons})
        ),
        gpu_temperature_celsius=max(
            _known([load.gpu_temperature_celsius for load in known]), default=None
        ),
    )


def _cpu_slowdown(load: MachineLoad) -> float:
    """The most that others' use of the cores may have slowed the attempt down. Where as many cores were idle as others used, they took none of its."""
    cores, others = load.cpu_cores, load.others_cpu_cores
    if not cores or others is None:
        return 1.0
    ours = (load.own_cpu_cores or 0.0) + (load.sweep_cpu_cores or 0.0)
    idle = max(0.0, cores - ours - others)
    contended = others - idle
    if contended <= UNNOTICED * cores:
        return 1.0
    return min((ours + contended) / ours, MOST_CPU_SLOWDOWN) if ours > 0 else MOST_CPU_SLOWDOWN


def _foreign_slowdown(load: MachineLoad) -> float:
    return FOREIGN_GPU_SLOWDOWN if load.foreign_gpu_processes else 1.0


def _throttle_slowdown(load: MachineLoad) -> float:
    share = load.gpu_throttled_fraction or 0.0
    if share <= UNNOTICED:
        return 1.0
    # Hardware slow-downs halve the clock at least.
    slower = 1 / load.gpu_clock_ratio if load.gpu_clock_ratio else 2.0
    return 1.0 + share * (max(slower, 1.0) - 1.0)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

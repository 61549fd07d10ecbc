"""The price of a GPU-hour, and the budgets of a sweep file as one number of GPU-seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.objective_mistakes import objective_mistake
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device


class Limit(StrEnum):
    """The key under `search` in the sweep file."""

    GPU_HOURS = "max_gpu_hours"
    COST = "max_cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """US dollars for one GPU-hour, with the source of the number."""

    per_gpu_hour: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The tightest of a sweep's budgets."""

    gpu_seconds: float
    limit: Limit


def price_of(spec: SweepSpec, hardware: Hardware | None) -> Price | None:
    """Return the file's price, else the device's list price; None if neither is known."""
    if spec.price_per_gpu_hour is not None:
        source = "price_per_gpu_hour of the sweep file"
        return Price(per_gpu_hour=spec.price_per_gpu_hour, source=source)
    if hardware is None or hardware.price_per_hour is None:
        return None
    source = f"typical list price of {hardware.name}; give yours with price_per_gpu_hour"
    return Price(per_gpu_hour=hardware.price_per_hour, source=source)


def check_objectives(
    spec: SweepSpec,
    price: Price | None,
    *,
    device: Device,
    memory_limit_bytes: float | None,
) -> None:
    """Raise UsageInvalid for an objective that nothing tells on this device.

    `memory_limit_bytes`: the memory of a slot, if it is known.
    """
    if Objective.DOLLARS_PER_BILLION_TOKENS in spec.objective and price is None:
        raise UsageInvalid(
            f"objective {Objective.DOLLARS_PER_BILLION_TOKENS}: the price of device {spec.device}"
            " is unknown here; give price_per_gpu_hour, in US dollars"
        )
    if Objective.MEMORY_HEADROOM in spec.objective and memory_limit_bytes is None:
        fix = "give device_memory_gib"
        if device is Device.CPU:
            fix = "give workload.options.memory_limit_bytes (workload llama), or leave it out"
        raise UsageInvalid(
            f"objective {Objective.MEMORY_HEADROOM}: no memory size is known of what device"
            f" {spec.device} means here; {fix}"
        )
    known = "cpu" if device is Device.CPU else spec.device
    if mistake := objective_mistake(
        spec.objective, spec.search, workload=spec.workload.name, device=known
    ):
        raise UsageInvalid(f"objective {mistake}")


def budget_of(spec: SweepSpec, price: Price | None) -> Budget | None:
    """Return the tightest budget; None if there is none.

    Raises UsageInvalid for a budget in money if no price is known.
    """
    search, found = spec.search, []
    if search.max_gpu_hours is not None:
        found.append(Budget(gpu_seconds=search.max_gpu_hours * 3600, limit=Limit.GPU_HOURS))
    if search.max_cost is not None:
        if price is None:
            raise UsageInvalid(
                f"search.max_cost {search.max_cost:g}: the price of device {spec.device} is unknown"
                " here; give price_per_gpu_hour, in US dollars,"
                " or limit search.max_gpu_hours"
            )
        hours = search.max_cost / price.per_gpu_hour
        found.append(Budget(gpu_seconds=hours * 3600, limit=Limit.COST))
    return min(found, key=lambda budget: budget.gpu_seconds, default=None)

"""What a sweep may hold: the budgets of its file, in GPU-hours and in money, as one number of GPU-seconds.

What was held, and what a trial will hold, is for others to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.sweepfile.spec import SweepSpec


class Limit(StrEnum):
    """The key of the sweep file, under `search`, that says it."""

    GPU_HOURS = "max_gpu_hours"
    COST = "max_cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """US dollars of one GPU for an hour, and who says so."""

    per_gpu_hour: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The tightest of a sweep's budgets."""

    gpu_seconds: float
    limit: Limit


def price_of(spec: SweepSpec, hardware: Hardware | None) -> Price | None:
    """The file's own, else the device's list price; None where neither is known."""
    if spec.price_per_gpu_hour is not None:
        return Price(
            per_gpu_hour=spec.price_per_gpu_hour, source="price_per_gpu_hour of the sweep file"
        )
    if hardware is None or hardware.price_per_hour is None:
        return None
    return Price(
        per_gpu_hour=hardware.price_per_hour,
        source=f"typical list price of {hardware.name}; give yours with price_per_gpu_hour",
    )


def budget_of(spec: SweepSpec, price: Price | None) -> Budget | None:
    """None: the file limits neither. Raises UsageInvalid for a limit of money where no price is known."""
    search = spec.search
    found = []
    if search.max_gpu_hours is not None:
        found.append(Budget(gpu_seconds=search.max_gpu_hours * 3600, limit=Limit.GPU_HOURS))
    if search.max_cost is not None:
        if price is None:
            raise UsageInvalid(
                f"search.max_cost {search.max_cost:g}: no price is known of what device {spec.device} means here;"
                " give price_per_gpu_hour, in US dollars, or limit search.max_gpu_hours"
            )
        found.append(
            Budget(gpu_seconds=search.max_cost / price.per_gpu_hour * 3600, limit=Limit.COST)
        )
    return min(found, key=lambda budget: budget.gpu_seconds, default=None)

"""The layouts that each workload can run, so that none that it would refuse is launched.

A constant table: the orchestrator never imports a workload to ask it, and workloads check too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.pipeline_schedule import ScheduleKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The layouts of a workload. A size of None has no bound."""

    zero_stages: frozenset[int]
    precisions: frozenset[Precision]
    pipeline_schedules: frozenset[ScheduleKind] = frozenset(ScheduleKind)
    max_tensor_parallel_size: int | None = None
    max_pipeline_parallel_size: int | None = None
    max_context_parallel_size: int | None = None

    def refusal(self, layout: Layout) -> str | None:
        """Return one line why the workload cannot run a layout; None if it can."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
            size, most = getattr(layout, name), getattr(self, f"max_{name}")
            if most is not None and size > most:
                return f"{name} {size} is more than {most}, the most that this workload can do"
        if layout.zero_stage not in self.zero_stages:
            stages = ", ".join(map(str, sorted(self.zero_stages)))
            return f"zero_stage {layout.zero_stage} is not one of {stages}"
        if layout.pipeline_schedule.kind not in self.pipeline_schedules:
            names = ", ".join(sorted(self.pipeline_schedules))
            return f"pipeline_schedule {layout.pipeline_schedule} is not one of {names}"
        if layout.precision not in self.precisions:
            names = ", ".join(sorted(self.precisions))
            return f"precision {layout.precision} is not one of {names}"
        return None


_EVERYTHING = Capabilities(zero_stages=frozenset({0, 1, 2, 3}), precisions=frozenset(Precision))

CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "llama": Capabilities(
            zero_stages=frozenset({0, 1, 2, 3}),
            precisions=frozenset(Precision),
        ),
        "synthetic": _EVERYTHING,
        "command": _EVERYTHING,  # the program decides
        "replay": _EVERYTHING,  # the table decides
    }
)

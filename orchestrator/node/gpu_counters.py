"""Counters of GPUs that are read at both ends of the timed steps: energy, and activity by GPM.

GPM (GPU performance monitoring) is part of NVML on Hopper and newer. It may need a permission; then
its values are unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Shorter windows are dominated by their ends: NVML averages power and utilisation over a second.
FEWEST_SECONDS = 2.0
# The metrics of GPM, by the name of its constant in NVML; all in percent.
GPM_METRICS: Mapping[str, str] = {
    "sm_activity": "NVML_GPM_METRIC_SM_UTIL",
    "tensor_activity": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_activity": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
Ask = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The means over a window. Unknown is None."""

    seconds: float
    energy_joules: float | None = None  # of all devices together
    # 0..1, by the names in GPM_METRICS; those that are known.
    activity: Mapping[str, float] = field(default_factory=dict)


class CounterWindow:
    """The time between `begin` and `end`, on these devices; each counts once."""

    def __init__(
        self,
        nvml: Any,
        handles: Sequence[Any],
        *,
        ask: Ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` calls one of NVML's functions by its name; None: it has no answer."""
        self._nvml, self._handles, self._ask, self._clock = nvml, handles, ask, clock
        self._began: float | None = None
        self._ended: float | None = None
        self._millijoules: list[int | None] = []
        # GPM's sample of each device; None: it has no GPM, or gives no answer.
        self._samples: list[Any] = []
        # None: the window was too short, or has not ended.
        self.counted: Counted | None = None

    @property
    def seconds(self) -> float:
        """The seconds since the window began."""
        if self._began is None:
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._began

    def begin(self) -> None:
        if self._began is None:
            self._samples = [self._new_sample(handle) for handle in self._handles]
            self._millijoules, self._began = self._read_energy(), self._clock()

    def end(self) -> None:
        if self._began is None or self._ended is not None:
            return
        self._ended, energy = self._clock(), self._read_energy()
        if self.seconds >= FEWEST_SECONDS:
            self.counted = Counted(
                seconds=self.seconds,
                energy_joules=self._energy_joules(energy),
                activity=self._activity(),
            )
        for sample in self._samples:
            self._free(sample)
        self._samples = []

    def _read_energy(self) -> list[int | None]:
        return [
            self._ask("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self._handles
        ]

    def _energy_joules(self, millijoules: Sequence[int | None]) -> float | None:
        used = [
            after - before
            for before, after in zip(self._millijoules, millijoules, strict=True)
            if before is not None and after is not None
        ]
        return sum(used) / 1000 if len(used) == len(self._handles) else None

    def _new_sample(self, handle: Any) -> Any:
        """The counters as they are now; None without GPM, or without the permission."""
        support = self._ask("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return None
        sample = self._ask("nvmlGpmSampleAlloc")
        if sample is not None and self._ask("nvmlGpmSampleGet", handle, sample) is None:
            self._free(sample)
            return None
        return sample

    def _free(self, sample: Any) -> None:
        if sample is not None:
            self._ask("nvmlGpmSampleFree", sample)

    def _activity(self) -> dict[str, float]:
        """The mean over the devices of each metric that all of them report."""
        told = []
        for handle, first in zip(self._handles, self._samples, strict=True):
            last = self._new_sample(handle) if first is not None else None
            told.append(self._between(first, last) if last is not None else {})
            self._free(last)
        return {
            name: sum(device[name] for device in told) / len(told)
            for name in GPM_METRICS
            if all(name in device for device in told)
        }

    def _between(self, first: Any, last: Any) -> dict[str, float]:
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics, asked.sample1, asked.sample2 = len(GPM_METRICS), first, last
        for place, constant in enumerate(GPM_METRICS.values()):
            asked.metrics[place].metricId = getattr(nvml, constant)
        if self._ask("nvmlGpmMetricsGet", asked) is None:
            return {}
        return {
            name: asked.metrics[place].value / 100
            for place, name in enumerate(GPM_METRICS)
            # 0: this metric was computed.
            if asked.metrics[place].nvmlReturn == 0
        }

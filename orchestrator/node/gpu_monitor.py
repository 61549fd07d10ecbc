"""What NVML says of this node's GPUs while ranks run: utilisation, power, memory, clocks, errors, and who holds them.

The only importer of nvidia-ml-py. Without it, without a driver, or where a value is not supported, the answer is None.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.machines.node_health import GpuFacts, baseline_bytes
from orchestrator.core.trial.machine_load import HARMFUL_REASONS, MachineLoad
from orchestrator.core.trial.protocol import GpuUsage

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.2
MOST_EVENTS = 100  # read at once

# Why a device runs below its highest clock, by the bits of nvmlDeviceGetCurrentClocksEventReasons. Idleness, and clocks that somebody has set, do not count.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """How full a device was at its fullest, all processes together."""

    used_bytes: int
    total_bytes: int


class GpuMonitor:
    """Samples devices (physical indices or UUIDs) in a thread, between `__enter__` and `__exit__`. Without devices it does nothing."""

    def __init__(self, devices: Sequence[str], *, nvml: Any = None) -> None:
        self._nvml: Any = (nvml or _load_nvml()) if devices else None
        self._handles = _handles(self._nvml, devices)
        self._counting = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._utilisation: list[float] = []
        self._power_watts: list[float] = []
        self._num_samples = 0
        self._fullest: GpuMemory | None = None
        self._clock_ratios: list[float] = []
        self._temperatures: list[float] = []
        self._reasons: set[str] = set()
        self._num_throttled, self._num_reasons_told = 0, 0
        self._holders: dict[
            int, set[int]
        ] = {}  # process ids seen on each device, by its place among ours, while steps were timed
        self._xids: list[int] = []
        self._events: Any = None
        self._addresses: frozenset[str] = frozenset()

    def __enter__(self) -> GpuMonitor:
        self._addresses = self._read_addresses()
        self._listen()
        if self._handles:
            self._thread = threading.Thread(
                target=self._sample_until_stopped, name="gpu-monitor", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._take_events()
        if self._events is not None:
            _ask(self._nvml, self._nvml.nvmlEventSetFree, self._events)
            self._events = None

    def count(self, timed_steps_run: bool) -> None:
        """Say whether samples from now on are of timed steps: only those count as usage."""
        self._counting = timed_steps_run

    def usage(self) -> GpuUsage:
        return GpuUsage(
            utilisation=_mean(self._utilisation),
            power_watts=_mean(self._power_watts),
            num_samples=self._num_samples,
        )

    def fullest(self) -> GpuMemory | None:
        """The device that was nearest to its limit, whether timed steps ran or not."""
        return self._fullest

    def load(self, load: MachineLoad, *, own: Collection[int]) -> MachineLoad:
        """A node's load with what is known of its devices; `own` are the attempt's processes."""
        if not self._handles:
            return load
        return replace(
            load,
            foreign_gpu_processes=self._foreign(own),
            gpu_clock_ratio=_mean(self._clock_ratios),
            gpu_throttled_fraction=self._num_throttled / self._num_reasons_told
            if self._num_reasons_told
            else None,
            gpu_throttle_reasons=tuple(sorted(self._reasons)),
            gpu_temperature_celsius=max(self._temperatures, default=None),
        )

    def _foreign(self, own: Collection[int]) -> int | None:
        """How many processes on our devices are not ours. None: NVML does not tell, or gives ids as they are outside of this container."""
        if not self._holders or not any(pids & set(own) for pids in self._holders.values()):
            return None
        return len(set().union(*self._holders.values()) - set(own))

    @property
    def xids(self) -> Sequence[int]:
        """NVIDIA's errors of these devices since `__enter__`, in their order."""
        return tuple(self._xids)

    @property
    def addresses(self) -> frozenset[str]:
        """Where the devices were on the bus at `__enter__`, as the kernel's log has it: `0000:3b:00`. One that is lost does not tell."""
        return self._addresses

    def _read_addresses(self) -> frozenset[str]:
        nvml: Any = self._nvml
        places = (_ask(nvml, nvml.nvmlDeviceGetPciInfo, handle) for handle in self._handles)
        return frozenset(
            f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}"
            for place in places
            if place is not None
        )

    def _listen(self) -> None:
        """Have the driver tell of errors from now on; where it cannot, the kernel's log has to."""
        nvml: Any = self._nvml
        if not self._handles or not hasattr(nvml, "nvmlEventSetCreate"):
            return
        events = _ask(nvml, nvml.nvmlEventSetCreate)
        if events is not None:
            for handle in self._handles:
                _ask(
                    nvml,
                    nvml.nvmlDeviceRegisterEvents,
                    handle,
                    nvml.nvmlEventTypeXidCriticalError,
                    events,
                )
            self._events = events

    def _take_events(self) -> None:
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            event = _ask(self._nvml, self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # none left: that is a time-out
                return
            self._xids.append(int(event.eventData))

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Take one sample of each device."""
        counting = self._counting
        nvml: Any = self._nvml
        for index, handle in enumerate(self._handles):
            memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            if memory is not None:
                seen = GpuMemory(used_bytes=int(memory.used), total_bytes=int(memory.total))
                if (
                    self._fullest is None
                    or seen.used_bytes / seen.total_bytes
                    > self._fullest.used_bytes / self._fullest.total_bytes
                ):
                    self._fullest = seen
            if counting:
                rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
                if rates is not None:
                    self._utilisation.append(rates.gpu / 100)
                milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
                if milliwatts is not None:
                    self._power_watts.append(milliwatts / 1000)
                self._look_at_load(index, handle)
        if counting:
            self._num_samples += 1
        self._take_events()

    def _look_at_load(self, index: int, handle: Any) -> None:
        nvml: Any = self._nvml
        clock = _ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        most = _ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
        if clock is not None and most:
            self._clock_ratios.append(clock / most)
        temperature = _ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            self._temperatures.append(float(temperature))
        # Under its former name in older bindings.
        ask_why = (
            getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
            or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        bits = _ask(nvml, ask_why, handle)
        if bits is not None:
            reasons = {name for bit, name in _REASONS.items() if bits & bit}
            self._reasons |= reasons
            self._num_throttled += not reasons.isdisjoint(HARMFUL_REASONS)
            self._num_reasons_told += 1
        processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if processes is not None:
            self._holders.setdefault(index, set()).update(process.pid for process in processes)


def device_name(*, nvml: Any = None) -> str | None:
    """What the driver calls this machine's first GPU; None without one."""
    nvml = nvml or _load_nvml()
    handle = next(iter(_handles(nvml, ["0"])), None)
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle) if handle is not None else None
    return name.decode() if isinstance(name, bytes) else name


def driver_version(*, nvml: Any = None) -> str | None:
    """The version of NVIDIA's driver; None without one."""
    nvml = nvml or _load_nvml()
    version = _ask(nvml, nvml.nvmlSystemGetDriverVersion) if nvml is not None else None
    return version.decode() if isinstance(version, bytes) else version


def gpu_facts(devices: Sequence[str] | None = None, *, nvml: Any = None) -> tuple[GpuFacts, ...]:
    """What the driver says of these devices' health, or of all; nothing where it does not answer."""
    nvml = nvml or _load_nvml()
    if nvml is None:
        return ()
    if devices is None:
        devices = [str(index) for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0)]
    return tuple(
        _facts(nvml, device, handle)
        for device, handle in zip(devices, _handles(nvml, devices), strict=False)
    )


def _facts(nvml: Any, device: str, handle: Any) -> GpuFacts:
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    remapped = _ask(
        nvml, nvml.nvmlDeviceGetRemappedRows, handle
    )  # corrected, uncorrected, pending, failed
    uncorrected, corrected = (
        _ask(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
    )
    return GpuFacts(
        index=device,
        name=name.decode() if isinstance(name, bytes) else name,
        processes=_processes(nvml, handle),
        memory_used_bytes=int(memory.used) if memory is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        ecc_uncorrected=uncorrected,
        ecc_corrected=corrected,
        row_remap_pending=bool(remapped[2]) if remapped is not None else None,
        row_remap_failed=bool(remapped[3]) if remapped is not None else None,
    )


def _processes(nvml: Any, handle: Any) -> tuple[str, ...]:
    """The compute processes that hold a device, in words."""
    processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return tuple(
        f"process {p.pid}" + (f" with {p.usedGpuMemory >> 20} MiB" if p.usedGpuMemory else "")
        for p in processes
    )


def clean(devices: Sequence[str], *, nvml: Any = None) -> str | None:
    """Why these devices are not free to measure on: a compute process holds one, or memory is in use that nobody seems to hold.

    None: they are free, or nobody knows.
    """
    nvml = (nvml or _load_nvml()) if devices else None
    for device, handle in zip(devices, _handles(nvml, devices), strict=False):
        if processes := _processes(nvml, handle):
            return f"GPU {device} is held by {', '.join(processes)}"
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None and memory.used > baseline_bytes(memory.total):
            return f"GPU {device} has {memory.used >> 20} MiB in use by no process that can be seen"
    return None


def wait_until_clean(
    devices: Sequence[str], *, patience_seconds: float, nvml: Any = None
) -> str | None:
    """Give the driver time to take back what a killed process held. Returns why the devices are still not free."""
    deadline = time.monotonic() + patience_seconds
    while (reason := clean(devices, nvml=nvml)) is not None and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return reason


def _load_nvml() -> Any:
    """NVML, initialised; None where there is none. Imported late: it is an extra, and machines without GPUs do without."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        logger.debug("NVML does not answer: %s", exc)
        return None
    return nvml


def _handles(nvml: Any, devices: Sequence[str]) -> list[Any]:
    if nvml is None:
        return []
    handles = []
    for device in devices:
        get = (
            nvml.nvmlDeviceGetHandleByIndex if device.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        )
        handle = _ask(nvml, get, int(device) if device.isdigit() else device)
        if handle is None:
            return []  # numbered otherwise than NVML counts: say nothing rather than watch the wrong one
        handles.append(handle)
    return handles


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except nvml.NVMLError as exc:
        logger.debug("NVML does not say: %s", exc)
        return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

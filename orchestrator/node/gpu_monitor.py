"""Reads NVML's report on this node's GPUs: activity, power, memory, clocks, errors, processes.

The only importer of nvidia-ml-py. Without it, without a driver, or for a value that the device does
not support, the answer is None.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.machines.node_health import GpuFacts, baseline_bytes
from orchestrator.core.trial.machine_load import HARMFUL_REASONS, MachineLoad
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.node.gpu_counters import CounterWindow

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.2
MOST_EVENTS = 100  # read at once
# NVML's utilisation and power are means over up to this long before the call.
AVERAGED_SECONDS = 1.0

DRIVER_FILE = Path("/sys/module/nvidia/version")
# CUDA's multi-process server, by the 15 characters of a name that the kernel keeps. It is a process
# on each device, and computes nothing of its own.
_MPS_SERVER = "nvidia-cuda-mps"

# Why a device runs below its highest clock, by the bits of nvmlDeviceGetCurrentClocksEventReasons.
# Idleness and clocks that an administrator has set do not count.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The highest memory use seen on a device, by all processes together."""

    used_bytes: int
    total_bytes: int


class GpuMonitor:
    """Samples devices (physical indices or UUIDs) in a thread while it is entered.

    Without devices it does nothing.
    """

    def __init__(
        self,
        nvml: Any,
        handles: Sequence[Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml, self._handles = nvml, handles
        self._counting = False
        self._window = CounterWindow(nvml, handles, ask=partial(_ask, nvml), clock=clock)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._busy: list[float] = []
        self._power_watts: list[float] = []
        self._num_samples = 0
        self._fullest: GpuMemory | None = None
        # By the device's position among ours: used bytes before the attempt, and at most since.
        self._used_before: dict[int, int] = {}
        self._used_most: dict[int, int] = {}
        self._clock_ratios: list[float] = []
        # SM clocks in MHz, by the device's position among ours.
        self._clocks: dict[int, list[float]] = {}
        self._temperatures: list[float] = []
        self._reasons: set[str] = set()
        self._num_throttled, self._num_reasons_read = 0, 0
        # Process ids seen while steps were timed, by the device's position among ours.
        self._processes: dict[int, set[int]] = {}
        self._xids: list[int] = []
        self._events: Any = None
        self._addresses: frozenset[str] = frozenset()

    @classmethod
    def open(
        cls,
        devices: Sequence[str],
        *,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> GpuMonitor:
        """Load NVML if there are devices; without NVML no device is sampled."""
        nvml = (nvml or _load_nvml()) if devices else None
        return cls(nvml, _handles(nvml, devices), clock=clock)

    def __enter__(self) -> GpuMonitor:
        self._addresses = self._read_addresses()
        self._listen()
        for index, handle in enumerate(self._handles):
            memory = self._read_memory(handle)
            if memory is not None:
                self._used_before[index] = memory.used_bytes
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
        self._window.end()
        self._read_events()
        if self._events is not None:
            self._ask("nvmlEventSetFree", self._events)
            self._events = None

    def count(self, timed_steps_run: bool) -> None:
        """Set whether samples from now on are of timed steps: only those count as usage."""
        if timed_steps_run and not self._counting and self._handles:
            self._window.begin()
        if self._counting and not timed_steps_run:
            self._window.end()
        self._counting = timed_steps_run

    def usage(self) -> GpuUsage:
        """Use during the timed steps. Values that need seconds are None if the steps were short."""
        counted = self._window.counted
        watts = _mean(self._power_watts) if counted is not None else None
        if counted is not None and counted.energy_joules is not None:
            watts = counted.energy_joules / counted.seconds / len(self._handles)
        clocks = self._clocks.values()
        return GpuUsage(
            busy=_mean(self._busy) if counted is not None else None,
            power_watts=watts,
            energy_joules=counted.energy_joules if counted is not None else None,
            clock_mhz=min((statistics.median(seen) for seen in clocks), default=None),
            lowest_clock_mhz=min((min(seen) for seen in clocks), default=None),
            **(counted.activity if counted is not None else {}),
            num_samples=self._num_samples,
            peak_memory_bytes=max(
                (
                    max(used - self._used_before[index], 0)
                    for index, used in self._used_most.items()
                    if index in self._used_before
                ),
                default=None,
            ),
        )

    def fullest(self) -> GpuMemory | None:
        """The device that was nearest to its limit, whether timed steps ran or not."""
        return self._fullest

    def load(self, load: MachineLoad, *, own: Collection[int]) -> MachineLoad:
        """Add the devices' state to a node's load; `own` are the attempt's processes."""
        if not self._handles:
            return load
        num_read = self._num_reasons_read
        return replace(
            load,
            foreign_gpu_processes=self._num_foreign(set(own)),
            gpu_clock_ratio=_mean(self._clock_ratios),
            gpu_throttled_fraction=self._num_throttled / num_read if num_read else None,
            gpu_throttle_reasons=tuple(sorted(self._reasons)),
            gpu_temperature_celsius=max(self._temperatures, default=None),
        )

    def _num_foreign(self, own: set[int]) -> int | None:
        """Return how many processes on our devices are not ours.

        None if NVML does not report processes, or reports their ids outside of this container.
        """
        seen = set().union(*self._processes.values())
        return len(seen - own) if seen & own else None

    @property
    def xids(self) -> Sequence[int]:
        """NVIDIA's errors of these devices since `__enter__`, in their order."""
        return tuple(self._xids)

    @property
    def addresses(self) -> frozenset[str]:
        """The devices' bus addresses at `__enter__`, as the kernel's log writes them: `0000:3b:00`.

        A lost device no longer reports its address.
        """
        return self._addresses

    def _ask(self, question: str, *arguments: Any) -> Any:
        return _ask(self._nvml, question, *arguments)

    def _read_addresses(self) -> frozenset[str]:
        places = (self._ask("nvmlDeviceGetPciInfo", handle) for handle in self._handles)
        return frozenset(
            f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}"
            for place in places
            if place is not None
        )

    def _listen(self) -> None:
        """Ask the driver for errors from now on; if it cannot, the kernel's log has them."""
        self._events = self._ask("nvmlEventSetCreate") if self._handles else None
        if self._events is not None:
            kind = self._nvml.nvmlEventTypeXidCriticalError
            for handle in self._handles:
                self._ask("nvmlDeviceRegisterEvents", handle, kind, self._events)

    def _read_events(self) -> None:
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            event = self._ask("nvmlEventSetWait_v2", self._events, 0)
            if event is None:  # a time-out: none is left
                return
            self._xids.append(int(event.eventData))

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Take one sample of each device."""
        counting = self._counting
        for index, handle in enumerate(self._handles):
            memory = self._read_memory(handle)
            if memory is not None:
                self._used_most[index] = max(self._used_most.get(index, 0), memory.used_bytes)
            if counting:
                if self._window.seconds >= AVERAGED_SECONDS:
                    self._sample_means(handle)
                self._sample_load(index, handle)
        if counting:
            self._num_samples += 1
        self._read_events()

    def _read_memory(self, handle: Any) -> GpuMemory | None:
        """Read a device's memory, and remember the fullest one; None: it cannot be read."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return None
        seen = GpuMemory(used_bytes=int(memory.used), total_bytes=int(memory.total))
        self._fullest = max(
            (one for one in (self._fullest, seen) if one is not None),
            key=lambda one: one.used_bytes / one.total_bytes,
        )
        return seen

    def _sample_means(self, handle: Any) -> None:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        if rates is not None:
            self._busy.append(rates.gpu / 100)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        if milliwatts is not None:
            self._power_watts.append(milliwatts / 1000)

    def _sample_load(self, index: int, handle: Any) -> None:
        nvml = self._nvml
        clock = self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        most = self._ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)
        if clock is not None:
            self._clocks.setdefault(index, []).append(float(clock))
        if clock is not None and most:
            self._clock_ratios.append(clock / most)
        temperature = self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            self._temperatures.append(float(temperature))
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # its former name, in older bindings
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is not None:
            reasons = {name for bit, name in _REASONS.items() if bits & bit}
            self._reasons |= reasons
            self._num_throttled += not reasons.isdisjoint(HARMFUL_REASONS)
            self._num_reasons_read += 1
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is not None:
            self._processes.setdefault(index, set()).update(
                process.pid for process in processes if not _is_mps_server(process.pid)
            )


def device_name(device: str = "0", *, nvml: Any = None) -> str | None:
    """The driver's name for a GPU of this machine (index or UUID); None without one."""
    nvml = nvml or _load_nvml()
    handle = next(iter(_handles(nvml, [device])), None)
    return _text(_ask(nvml, "nvmlDeviceGetName", handle)) if handle is not None else None


def driver_version(*, nvml: Any = None, file: Path = DRIVER_FILE) -> str | None:
    """The version of NVIDIA's driver, by NVML, else by its module; None without one."""
    if (found := _text(_ask(nvml or _load_nvml(), "nvmlSystemGetDriverVersion"))) is not None:
        return found
    try:
        return file.read_text().strip() or None
    except OSError:  # also in many containers
        return None


def pci_addresses(devices: Sequence[str], *, nvml: Any = None) -> list[str | None]:
    """Return each device's bus address, as the kernel names it: `0000:3b:00.0`; None: unknown."""
    nvml = (nvml or _load_nvml()) if devices else None
    places = [_ask(nvml, "nvmlDeviceGetPciInfo", handle) for handle in _handles(nvml, devices)]
    return [
        f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.0" if place is not None else None
        for place in places
    ] or [None for _ in devices]


def gpu_facts(devices: Sequence[str] | None = None, *, nvml: Any = None) -> tuple[GpuFacts, ...]:
    """The health of these devices, or of all, as the driver reports it; empty without a driver."""
    nvml = nvml or _load_nvml()
    if devices is None:
        devices = [str(index) for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0)]
    return tuple(
        _facts(nvml, device, handle)
        for device, handle in zip(devices, _handles(nvml, devices), strict=False)
    )


def _facts(nvml: Any, device: str, handle: Any) -> GpuFacts:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    # Corrected, uncorrected, pending, failed.
    remapped = _ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    uncorrected, corrected = (
        _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
    )
    return GpuFacts(
        index=device,
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)),
        processes=_processes(nvml, handle),
        memory_used_bytes=int(memory.used) if memory is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        ecc_uncorrected=uncorrected,
        ecc_corrected=corrected,
        row_remap_pending=bool(remapped[2]) if remapped is not None else None,
        row_remap_failed=bool(remapped[3]) if remapped is not None else None,
    )


def _processes(nvml: Any, handle: Any) -> tuple[str, ...]:
    """The compute processes on a device, in words."""
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return tuple(
        f"process {p.pid}" + (f" with {p.usedGpuMemory >> 20} MiB" if p.usedGpuMemory else "")
        for p in processes
        if not _is_mps_server(p.pid)
    )


def _is_mps_server(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(_MPS_SERVER)
    except OSError:  # outside of this container, or gone
        return False


def clean(devices: Sequence[str], *, nvml: Any = None) -> str | None:
    """Return why these devices cannot be measured on: another process, or memory in use.

    None if they are free, or NVML does not answer.
    """
    nvml = (nvml or _load_nvml()) if devices else None
    for device, handle in zip(devices, _handles(nvml, devices), strict=False):
        if processes := _processes(nvml, handle):
            return f"GPU {device} is held by {', '.join(processes)}"
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        if memory is not None and memory.used > baseline_bytes(memory.total):
            return f"GPU {device} has {memory.used >> 20} MiB in use by no process that can be seen"
    return None


def wait_until_clean(
    devices: Sequence[str], *, patience_seconds: float, nvml: Any = None
) -> str | None:
    """Wait until the driver has freed the memory of killed processes. Returns `clean`'s reason."""
    deadline = time.monotonic() + patience_seconds
    while (reason := clean(devices, nvml=nvml)) is not None and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    return reason


def _load_nvml() -> Any:
    """NVML, initialised; None without it. Imported late: it is an extra of the package."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        logger.debug("NVML does not answer: %s", exc)
        return None
    return pynvml


def _handles(nvml: Any, devices: Sequence[str]) -> list[Any]:
    """Handles of all these devices; none if one is missing: NVML may number them otherwise."""
    handles = [
        _ask(nvml, "nvmlDeviceGetHandleByIndex", int(device))
        if device.isdigit()
        else _ask(nvml, "nvmlDeviceGetHandleByUUID", device)
        for device in devices
    ]
    return [] if None in handles else handles


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """The answer of one of NVML's functions; None without NVML, the function, or an answer."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError as exc:
        logger.debug("NVML does not answer %s: %s", question, exc)
        return None


def _text(answer: str | bytes | None) -> str | None:
    return answer.decode() if isinstance(answer, bytes) else answer


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

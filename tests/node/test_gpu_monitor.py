"""The GPU monitor with an NVML of our own: few functions, with NVIDIA's interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.node.gpu_monitor import (
    GpuMemory,
    GpuMonitor,
    clean,
    driver_version,
    gpu_facts,
    wait_until_clean,
)

GIB = 1 << 30


class NvmlError(Exception):
    pass


def nvml(
    *,
    used_gib: list[int] | None = None,
    processes: dict[int, list[Any]] | None = None,
    power: bool = True,
    reasons: Sequence[int] = (0, 0),
    xids: list[int] | None = None,
) -> Any:
    """Two GPUs: 60 % busy at 300 W and 3/4 of the clock, 80 % busy at 500 W and all of it."""
    used = used_gib or [0, 0]
    events = list(xids or [])

    def next_event(_: object, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not events:
            raise NvmlError("timeout")
        return SimpleNamespace(eventData=events.pop(0))

    def by_index(index: int) -> int:
        if index >= 2:
            raise NvmlError("no such device")
        return index

    def power_usage(handle: int) -> int:
        if not power:
            raise NvmlError("not supported")
        return [300_000, 500_000][handle]

    def remapped_rows(handle: int) -> tuple[int, int, int, int]:
        if handle == 0:
            raise NvmlError("not supported")
        return (3, 1, 1, 0)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100 80GB HBM3",
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: [[4, 0], [7, 2]][handle][kind],
        nvmlDeviceGetRemappedRows=remapped_rows,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a": 0, "GPU-b": 1}[uuid],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=[60, 80][handle]),
        nvmlDeviceGetPowerUsage=power_usage,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(
            used=used[handle] * GIB, total=80 * GIB
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: (processes or {}).get(handle, []),
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda handle, kind: [1500, 2000][handle],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 2000,
        nvmlDeviceGetTemperature=lambda handle, sensor: [61, 84][handle],
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: reasons[handle],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(
            domain=0, bus=[0x3B, 0x5E][handle], device=0
        ),
        nvmlEventTypeXidCriticalError=8,
        nvmlEventSetCreate=lambda: "set",
        nvmlDeviceRegisterEvents=lambda handle, kind, events: None,
        nvmlEventSetWait_v2=next_event,
        nvmlEventSetFree=lambda events: None,
    )


def test_only_samples_of_timed_steps_count_as_usage() -> None:
    monitor = GpuMonitor.open(["0", "1"], nvml=nvml())
    monitor.sample()
    assert monitor.usage().num_samples == 0
    monitor.count(True)
    monitor.sample()
    monitor.sample()
    monitor.count(False)
    monitor.sample()
    usage = monitor.usage()
    assert usage.num_samples == 2
    assert usage.utilisation == pytest.approx(0.7)
    assert usage.power_watts == pytest.approx(400.0)


def test_the_fullest_device_is_remembered_whether_steps_are_timed_or_not() -> None:
    used = [10, 20]
    monitor = GpuMonitor.open(["GPU-a", "GPU-b"], nvml=nvml(used_gib=used))
    monitor.sample()
    used[1] = 75
    monitor.sample()
    used[1] = 1
    monitor.sample()
    assert monitor.fullest() == GpuMemory(used_bytes=75 * GIB, total_bytes=80 * GIB)


def test_the_peak_of_the_fullest_device_is_what_was_added_to_what_was_there_before() -> None:
    used = [5, 20]
    monitor = GpuMonitor.open(["0", "1"], nvml=nvml(used_gib=used))
    assert monitor.usage().peak_memory_bytes is None
    with monitor:
        used[:] = [35, 45]
        monitor.sample()
        used[:] = [6, 21]
        monitor.sample()
    assert monitor.usage().peak_memory_bytes == 30 * GIB


def test_clocks_heat_and_throttling_are_those_of_timed_steps() -> None:
    monitor = GpuMonitor.open(["0", "1"], nvml=nvml(reasons=(0x04, 0x40 | 0x01)))
    monitor.sample()
    assert monitor.load(NO_LOAD, own=()) == NO_LOAD
    monitor.count(True)
    monitor.sample()
    load = monitor.load(MachineLoad(cpu_cores=2.0, others_cpu_cores=0.5), own=())
    assert (load.cpu_cores, load.others_cpu_cores) == (2.0, 0.5)
    assert load.gpu_clock_ratio == pytest.approx(0.875)
    assert (load.gpu_temperature_celsius, load.gpu_throttled_fraction) == (84.0, 0.5), (
        "a power cap slows nothing that is well"
    )
    assert load.gpu_throttle_reasons == ("hw_thermal_slowdown", "sw_power_cap")


def test_processes_on_a_device_are_foreign_where_ours_are_seen_too() -> None:
    ours, theirs = (
        SimpleNamespace(pid=100, usedGpuMemory=1),
        SimpleNamespace(pid=4711, usedGpuMemory=1),
    )
    monitor = GpuMonitor.open(["0", "1"], nvml=nvml(processes={0: [ours], 1: [ours, theirs]}))
    monitor.count(True)
    monitor.sample()
    assert monitor.load(NO_LOAD, own={100, 101}).foreign_gpu_processes == 1
    assert monitor.load(NO_LOAD, own={100, 4711}).foreign_gpu_processes == 0
    assert monitor.load(NO_LOAD, own={7}).foreign_gpu_processes is None, (
        "ids of another container say nothing"
    )


def test_errors_are_told_by_the_driver_whether_steps_are_timed_or_not() -> None:
    fallen = nvml(xids=[45, 79])

    def lost(handle: int) -> Any:
        raise NvmlError("GPU is lost")

    with GpuMonitor.open(["0"], nvml=fallen) as monitor:
        # As after Xid 79: the kernel's log is then searched by the earlier address.
        fallen.nvmlDeviceGetPciInfo = lost
    assert monitor.xids == (45, 79)
    assert monitor.addresses == {"0000:3b:00"}
    silent = nvml()
    del silent.nvmlEventSetCreate
    with GpuMonitor.open(["0"], nvml=silent) as monitor:
        pass
    assert monitor.xids == ()


def test_samples_are_taken_in_a_thread_while_ranks_run() -> None:
    with GpuMonitor.open(["0"], nvml=nvml()) as monitor:
        monitor.count(True)
        deadline = time.monotonic() + 60
        while monitor.usage().num_samples < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert monitor.usage().num_samples >= 2


def test_what_nvml_does_not_say_is_unknown() -> None:
    monitor = GpuMonitor.open(["0"], nvml=nvml(power=False))
    monitor.count(True)
    monitor.sample()
    assert monitor.usage().power_watts is None
    assert monitor.usage().utilisation == pytest.approx(0.6)
    assert GpuMonitor.open(["5"], nvml=nvml()).fullest() is None


def test_without_devices_nothing_is_asked() -> None:
    with GpuMonitor.open([]) as monitor:
        monitor.count(True)
    assert monitor.usage().num_samples == 0
    assert monitor.usage().utilisation is None
    assert clean([]) is None


def test_a_device_that_another_process_holds_is_not_clean() -> None:
    held = nvml(processes={1: [SimpleNamespace(pid=4711, usedGpuMemory=3 << 30)]})
    assert clean(["0"], nvml=held) is None
    assert clean(["0", "1"], nvml=held) == "GPU 1 is held by process 4711 with 3072 MiB"


def test_memory_that_nobody_seems_to_hold_keeps_a_device_from_being_clean() -> None:
    assert (
        clean(["0", "1"], nvml=nvml(used_gib=[1, 12]))
        == "GPU 1 has 12288 MiB in use by no process that can be seen"
    )


def test_the_driver_says_how_healthy_each_device_is() -> None:
    held = {1: [SimpleNamespace(pid=4711, usedGpuMemory=3 << 30)]}
    first, second = gpu_facts(nvml=nvml(used_gib=[0, 12], processes=held))
    assert (first.index, first.name, first.processes, first.memory_total_bytes) == (
        "0",
        "NVIDIA H100 80GB HBM3",
        (),
        80 * GIB,
    )
    assert (
        first.ecc_uncorrected,
        first.ecc_corrected,
        first.row_remap_pending,
        first.row_remap_failed,
    ) == (0, 4, None, None)
    assert (
        second.ecc_uncorrected,
        second.ecc_corrected,
        second.row_remap_pending,
        second.row_remap_failed,
    ) == (2, 7, True, False)
    assert second.processes == ("process 4711 with 3072 MiB",)
    assert driver_version(nvml=nvml()) == "580.1"


def test_only_the_devices_that_are_meant_are_asked() -> None:
    assert [gpu.index for gpu in gpu_facts(["GPU-b"], nvml=nvml())] == ["GPU-b"]
    assert gpu_facts(["7"], nvml=nvml()) == ()


def test_the_driver_is_given_time_to_take_memory_back() -> None:
    processes = {0: [SimpleNamespace(pid=4711, usedGpuMemory=None)]}
    assert (
        wait_until_clean(["0"], patience_seconds=0.1, nvml=nvml(processes=processes))
        == "GPU 0 is held by process 4711"
    )
    asked = nvml(processes=processes)
    answers = iter([processes[0], []])
    asked.nvmlDeviceGetComputeRunningProcesses = lambda _: next(answers)
    assert wait_until_clean(["0"], patience_seconds=5.0, nvml=asked) is None

"""The GPU monitor with an NVML of our own: few functions, with NVIDIA's interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.node.gpu_monitor import (
    GpuMemory,
    GpuMonitor,
    clean,
    driver_version,
    gpu_facts,
    pci_addresses,
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
    energy: bool = False,
    gpm: bool = False,
    gpm_lacks: str = "",
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

    found = SimpleNamespace(
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
    if energy:
        # In millijoules: of the first device 1,500 J more each time it is read.
        counters = [iter(range(10**9, 10**10, 1_500_000)), iter(range(0, 10**9, 2_500_000))]
        found.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(counters[handle])
    if gpm:
        add_gpm(found, lacks=gpm_lacks)
    return found


class GpmMetricsGet:
    """NVML's structure: what is asked, and the answers."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(210)]


def add_gpm(found: Any, *, lacks: str) -> None:
    """GPM's functions; a sample is a list with its device and when it was taken."""
    found.samples_held = []
    found.NVML_GPM_METRICS_GET_VERSION = 1
    found.NVML_GPM_METRIC_SM_UTIL = 2
    found.NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    found.NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    found.c_nvmlGpmMetricsGet_t = GpmMetricsGet

    def alloc() -> list[int]:
        found.samples_held.append([])
        return found.samples_held[-1]

    def free(sample: list[int]) -> None:
        found.samples_held = [held for held in found.samples_held if held is not sample]

    def get(handle: int, sample: list[int]) -> list[int]:
        if lacks == "permission":
            raise NvmlError("no permission")
        sample.append(handle)
        return sample

    def metrics(asked: GpmMetricsGet) -> GpmMetricsGet:
        assert asked.version == 1
        assert asked.sample1 is not asked.sample2
        assert asked.sample1 == asked.sample2, "of one device"
        device = asked.sample1[0]
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = {2: [90.0, 70.0], 5: [60.0, 40.0], 10: [50.0, 30.0]}[metric.metricId][
                device
            ]
            metric.nvmlReturn = 3 if lacks == "metrics" else 0
        return asked

    found.nvmlGpmQueryDeviceSupport = lambda handle: SimpleNamespace(
        isSupportedDevice=lacks != "support"
    )
    found.nvmlGpmSampleAlloc, found.nvmlGpmSampleFree = alloc, free
    found.nvmlGpmSampleGet, found.nvmlGpmMetricsGet = get, metrics


class Clock:
    """Seconds that only a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(asked: Any, *, seconds: float, devices: Sequence[str] = ("0", "1")) -> GpuUsage:
    """The usage of timed steps that took so long, with five samples a second."""
    clock = Clock()
    monitor = GpuMonitor.open(devices, nvml=asked, clock=clock)
    monitor.sample()
    assert monitor.usage().num_samples == 0
    monitor.count(True)
    for _ in range(round(seconds * 5)):
        clock.now += 0.2
        monitor.sample()
    monitor.count(False)
    monitor.sample()
    return monitor.usage()


def test_only_samples_of_timed_steps_count_as_usage() -> None:
    usage = watch(nvml(), seconds=4.0)
    assert usage.num_samples == 20
    assert usage.busy == pytest.approx(0.7)
    assert usage.power_watts == pytest.approx(400.0)
    # The slower device's clock counts.
    assert (usage.clock_mhz, usage.lowest_clock_mhz) == (1500, 1500)


def test_what_needs_seconds_to_be_measured_is_unknown_after_short_steps() -> None:
    usage = watch(nvml(energy=True, gpm=True), seconds=1.8)
    assert usage.num_samples == 9
    assert (usage.busy, usage.power_watts, usage.energy_joules) == (None, None, None)
    assert (usage.sm_activity, usage.tensor_activity, usage.dram_activity) == (None, None, None)
    assert usage.clock_mhz == 1500, "a clock is read at once"


def test_utilisation_and_power_that_look_back_into_the_warm_up_are_left_out() -> None:
    asked = nvml()
    # Five samples in the first second.
    asked.nvmlDeviceGetUtilizationRates = _late(asked, since=4)
    assert watch(asked, seconds=4.0, devices=["0"]).busy == pytest.approx(0.8)


def _late(asked: Any, *, since: int) -> Any:
    """A device whose utilisation is that of the warm-up for so many temperature readings."""
    readings: list[int] = []
    asked.nvmlDeviceGetTemperature = lambda handle, sensor: readings.append(1) or 60
    return lambda _: SimpleNamespace(gpu=5 if len(readings) < since else 80)


def test_power_is_the_energy_of_the_window_over_its_seconds() -> None:
    usage = watch(nvml(energy=True), seconds=5.0)
    # 1,500 J and 2,500 J by their counters.
    assert usage.energy_joules == pytest.approx(4000.0)
    assert usage.power_watts == pytest.approx(4000.0 / 5.0 / 2)


def test_activity_is_read_from_the_counters_at_both_ends_and_their_memory_given_back() -> None:
    asked = nvml(gpm=True)
    usage = watch(asked, seconds=5.0)
    # The two devices: 90 and 70 %, 60 and 40 %, 50 and 30 %.
    assert usage.sm_activity == pytest.approx(0.8)
    assert usage.tensor_activity == pytest.approx(0.5)
    assert usage.dram_activity == pytest.approx(0.4)
    assert asked.samples_held == []


@pytest.mark.parametrize("lacks", ["support", "permission", "metrics"])
def test_without_gpm_activity_is_unknown_and_the_rest_is_known(lacks: str) -> None:
    asked = nvml(energy=True, gpm=True, gpm_lacks=lacks)
    usage = watch(asked, seconds=5.0)
    assert (usage.sm_activity, usage.tensor_activity, usage.dram_activity) == (None, None, None)
    assert usage.energy_joules == pytest.approx(4000.0)
    assert asked.samples_held == []


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
    usage = watch(nvml(power=False), seconds=3.0, devices=["0"])
    assert usage.power_watts is None
    assert usage.busy == pytest.approx(0.6)
    assert GpuMonitor.open(["5"], nvml=nvml()).fullest() is None


def test_without_devices_nothing_is_asked() -> None:
    with GpuMonitor.open([]) as monitor:
        monitor.count(True)
    assert monitor.usage().num_samples == 0
    assert monitor.usage().busy is None
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


def test_the_driver_without_nvml_is_told_by_its_module(tmp_path: Path) -> None:
    silent = SimpleNamespace(NVMLError=NvmlError)
    (tmp_path / "version").write_text("570.86\n")
    assert driver_version(nvml=silent, file=tmp_path / "version") == "570.86"
    assert driver_version(nvml=silent, file=tmp_path / "none") is None
    assert driver_version(nvml=nvml(), file=tmp_path / "version") == "580.1", "NVML comes first"


def test_devices_are_found_on_the_bus_as_the_kernel_names_them() -> None:
    assert pci_addresses(["1", "GPU-a"], nvml=nvml()) == ["0000:5e:00.0", "0000:3b:00.0"]
    assert pci_addresses(["0"], nvml=SimpleNamespace(NVMLError=NvmlError)) == [None]
    assert pci_addresses([]) == []


def test_the_server_of_mps_is_no_foreign_process(monkeypatch: pytest.MonkeyPatch) -> None:
    server, client, other = (
        SimpleNamespace(pid=pid, usedGpuMemory=30 << 20) for pid in (4711, 4712, 4713)
    )
    names = {4711: "nvidia-cuda-mps", 4712: "python", 4713: "python"}
    read = Path.read_text

    def read_text(path: Path, *more: Any) -> str:
        pid = path.parent.name
        is_ours = pid.isdigit() and int(pid) in names and path.name == "comm"
        return names[int(pid)] + "\n" if is_ours else read(path, *more)

    monkeypatch.setattr(Path, "read_text", read_text)
    held = {0: [server]}
    assert clean(["0"], nvml=nvml(processes=held)) is None
    held[0] += [client, other]
    assert clean(["0"], nvml=nvml(processes=held)) == (
        "GPU 0 is held by process 4712 with 30 MiB, process 4713 with 30 MiB"
    )
    monitor = GpuMonitor.open(["0"], nvml=nvml(processes=held))
    monitor.count(True)
    monitor.sample()
    assert monitor.load(NO_LOAD, own=[4712]).foreign_gpu_processes == 1


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

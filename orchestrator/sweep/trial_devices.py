"""The devices that stored trials ran on: by data sheet, or by the peaks measured on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from db.read.observations import ObservationRow
from orchestrator.core.problem.device_name import may_be_called
from orchestrator.core.problem.hardware import (
    DEVICES,
    UNLIMITED_BYTES,
    Hardware,
    from_driver_name,
)
from orchestrator.core.problem.layout import Precision
from orchestrator.core.trial.protocol import MEASURED_PEAK

# Prefix of the device names of workload synthetic.
SIMULATED = "synthetic "
# Prefix of the source of a peak that is from a data sheet.
TABLE_PEAK = "table: "

# Bytes per FLOP of memory, inside a node and between nodes, of a device without a data sheet: a
# first guess that trials correct. A core has its share of a server's memory (10 GB/s for
# 100 GFLOP/s) and of its loopback; a GPU is like those of the table (2 TB/s and 300 GB/s for
# 300 TFLOP/s).
# A device with fewer is no GPU.
CPU_FLOPS = 1e13
CPU_BYTES_PER_FLOP, GPU_BYTES_PER_FLOP = (0.1, 0.02, 0.01), (0.007, 0.001, 0.0001)


def may_be_wanted(
    sheet: Hardware | None, name: str, hardware: Hardware | None, device_name: str | None
) -> bool:
    """Return whether trials of a device by this name and data sheet may be of the wanted device.

    `is_wanted` then looks at each trial.
    """
    if hardware is not None:
        return sheet is None or sheet.name == hardware.name
    return _is_called(name, device_name) if device_name else from_driver_name(name) is None


def is_wanted(
    row: ObservationRow, device: Hardware, hardware: Hardware | None, device_name: str | None
) -> bool:
    """Return whether a trial ran on the device that is asked about."""
    if hardware is not None:
        return device.name == hardware.name
    if device_name is not None:
        return row.device_name is None or _is_called(row.device_name, device_name)
    # Processor cores, or a device that is simulated on them.
    simulated = (row.device_name or SIMULATED).startswith(SIMULATED)
    return simulated or (
        from_driver_name(row.device_name or "") is None and not row.is_peak_reserved
    )


def _is_called(name: str, device_name: str) -> bool:
    """Return whether a device with this driver's name is called `device_name`, perhaps by Ray.

    Ray's name of a device with a data sheet counts for none: several devices have it.
    """
    return name == device_name or (
        from_driver_name(name) is None and may_be_called(device_name, name)
    )


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices by driver's name, and of each sweep: its file's, else its newest trial's."""

    by_name: Mapping[str, Hardware]
    of_sweep: Mapping[int, Hardware]

    def of(self, row: ObservationRow) -> Hardware | None:
        """A run out of memory may leave no name: then the sweep's device, if it is known."""
        return (
            self.by_name.get(row.device_name)
            if row.device_name is not None
            else self.of_sweep.get(row.sweep.id)
        )

    def name_of(self, row: ObservationRow) -> str | None:
        found = self.of(row)
        return found.name if found is not None else None


def devices_of(rows: Sequence[ObservationRow]) -> Devices:
    named: dict[str, list[ObservationRow]] = {}
    for row in rows:
        if row.device_name is not None:
            named.setdefault(row.device_name, []).append(row)
    by_name = {
        name: device for name, some in named.items() if (device := _device(name, some)) is not None
    }
    of_sweep: dict[int, Hardware] = {}
    for row in rows:
        said = DEVICES.get(str(row.sweep.conditions.get("device")))
        found = said or (by_name.get(row.device_name) if row.device_name is not None else None)
        if found is not None:
            of_sweep[row.sweep.id] = found
    return Devices(by_name=by_name, of_sweep=of_sweep)


def _device(name: str, rows: Sequence[ObservationRow]) -> Hardware | None:
    """Return the device by its data sheet, else by the peaks measured on it; None: neither."""
    known = data_sheet(name, [row.peak_flops_source for row in rows])
    if known is not None:
        return known
    peaks: dict[Precision, list[float]] = {}
    for row in rows:
        if row.peak_flops is not None and (row.peak_flops_source or "").startswith(MEASURED_PEAK):
            peaks.setdefault(row.layout.precision, []).append(row.peak_flops)
    if not peaks:
        return None
    memory = max(
        (row.device_memory_bytes for row in rows if row.device_memory_bytes is not None),
        default=None,
    )
    return measured_hardware(
        name, {precision: median(found) for precision, found in peaks.items()}, memory_bytes=memory
    )


def data_sheet(name: str, peak_sources: Iterable[str | None]) -> Hardware | None:
    """Find a data sheet by the driver's name, else by the source of its trials' peaks."""
    return from_driver_name(name) or next(
        (DEVICES[sheet] for source in peak_sources if (sheet := _sheet(source)) in DEVICES), None
    )


def _sheet(source: str | None) -> str:
    """Return the name of the device in `table: h200 bf16 dense`."""
    return (
        source.removeprefix(TABLE_PEAK).split()[0]
        if source is not None and source.startswith(TABLE_PEAK)
        else ""
    )


def measured_hardware(
    name: str, peak_flops: Mapping[Precision, float], *, memory_bytes: int | None
) -> Hardware:
    """Return a device with known peaks only, and perhaps its memory.

    The rest is guessed, for trials to correct: bandwidths in proportion to the largest peak; a
    precision that was not measured is taken to be as fast as the fastest that was.
    """
    peak = max(peak_flops.values())
    memory, inside, between = (
        peak * ratio for ratio in (CPU_BYTES_PER_FLOP if peak < CPU_FLOPS else GPU_BYTES_PER_FLOP)
    )
    return Hardware(
        name=name,
        peak_flops=dict.fromkeys(Precision, peak) | dict(peak_flops),
        memory_bytes=memory_bytes if memory_bytes is not None else UNLIMITED_BYTES,
        memory_bandwidth=memory,
        intra_node_bandwidth=inside,
        inter_node_bandwidth=between,
    )

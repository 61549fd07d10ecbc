"""What a store teaches about a sweep that is to be planned or begun: constants fitted to what its relatives measured, nearest first.

Relatives are trials of any sweep on the same device, with the same workload and the options of it that change its physics. Of them,
those taken with the newest software count in full, and older ones as the prior of these. A cell's own trials come last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from statistics import fmean, median
from typing import Any

from db.read.observations import ObservationRow
from db.read.rows import LinkRow
from db.store import Store
from orchestrator.core.physics.calibration import Calibration, Observation, calibrate
from orchestrator.core.physics.fit_quality import agreement
from orchestrator.core.physics.links import Network, network_of
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import (
    DEVICES,
    GIB,
    UNLIMITED_BYTES,
    Hardware,
    from_driver_name,
)
from orchestrator.core.problem.layout import Precision
from orchestrator.core.search.planner import trainer_of
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import MEASURED_PEAK

# Options that neither time nor memory of a layout depend on, or only the limit that memory is held against.
UNPHYSICAL = frozenset({
    "learning_rate", "token_file", "token_dtype", "memory_limit_bytes", "device_memory_bytes", "noise", "sleep", "faults", "env_from", "pass_env", "one_rank_per_node",
    "table_id",  # runs that others measured on such a device are relatives
})  # fmt: skip
PRETENDED = frozenset({"synthetic", "replay"})  # workloads whose trials nothing is computed in
SIMULATED = "synthetic "  # how workload synthetic begins the name of a device
TABLE_PEAK = "table: "  # how a peak's source begins that is a data sheet's

WAITED_SHARE = 0.5  # of its timed steps, that phase steady has to have lasted
ENOUGH_ROWS, FAR_OFF = (
    3,
    2.0,
)  # rows of a cell, and standard deviations of their median error, that show that a fit has missed it

# Bytes per FLOP of a device that no data sheet is known of, for a first guess that trials correct: a core with its share of a server's
# memory (10 GB/s for 100 GFLOP/s) and of its loopback, and a GPU as those of the table have (2 TB/s and 300 GB/s for 300 TFLOP/s).
CPU_FLOPS = 1e13  # fewer, and it is no GPU
CPU_BYTES_PER_FLOP, GPU_BYTES_PER_FLOP = (
    (0.1, 0.02, 0.01),
    (0.007, 0.001, 0.0001),
)  # memory, inside a node, between nodes


@dataclass(frozen=True, kw_only=True, eq=False)
class Taught:
    """One trial of a relative, as calibration takes it, and where it is from."""

    row: ObservationRow
    observation: Observation
    is_current: bool  # taken with the newest software that is known of


@dataclass(frozen=True, kw_only=True, eq=False)
class PriorKnowledge:
    """The device that a sweep is predicted for, and its relatives' trials. Fits are made when they are asked for, each once."""

    spec: SweepSpec
    hardware: Hardware | None  # None: no data sheet has the device, and nothing was measured on it
    rows: Sequence[Taught]  # oldest first
    links: Sequence[LinkRow] = ()  # of the newest `sweep netbench` on such devices
    # Relatives' trials that teach nothing, since the speed of their device is not known.
    num_unplaced: int = 0
    begin: Mapping[str, Calibration] = field(
        default_factory=dict
    )  # `fits` of what was learned before, to begin from
    _fits: dict[tuple[str, Cell | None], Calibration] = field(default_factory=dict)

    @property
    def fits(self) -> Mapping[str, Calibration]:
        """Those of all relatives, by which of them; where none was made, what it would have begun from."""
        return {
            **self.begin,
            **{which: found for (which, without), found in self._fits.items() if without is None},
        }

    @cached_property
    def network(self) -> Network | None:
        """What the links say of the constants of step times; None: they were not measured."""
        return (
            network_of([row.sample for row in self.links], self.hardware)
            if self.hardware is not None
            else None
        )

    @cached_property
    def prior(self) -> Calibration:
        """What is believed before any trial: what is usual, and what was measured of the links."""
        usual = Calibration.prior(
            trainer_of(self.spec), is_known=self.spec.knows_memory is not None
        )
        return usual if self.network is None else usual.informed(self.network)

    @cached_property
    def launch_seconds(self) -> float | None:
        """Seconds that a trial holds its GPUs for beyond the steps after its first, in the mean, since sums are asked for; None where nobody measured it."""
        found = [
            taught.row.held_seconds - taught.row.steady_seconds
            for taught in self.rows
            if taught.row.held_seconds is not None
            and taught.row.steady_seconds is not None
            and _waited_for_its_steps(taught.row)
        ]
        return max(fmean(found), 0.0) if found else None

    @cached_property
    def timed_steps(self) -> float | None:
        """Timed steps of a trial: the median; None where nobody measured any."""
        found = [taught.row.num_steps for taught in self.rows if taught.row.num_steps is not None]
        return float(median(found)) if found else None

    def trial_cost(self) -> TrialCost:
        """What a trial of the sweep holds its GPUs for beside its steps, and how many they are: a plan and a search rest on the same."""
        return TrialCost.of(
            self.spec.measurement, launch_seconds=self.launch_seconds, timed_steps=self.timed_steps
        )

    def calibration(self, cell: Cell | None = None, *, with_own: bool = True) -> Calibration:
        """The constants for a cell, or of all relatives together. Of nothing measured, the prior.

        The trials of the cell in this very sweep are counted only `with_own`: a search that is told them would count them twice.
        """
        own = self._own.get(cell, []) if cell is not None else []
        mine = set(map(id, own))
        others = [taught for taught in self.rows if id(taught) not in mine] if own else self.rows
        if own and others:
            self._of(self.rows, without=None)  # where the fits without each of the cells begin
        found = self._of(others, without=cell if own else None)
        if cell is None:
            return found
        prior = found.widened() if others else found
        return self._fitted(("own", cell), own, prior) if own and with_own else prior

    @cached_property
    def _own(self) -> dict[Cell, list[Taught]]:
        """The trials of the sweep itself, by cell."""
        found: dict[Cell, list[Taught]] = {}
        for taught in self.rows:
            if taught.row.sweep.name == self.spec.name:
                found.setdefault(taught.row.cell, []).append(taught)
        return found

    def _of(self, rows: Sequence[Taught], *, without: Cell | None) -> Calibration:
        prior = self.prior
        older = [taught for taught in rows if not taught.is_current]
        if older:
            prior = self._fitted(("older", without), older, prior).widened()
        return self._fitted(
            ("current", without), [taught for taught in rows if taught.is_current], prior
        )

    def _fitted(
        self, key: tuple[str, Cell | None], rows: Sequence[Taught], prior: Calibration
    ) -> Calibration:
        if key not in self._fits:
            which, _ = key
            begin = self._fits.get((which, None)) or self.begin.get(which)
            self._fits[key] = _fitted([taught.observation for taught in rows], prior, begin)
        return self._fits[key]


def learned(
    store: Store | None,
    spec: SweepSpec,
    hardware: Hardware | None,
    *,
    device_name: str | None,
    gpus_per_node: int,
    nodes: Collection[str] | None = None,
    begin: Mapping[str, Calibration] | None = None,
) -> PriorKnowledge:
    """What the store has of a sweep's relatives. `begin`: the `fits` of what it had before.

    `hardware` is the device by its data sheet; where there is none, `device_name` is how its driver calls it, None for processor cores.
    `gpus_per_node` stands in for trials whose nodes are not known. Links count that were measured on one of these `nodes`; None: on any.
    """
    varying = set(spec.axes.options)
    wanted = _without(_physics(spec.workload.options.conditions()), varying)

    def _is_relative(conditions: Mapping[str, Any]) -> bool:
        return _without(_physics(_options_of(conditions)), varying) == wanted

    def _is_device(name: str, peak_sources: Sequence[str]) -> bool:
        return _may_be_meant(_data_sheet(name, peak_sources), name, hardware, device_name)

    rows = (
        store.observations(
            workload=spec.workload.name, is_relative=_is_relative, is_device=_is_device
        )
        if store is not None
        else []
    )
    devices = _devices(rows)
    options = {row.sweep.id: _physics(_options_of(row.sweep.conditions)) for row in rows}
    found = [
        (row, device)
        for row in rows
        if (device := devices.of(row)) is not None and _is_meant(row, device, hardware, device_name)
    ]
    if not found:
        unplaced = sum(devices.of(row) is None for row in rows)
        return PriorKnowledge(
            spec=spec,
            hardware=hardware,
            rows=(),
            links=_links(store, spec, hardware, nodes),
            num_unplaced=unplaced,
        )
    newest = found[-1][0]
    # Processor cores differ from machine to machine: the newest trial's are meant.
    found = [(row, device) for row, device in found if device.name == devices.name_of(newest)]
    stack = next((_stack(row) for row, _ in reversed(found) if not row.out_of_memory), None)
    trainer = trainer_of(spec)

    def _trainer_of(row: ObservationRow) -> Trainer:
        values = {
            name: value for name, value in options[row.sweep.id].items() if name in varying
        } | dict(row.layout.options)
        return trainer_of(spec, tuple(sorted(values.items())))

    taught = [
        Taught(
            row=row,
            observation=_observation(
                row,
                device,
                gpus_per_node=gpus_per_node,
                has_this_trainer=_trainer_of(row) == trainer,
            ),
            is_current=row.out_of_memory or _stack(row) == stack,
        )
        for row, device in found
    ]
    device = hardware or found[-1][1]
    return PriorKnowledge(
        spec=spec,
        hardware=device,
        rows=taught,
        links=_links(store, spec, device, nodes),
        begin=begin or {},
    )


def _links(
    store: Store | None, spec: SweepSpec, hardware: Hardware | None, nodes: Collection[str] | None
) -> list[LinkRow]:
    """The newest measurement of the links of such devices. A trial that is only pretended sends nothing over them."""
    if store is None or hardware is None or spec.workload.name in PRETENDED:
        return []
    found = [
        row
        for row in store.links()
        if _is_hardware(row.device_name, hardware)
        and (nodes is None or not set(nodes).isdisjoint(row.nodes))
    ]
    return [row for row in found if row.run_token == found[-1].run_token]


def _is_hardware(device_name: str | None, hardware: Hardware) -> bool:
    """Whether a driver calls such a device so; cores go by their name."""
    if device_name is None:
        return False
    known = from_driver_name(device_name)
    return (known.name if known is not None else device_name) == hardware.name


def _fitted(
    observations: Sequence[Observation], prior: Calibration, begin: Calibration | None
) -> Calibration:
    """Fit, and once more where whole cells stay far off: of errors that are all large none pulls, as if each were a disturbed run."""
    found = calibrate(observations, prior, begin=begin)
    times = agreement(observations, found).step_time
    errors: dict[tuple[Cell, str], list[float]] = {}
    for place, ratio in zip(times.places, times.ratios, strict=True):
        row = observations[place]
        if not row.thrashes:
            errors.setdefault((row.cell, row.hardware.name), []).append(-log(ratio))
    far = {cell: median(some) for cell, some in errors.items() if len(some) >= ENOUGH_ROWS}
    far = {
        cell: error for cell, error in far.items() if abs(error) > FAR_OFF * prior.step_residual_sd
    }
    if not far:
        return found
    begun = {cell: found.cell_offsets.get(cell, 0.0) + error for cell, error in far.items()}
    corrected = replace(prior, cell_offsets={**prior.cell_offsets, **begun})
    return calibrate(
        observations, corrected, begin=replace(found, cell_offsets={**found.cell_offsets, **begun})
    )


def _physics(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in UNPHYSICAL}


def _without(options: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _options_of(conditions: Mapping[str, Any]) -> dict[str, Any]:
    start = "workload.options."
    return {
        name.removeprefix(start): value
        for name, value in conditions.items()
        if name.startswith(start)
    }


def _stack(row: ObservationRow) -> tuple[str | None, ...]:
    return row.torch, row.cuda, row.driver


def _may_be_meant(
    sheet: Hardware | None, name: str, hardware: Hardware | None, device_name: str | None
) -> bool:
    """Whether trials of a device by its name and data sheet may be of the one that is asked about: then `_is_meant` looks at each."""
    if hardware is not None:
        return sheet is None or sheet.name == hardware.name
    return name == device_name if device_name is not None else from_driver_name(name) is None


def _is_meant(
    row: ObservationRow, device: Hardware, hardware: Hardware | None, device_name: str | None
) -> bool:
    """Whether a trial ran on the device that is asked about."""
    if hardware is not None:
        return device.name == hardware.name
    if device_name is not None:
        return row.device_name in (device_name, None)
    # Processor cores, or a device that is simulated on them.
    simulated = (row.device_name or SIMULATED).startswith(SIMULATED)
    return simulated or (
        from_driver_name(row.device_name or "") is None and not row.is_peak_reserved
    )


@dataclass(frozen=True, kw_only=True)
class _Devices:
    """Data sheets by the names that drivers give, and a device of each sweep: what its file says, else that of its newest trial."""

    by_name: Mapping[str, Hardware]
    of_sweep: Mapping[int, Hardware]

    def of(self, row: ObservationRow) -> Hardware | None:
        """A run out of memory may leave no name behind: then the sweep's device, if it is known."""
        return (
            self.by_name.get(row.device_name)
            if row.device_name is not None
            else self.of_sweep.get(row.sweep.id)
        )

    def name_of(self, row: ObservationRow) -> str | None:
        found = self.of(row)
        return found.name if found is not None else None


def _devices(rows: Sequence[ObservationRow]) -> _Devices:
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
    return _Devices(by_name=by_name, of_sweep=of_sweep)


def _device(name: str, rows: Sequence[ObservationRow]) -> Hardware | None:
    """By its data sheet, else by the peaks that were measured on it; None where there is neither."""
    known = _data_sheet(name, [row.peak_flops_source for row in rows])
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


def _data_sheet(name: str, peak_sources: Iterable[str | None]) -> Hardware | None:
    """Find a device's data sheet by what its driver calls it, else by what the peaks of its trials were read from."""
    return from_driver_name(name) or next(
        (DEVICES[sheet] for source in peak_sources if (sheet := _sheet(source)) in DEVICES), None
    )


def _sheet(source: str | None) -> str:
    """The name of the device in `table: h200 bf16 dense`."""
    return (
        source.removeprefix(TABLE_PEAK).split()[0]
        if source is not None and source.startswith(TABLE_PEAK)
        else ""
    )


def measured_hardware(
    name: str, peak_flops: Mapping[Precision, float], *, memory_bytes: int | None
) -> Hardware:
    """A device of which only peaks are known, and perhaps its memory: the rest is guessed, for trials to correct.

    Bandwidths in proportion to the largest peak; a precision that was not measured is taken to be as fast as the fastest that was.
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


def _observation(
    row: ObservationRow, device: Hardware, *, gpus_per_node: int, has_this_trainer: bool
) -> Observation:
    """What calibration takes of a trial. Options that vary may make another trainer of it: then its memory tells nothing of this one's."""
    said, in_file = (
        row.sweep.conditions.get("gpus_per_node"),
        row.sweep.conditions.get("device_memory_gib"),
    )
    # Of a replay, a node may be that of the one process that stood for the whole gang.
    nodes = row.num_nodes if row.sweep.conditions.get("workload") != "replay" else None
    per_node = (
        row.cell.num_gpus // nodes if nodes else said if isinstance(said, int) else gpus_per_node
    )
    limit = in_file * GIB if isinstance(in_file, int | float) else row.device_memory_bytes
    return Observation(
        cell=row.cell,
        layout=replace(row.layout, options=()),
        hardware=device,
        gpus_per_node=max(per_node, 1),
        step_seconds=None if row.thrashing else row.step_seconds,
        peak_memory_bytes=float(row.peak_memory_bytes)
        if has_this_trainer and row.peak_memory_bytes is not None
        else None,
        out_of_memory=has_this_trainer
        and row.out_of_memory
        and (limit is not None or device.memory_bytes < UNLIMITED_BYTES),
        memory_limit_bytes=None if limit is None else float(limit),
    )


def _waited_for_its_steps(row: ObservationRow) -> bool:
    """Say whether its steps took the time that it tells. Workload synthetic waits only where it is asked to."""
    if row.steady_seconds is None or row.num_steps is None or row.step_seconds is None:
        return True
    return row.steady_seconds >= WAITED_SHARE * row.num_steps * row.step_seconds


def sweeps_of(rows: Iterable[Taught]) -> dict[str, int]:
    """How many trials of each sweep, the most first."""
    counts: dict[str, int] = {}
    for taught in rows:
        counts[taught.row.sweep.name] = counts.get(taught.row.sweep.name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

"""Learns about a new sweep from the store: constants fitted to measurements of its relatives.

Relatives are trials of any sweep on the same device, with the same workload and the options of it
that change its physics, nearest first. Trials with the newest software count in full, older ones as
the prior of these. A cell's own trials come last.
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
from db.store_reads import StoreReads
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate_times, with_memory_of
from orchestrator.core.physics.fit_quality import agreement
from orchestrator.core.physics.links import Network, network_of
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import (
    GIB,
    UNLIMITED_BYTES,
    Hardware,
    from_driver_name,
)
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.search.planner import trainer_of
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.trial_devices import data_sheet, devices_of, is_wanted, may_be_wanted

# Options that change neither time nor memory of a layout, or only the limit of memory.
UNPHYSICAL = frozenset({
    "learning_rate", "token_file", "token_dtype", "memory_limit_bytes", "device_memory_bytes",
    "noise", "sleep", "faults", "env_from", "pass_env", "metrics", "one_rank_per_node",
    # Runs that others measured on such a device are relatives.
    "table_id",
})  # fmt: skip
PRETENDED = frozenset({"synthetic", "replay"})  # workloads that compute nothing
# Phase steady has to have lasted this share of the timed steps.
WAITED_SHARE = 0.5
# A fit missed a cell if this many rows have a median error of this many standard deviations.
ENOUGH_ROWS, FAR_OFF = 3, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativeTrial:
    """One trial of a relative, as calibration takes it, and where it is from."""

    row: ObservationRow
    observation: Observation
    # True if it was measured with the newest known software.
    is_current: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Fits:
    """The fits of some knowledge, each made once.

    The first part of a key is which trials were fitted: those with `older` software, those with
    `current` software, or a cell's `own`.
    """

    # The second part is the cell whose trials were left out, or whose own they are; None: none was.
    times: dict[tuple[str, Cell | None], Calibration] = field(default_factory=dict)
    # The third part is the model whose memory will be predicted; None: any model.
    memory: dict[tuple[str, Cell | None, ModelShape | None], Calibration] = field(
        default_factory=dict
    )

    @property
    def of_all_cells(self) -> Fits:
        """The fits of the trials of all cells."""
        return Fits(
            times={key: found for key, found in self.times.items() if key[1] is None},
            memory={key: found for key, found in self.memory.items() if key[1] is None},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PriorKnowledge:
    """The device of a sweep, and its relatives' trials. Each fit is made once."""

    spec: SweepSpec
    # None: no data sheet has the device, and nothing was measured on it.
    hardware: Hardware | None
    device: Device  # what ranks run on
    rows: Sequence[RelativeTrial]  # oldest first
    # Links measured by the newest `sweep netbench` on such devices.
    links: Sequence[LinkRow] = ()
    # Relatives' trials that were left out, since the speed of their device is not known.
    num_unplaced: int = 0
    # Trials of other sweeps that this sweep has taken over: they count as its own.
    reused: frozenset[int] = frozenset()
    # `fits` of earlier knowledge: new fits begin there.
    begin: Fits = field(default_factory=Fits)
    _fits: Fits = field(default_factory=Fits)

    @property
    def fits(self) -> Fits:
        """The fits of all cells: those made so far, and those to begin from for the others."""
        mine = self._fits.of_all_cells
        return Fits(
            times={**self.begin.times, **mine.times}, memory={**self.begin.memory, **mine.memory}
        )

    @cached_property
    def network(self) -> Network | None:
        """Return the constants of step time that links show; None: links were not measured."""
        return (
            network_of([row.sample for row in self.links], self.hardware)
            if self.hardware is not None
            else None
        )

    @cached_property
    def prior(self) -> Calibration:
        """Return the calibration before any trial: usual values, and those that links show."""
        trainer = trainer_of(self.spec, device=self.device)
        usual = Calibration.prior(trainer, is_known=self.spec.knows_memory is not None)
        return usual if self.network is None else usual.informed(self.network)

    @cached_property
    def launch_seconds(self) -> float | None:
        """Mean seconds that a trial holds its GPUs beyond its steps after the first."""
        found = [
            trial.row.reserved_seconds - trial.row.steady_seconds
            for trial in self.rows
            if trial.row.reserved_seconds is not None
            and trial.row.steady_seconds is not None
            and _waited_for_its_steps(trial.row)
        ]
        return max(fmean(found), 0.0) if found else None

    @cached_property
    def timed_steps(self) -> float | None:
        """The median number of timed steps of a trial; None: no trial was measured."""
        found = [trial.row.num_steps for trial in self.rows if trial.row.num_steps is not None]
        return float(median(found)) if found else None

    @cached_property
    def trial_cost(self) -> TrialCost:
        """Return the seconds of a trial in addition to its steps, and its number of steps."""
        return TrialCost.of(
            self.spec.measurement,
            launch_seconds=self.launch_seconds,
            timed_steps=self.timed_steps,
            device=self.device,
        )

    def calibration(self, cell: Cell | None = None, *, with_own: bool = True) -> Calibration:
        """Return the constants for a cell, or of all relatives together; without any, the prior.

        The trials of the cell in this very sweep are counted only `with_own`: a search that is told
        them would count them twice.
        """
        own = self._own.get(cell, []) if cell is not None else []
        mine = set(map(id, own))
        others = [trial for trial in self.rows if id(trial) not in mine] if own else self.rows
        model = cell.model if cell is not None else None
        if own and others:
            # Where the fits without each of the cells begin.
            self._of(self.rows, model, without=None)
        found = self._of(others, model, without=cell if own else None)
        if cell is None:
            return found
        prior = found.widened() if others else found
        if not own or not with_own:
            return prior
        return self._fitted("own", own, prior, model, without=cell)

    @cached_property
    def _own(self) -> dict[Cell, list[RelativeTrial]]:
        """The trials of the sweep itself, and those that it has taken over, by cell."""
        found: dict[Cell, list[RelativeTrial]] = {}
        for trial in self.rows:
            if trial.row.sweep.name == self.spec.name or trial.row.trial_id in self.reused:
                found.setdefault(trial.row.cell, []).append(trial)
        return found

    def _of(
        self, rows: Sequence[RelativeTrial], model: ModelShape | None, *, without: Cell | None
    ) -> Calibration:
        """Return the constants fitted to these rows. The model's own peaks count most."""
        prior = self.prior
        older = [trial for trial in rows if not trial.is_current]
        if older:
            prior = self._fitted("older", older, prior, model, without=without).widened()
        current = [trial for trial in rows if trial.is_current]
        return self._fitted("current", current, prior, model, without=without)

    def _fitted(
        self,
        which: str,
        rows: Sequence[RelativeTrial],
        prior: Calibration,
        model: ModelShape | None,
        *,
        without: Cell | None,
    ) -> Calibration:
        observations = [trial.observation for trial in rows]
        times, memory = self._fits.times, self._fits.memory
        if (which, without) not in times:
            begin = times.get((which, None)) or self.begin.times.get((which, None))
            times[which, without] = _fitted_times(observations, prior, begin)
        if (which, without, model) not in memory:
            begin = memory.get((which, None, model)) or self.begin.memory.get((which, None, model))
            memory[which, without, model] = with_memory_of(
                model, times[which, without], observations, prior, begin=begin
            )
        return memory[which, without, model]


def read_prior_knowledge(
    store: StoreReads | None,
    spec: SweepSpec,
    hardware: Hardware | None,
    *,
    device: Device,
    device_name: str | None,
    gpus_per_node: int,
    nodes: Collection[str] | None = None,
    begin: Fits | None = None,
) -> PriorKnowledge:
    """Return what the store has of a sweep's relatives. `begin`: the `fits` of what it had before.

    `device` is what ranks run on, and `hardware` its data sheet. Without one, `device_name` is how
    its driver calls it; None: processor cores. `gpus_per_node` replaces that of trials whose nodes
    are unknown. `nodes`: links count that were measured on one of these; None: on any.
    """
    rows = _relatives(store, spec, hardware, device_name) if store is not None else []
    devices = devices_of(rows)
    found = [
        (row, ran_on)
        for row in rows
        if (ran_on := devices.of(row)) is not None and is_wanted(row, ran_on, hardware, device_name)
    ]
    if not found:
        unplaced = sum(devices.of(row) is None for row in rows)
        return PriorKnowledge(
            spec=spec,
            hardware=hardware,
            device=device,
            rows=(),
            links=_links(store, spec, hardware, nodes),
            num_unplaced=unplaced,
        )
    newest = found[-1][0]
    # Processor cores differ from machine to machine: take those of the newest trial.
    found = [(row, ran_on) for row, ran_on in found if ran_on.name == devices.name_of(newest)]
    stack = next((_stack(row) for row, _ in reversed(found) if not row.out_of_memory), None)
    planned_for = hardware or found[-1][1]
    planned = trainer_of(spec, device=device)
    trials = [
        RelativeTrial(
            row=row,
            observation=_observation(
                row,
                ran_on,
                gpus_per_node=gpus_per_node,
                trainer=_trainer_of_trial(row, spec, device),
                planned=planned,
            ),
            is_current=row.out_of_memory or _stack(row) == stack,
        )
        for row, ran_on in found
    ]
    return PriorKnowledge(
        spec=spec,
        hardware=planned_for,
        device=device,
        rows=trials,
        links=_links(store, spec, planned_for, nodes),
        reused=store.reused_by(spec.name) if store is not None else frozenset(),
        begin=begin or Fits(),
    )


def _trainer_of_trial(row: ObservationRow, spec: SweepSpec, device: Device) -> Trainer:
    """Return the sweep's trainer with the options of this trial that vary among layouts."""
    of_sweep = _physics(_options_of(row.sweep.conditions))
    values = {name: value for name, value in of_sweep.items() if name in spec.axes.options}
    return trainer_of(
        spec, tuple(sorted((values | dict(row.layout.options)).items())), device=device
    )


def _relatives(
    store: StoreReads, spec: SweepSpec, hardware: Hardware | None, device_name: str | None
) -> Sequence[ObservationRow]:
    """Return what the store has of this workload, with its options, on devices that may be it."""
    varying = set(spec.axes.options)
    wanted = _without(_physics(spec.workload.options.conditions()), varying)

    def _is_relative(conditions: Mapping[str, Any]) -> bool:
        return _without(_physics(_options_of(conditions)), varying) == wanted

    def _is_device(name: str, peak_sources: Sequence[str]) -> bool:
        return may_be_wanted(data_sheet(name, peak_sources), name, hardware, device_name)

    return store.observations(
        workload=spec.workload.name, is_relative=_is_relative, is_device=_is_device
    )


def _links(
    store: StoreReads | None,
    spec: SweepSpec,
    hardware: Hardware | None,
    nodes: Collection[str] | None,
) -> list[LinkRow]:
    """Return the newest measurement of the links of such devices; a pretended trial uses none."""
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
    """Return whether a driver calls such a device so. Cores go by their name."""
    if device_name is None:
        return False
    known = from_driver_name(device_name)
    return (known.name if known is not None else device_name) == hardware.name


def _fitted_times(
    observations: Sequence[Observation], prior: Calibration, begin: Calibration | None
) -> Calibration:
    """Fit, and fit again if whole cells stay far off.

    If all errors of a cell are large, the robust fit ignores them as if each run were disturbed.
    """
    found = calibrate_times(observations, prior, begin=begin)
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
    return calibrate_times(
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


def _observation(
    row: ObservationRow,
    device: Hardware,
    *,
    gpus_per_node: int,
    trainer: Trainer,
    planned: Trainer,
) -> Observation:
    """Return what calibration takes of a trial of this `trainer`.

    Options that vary may make it another one than is `planned`: its memory then tells nothing of
    that one's.
    """
    is_planned = trainer == planned
    said, in_file = (
        row.sweep.conditions.get("gpus_per_node"),
        row.sweep.conditions.get("device_memory_gib"),
    )
    # In a replay the node may belong to the one process that stood for the whole gang.
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
        if is_planned and row.peak_memory_bytes is not None
        else None,
        out_of_memory=is_planned
        and row.out_of_memory
        and (limit is not None or device.memory_bytes < UNLIMITED_BYTES),
        memory_limit_bytes=None if limit is None else float(limit),
        trainer=trainer,
    )


def _waited_for_its_steps(row: ObservationRow) -> bool:
    """Return whether its steps took the time that it tells: workload synthetic may not wait."""
    if row.steady_seconds is None or row.num_steps is None or row.step_seconds is None:
        return True
    return row.steady_seconds >= WAITED_SHARE * row.num_steps * row.step_seconds


def sweeps_of(rows: Iterable[RelativeTrial]) -> dict[str, int]:
    """Return how many trials each sweep has, the most first."""
    counts: dict[str, int] = {}
    for trial in rows:
        counts[trial.row.sweep.name] = counts.get(trial.row.sweep.name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))

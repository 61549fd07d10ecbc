"""One cell of a table of measured runs, as input of a prediction and of a calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.table_folder import read_tables
from orchestrator.core.physics.calibration import Calibration, Predicted
from orchestrator.core.physics.memory import Stage
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.arrays import Floats, Mask
from orchestrator.core.problem.hardware import Hardware, from_label
from orchestrator.core.problem.layout_table import LayoutTable

# Trainers share the constants of time; each has its own constants of memory.
Calibrations = Mapping[Trainer, Calibration]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One cell of one table: its runs as arrays and as observations for a calibration."""

    table_id: str
    runs: tuple[MeasuredRun, ...]

    @cached_property
    def hardware(self) -> Hardware:
        return from_label(self.runs[0].hardware, memory_bytes=self.runs[0].memory_bytes)

    @cached_property
    def trainers(self) -> list[Trainer]:
        """The trainer of each run: a table may hold runs of two versions of a program."""
        return [run.trainer for run in self.runs]

    @cached_property
    def table(self) -> LayoutTable:
        return LayoutTable.of(run.layout for run in self.runs if run.layout is not None)

    @cached_property
    def seconds(self) -> Floats:
        return np.array(
            [
                run.step_seconds if run.status is RunStatus.OK and run.step_seconds else np.nan
                for run in self.runs
            ]
        )

    @cached_property
    def peaks(self) -> Floats:
        return np.array(
            [
                run.peak_memory_bytes
                if run.status is RunStatus.OK and run.peak_memory_bytes
                else np.nan
                for run in self.runs
            ]
        )

    @cached_property
    def ran(self) -> Mask:
        return np.array([run.status is RunStatus.OK for run in self.runs])

    @cached_property
    def ran_out(self) -> Mask:
        return np.array([run.status is RunStatus.OOM for run in self.runs])

    def memory_bytes(self, calibrations: Calibrations, stage: Stage = Stage.FULLEST) -> Floats:
        found = np.full(len(self.runs), np.nan)
        for trainer in set(self.trainers):
            rows = np.array([other == trainer for other in self.trainers])
            found[rows] = self.predict(calibrations[trainer], stage).memory_bytes[rows]
        return found

    def log_seconds(self, calibrations: Calibrations) -> Floats:
        return self.predict(calibrations[self.trainers[0]], Stage.FULLEST).log_step_seconds

    def predict(self, calibration: Calibration, stage: Stage) -> Predicted:
        cell = self.runs[0].cell
        assert cell is not None
        return calibration.predict(
            self.table, cell, self.hardware, gpus_per_node=self.runs[0].gpus_per_node, stage=stage
        )

    def observations(self, rows: Iterable[int] | None = None) -> list[tuple[Trainer, Observation]]:
        """Observations from some rows (None: all), each with its trainer."""
        chosen = self.runs if rows is None else [self.runs[row] for row in rows]
        return [
            (run.trainer, found)
            for run in chosen
            if (found := observation(run, self.hardware)) is not None
        ]


def problem_key(run: MeasuredRun) -> tuple[object, ...]:
    """A key that is equal for the same problem, whatever its table or model is called."""
    return (
        run.model.digest if run.model is not None else run.model_name,
        run.num_gpus,
        run.sequence_length,
        run.global_batch_size,
    )


def stage_of(run: MeasuredRun) -> Stage:
    return (
        Stage.FIRST
        if "rank0" in run.peak_memory_kind or "rank 0" in run.peak_memory_kind
        else Stage.FULLEST
    )


def observation(run: MeasuredRun, hardware: Hardware) -> Observation | None:
    """The observation from a run; None for a crash or a row without a layout."""
    if run.cell is None or run.layout is None or run.status not in (RunStatus.OK, RunStatus.OOM):
        return None
    ok = run.status is RunStatus.OK
    return Observation(
        cell=run.cell,
        layout=run.layout,
        hardware=hardware,
        gpus_per_node=run.gpus_per_node,
        step_seconds=run.step_seconds if ok else None,
        peak_memory_bytes=run.peak_memory_bytes if ok else None,
        out_of_memory=not ok,
        stage=stage_of(run),
    )


def read_problems(folder: Path, table_ids: Sequence[str] | None) -> list[Problem]:
    """The cells whose model and layouts are known, of all tables in a folder.

    Rows that are not marked for replay are used only if the table has no others.
    """
    found = []
    for _, cells in read_tables(folder, table_ids):
        replayed = any(run.replay for cell in cells for run in cell)
        found += [
            problem for cell in cells if (problem := _problem(cell, replayed=replayed)) is not None
        ]
    return found


def _problem(cell: list[MeasuredRun], *, replayed: bool) -> Problem | None:
    runs = tuple(
        run
        for run in cell
        if run.cell is not None and run.layout is not None and run.replay == replayed
    )
    # Adapters train few weights, and are not covered by the formulas.
    full = tuple(run for run in runs if run.word("peft") in ("", "full", "full-ft"))
    return Problem(table_id=cell[0].table_id, runs=full) if full else None

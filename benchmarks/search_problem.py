"""A search problem from a table of measured runs: the rows of one cell, one row per layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from zlib import crc32

import numpy as np

from benchmarks.prediction_problem import observation, problem_key
from benchmarks.table_folder import read_tables
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.calibration_fit import calibrate
from orchestrator.core.physics.observation import Observation
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.pretend.replay import DEFAULT_PROFILE
from orchestrator.core.pretend.run_table import (
    MeasuredRun,
    RunStatus,
    named_profile,
    representative_run,
)
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.hardware import Hardware, from_label
from orchestrator.core.problem.layout import Layout

FEWEST_ROWS = 8
NAMED, WRONG = "named", "wrong"  # whose memory a search is told


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One cell of one table: distinct layouts, each with the run that its launch returns."""

    table_id: str
    runs: tuple[MeasuredRun, ...]
    profile: str = DEFAULT_PROFILE  # the trainer that is predicted

    @property
    def name(self) -> str:
        run = self.runs[0]
        return (
            f"{self.table_id}/all"
            if self.is_mixed
            else f"{self.table_id}/{run.num_gpus}gpu_gb{run.global_batch_size}"
        )

    @property
    def is_mixed(self) -> bool:
        """True if it combines several numbers of GPUs or batches, each too small by itself."""
        return (
            len({(run.num_gpus, run.global_batch_size, run.sequence_length) for run in self.runs})
            > 1
        )

    @property
    def has_physics(self) -> bool:
        """True if memory and time of its layouts can be predicted: one cell of a known model."""
        return self.runs[0].cell is not None and not self.is_mixed

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(_layout(run) for run in self.runs)

    @cached_property
    def hardware(self) -> Hardware:
        return from_label(self.runs[0].hardware, memory_bytes=self.runs[0].memory_bytes)

    @property
    def trainer(self) -> Trainer:
        return TRAINERS[self.profile]

    @cached_property
    def speeds(self) -> Floats:
        """Tokens per second and GPU; 0 for a row that did not run."""
        ran = [run.status is RunStatus.OK and run.tokens_per_second_per_gpu for run in self.runs]
        return np.array([float(speed or 0.0) for speed in ran])

    def shuffled(self, seed: int) -> Problem:
        """The same rows in random order, because files are sorted by speed."""
        order = np.random.default_rng(seed).permutation(len(self.runs))
        return replace(self, runs=tuple(self.runs[row] for row in order))

    def observations(self) -> list[Observation]:
        return [
            found for run in self.runs if (found := observation(run, self.hardware)) is not None
        ]


def read_problems(
    folder: Path,
    patterns: Sequence[str] | None,
    *,
    fewest_rows: int = FEWEST_ROWS,
    unmarked: bool = False,
    trainer: str = NAMED,
) -> list[Problem]:
    """The problems of a folder's tables.

    `trainer`: NAMED, the one that the table's words name; WRONG, for each table another one; or a
    name of core/physics/trainer.py for all of them.
    """
    found: list[Problem] = []
    for table_id, cells in read_tables(folder, patterns):
        groups = [
            [
                run
                for run in cell
                if (run.replay or unmarked) and run.layout is not None and _is_usable(run)
            ]
            for cell in cells
        ]
        distinct = [tuple(_distinct(runs)) for runs in groups if runs]
        if not distinct:
            continue
        profile = _profile(trainer, table_id, distinct)
        problems = [Problem(table_id=table_id, runs=runs, profile=profile) for runs in distinct]
        large = [problem for problem in problems if len(problem.runs) >= fewest_rows]
        whole = Problem(
            table_id=table_id,
            runs=tuple(_distinct([run for runs in groups for run in runs])),
            profile=profile,
        )
        found += large or ([whole] if len(whole.runs) >= fewest_rows else [])
    return found


def _profile(trainer: str, table_id: str, groups: Sequence[Sequence[MeasuredRun]]) -> str:
    if trainer not in (NAMED, WRONG):
        return trainer
    named = named_profile(run for runs in groups for run in runs)
    if trainer == NAMED:
        return named
    # One program in two versions is not wrong.
    others = sorted(
        name for name in TRAINERS if name != DEFAULT_PROFILE and name.split("-")[0] != named
    )
    return others[crc32(table_id.encode()) % len(others)]


def calibration_of(problem: Problem, relatives: Sequence[Problem]) -> Calibration | None:
    """Calibrate to the problems of other tables on the same hardware with the same trainer."""
    rows = [
        row
        for other in relatives
        if other.table_id != problem.table_id
        and problem_key(other.runs[0]) != problem_key(problem.runs[0])
        and (other.hardware.name, other.trainer) == (problem.hardware.name, problem.trainer)
        for row in other.observations()
    ]
    if not rows:
        return None
    return calibrate(rows, prior_of(problem), model=problem.runs[0].model).widened()


def prior_of(problem: Problem) -> Calibration:
    """What a search believes before any trial: less sure if no trainer is named."""
    return Calibration.prior(problem.trainer, is_known=problem.profile != DEFAULT_PROFILE)


def _layout(run: MeasuredRun) -> Layout:
    assert run.layout is not None
    return replace(run.layout, options=tuple(sorted(run.extra)))


def _is_usable(run: MeasuredRun) -> bool:
    return run.status in (RunStatus.OOM, RunStatus.ERROR) or (
        run.status is RunStatus.OK and run.tokens_per_second_per_gpu is not None
    )


def _distinct(runs: Sequence[MeasuredRun]) -> Iterator[MeasuredRun]:
    """One run of each layout."""
    groups: dict[Layout, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(_layout(run), []).append(run)
    yield from map(representative_run, groups.values())

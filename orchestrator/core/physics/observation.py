"""Results of launches: the rows that a calibration is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from orchestrator.core.physics.memory import Stage
from orchestrator.core.physics.step_time import StepTimeModel
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable

# Beyond this share of the memory limit the allocator frees and asks again, and a step takes 3-12
# times as long.
THRASHING_SHARE = 0.94


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The result of one launch: a time, a peak, or an out-of-memory. Unknown is None.

    Raises ValueError for seconds or bytes that are not finite and positive.
    """

    cell: Cell
    layout: Layout
    hardware: Hardware
    gpus_per_node: int
    step_seconds: float | None = None
    peak_memory_bytes: float | None = None
    out_of_memory: bool = False
    memory_limit_bytes: float | None = None  # None: the device's own
    stage: Stage = Stage.FULLEST  # whose peak it is
    # The trainer whose step was timed; None: the one that is calibrated.
    trainer: Trainer | None = None

    def __post_init__(self) -> None:
        for name in ("step_seconds", "peak_memory_bytes", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(
                    f"{name} {value} of {self.layout.key}: fits take logarithms of positive "
                    "numbers; what was not read is None"
                )

    @property
    def limit_bytes(self) -> float:
        """The memory that the launch had: its own limit, else the device's."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        return float(self.hardware.memory_bytes)

    @property
    def thrashes(self) -> bool:
        """True if it ran at the edge of its memory: its time is no guide to other layouts.

        Ranks of workload llama tell whether their allocator retried. If it did, the observation has
        no time; if not, the time counts however full the device was.
        """
        if self.trainer is not None and self.trainer.counted:
            return False
        peak = self.peak_memory_bytes
        return peak is not None and peak > THRASHING_SHARE * self.limit_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class CellObservations:
    """Observations of one cell on one kind of hardware and nodes, of one stage's peak."""

    cell: Cell
    hardware: Hardware
    gpus_per_node: int
    stage: Stage
    places: list[int] = field(default_factory=list)  # of the rows among all
    rows: list[Observation] = field(default_factory=list)

    @cached_property
    def timed(self) -> list[Observation]:
        """The rows with a time, trainer by trainer, without those that thrashed."""
        return [row for rows in self._timed_by_trainer.values() for row in rows]

    @cached_property
    def _timed_by_trainer(self) -> dict[Trainer | None, list[Observation]]:
        found: dict[Trainer | None, list[Observation]] = {}
        for row in self.rows:
            if row.step_seconds is not None and not row.thrashes:
                found.setdefault(row.trainer, []).append(row)
        return found

    @cached_property
    def peaked(self) -> list[Observation]:
        """The rows with a peak, or with an out-of-memory, which is a lower bound of it."""
        return [row for row in self.rows if row.peak_memory_bytes is not None or row.out_of_memory]

    @cached_property
    def timed_table(self) -> LayoutTable:
        """The layouts of `timed`, in its order."""
        return LayoutTable.of(row.layout for row in self.timed)

    def step_time_model(self, trainer: Trainer) -> StepTimeModel:
        """Return the work of the timed layouts, in the order of `timed`.

        `trainer` is that of a row which names none.
        """
        return StepTimeModel.joined(
            [
                StepTimeModel.of(
                    LayoutTable.of(row.layout for row in rows),
                    self.cell,
                    self.hardware,
                    gpus_per_node=self.gpus_per_node,
                    trainer=own or trainer,
                )
                for own, rows in self._timed_by_trainer.items()
            ]
        )


def by_cell(observations: Iterable[Observation]) -> Sequence[CellObservations]:
    """Group observations by cell, hardware, GPUs per node and stage of the peak."""
    found: dict[tuple[Cell, str, int, Stage], CellObservations] = {}
    for place, row in enumerate(observations):
        cell, hardware, per_node, stage = row.cell, row.hardware, row.gpus_per_node, row.stage
        key = (cell, hardware.name, per_node, stage)
        if key not in found:
            found[key] = CellObservations(
                cell=cell, hardware=hardware, gpus_per_node=per_node, stage=stage
            )
        found[key].places.append(place)
        found[key].rows.append(row)
    return list(found.values())

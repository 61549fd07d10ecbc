"""The job that a framework is configured for: a layout of a cell, and the GPUs of a node.

Knows no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import NAMED_AXES, Layout, Precision, RecomputeMode
from orchestrator.core.problem.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One layout of a cell, and how its processes are spread over nodes."""

    cell: Cell
    layout: Layout
    gpus_per_node: int

    def __post_init__(self) -> None:
        world, gpus = self.layout.world_size, self.cell.num_gpus
        if world != gpus:
            raise ValueError(f"the layout is for {world} GPUs, and the cell has {gpus}")
        batch, found = self.cell.global_batch_size, self.layout.global_batch_size
        if found != batch:
            raise ValueError(f"the layout has a global batch of {found}, and the cell of {batch}")
        if gpus % self.gpus_per_node:
            raise ValueError(f"{gpus} GPUs are not whole nodes of {self.gpus_per_node}")

    def number(self, name: str) -> Any:
        """An axis of the layout, or a size of the cell, by its name."""
        return getattr(self.layout if name in NAMED_AXES else self.cell, name)

    @classmethod
    def of_layout(
        cls, layout: Layout, model: ModelShape, *, sequence_length: int, gpus_per_node: int
    ) -> Job:
        """Return the job of a layout, whose cell follows from its sizes."""
        cell = Cell(
            model=model,
            num_gpus=layout.world_size,
            sequence_length=sequence_length,
            global_batch_size=layout.global_batch_size,
        )
        return cls(cell=cell, layout=layout, gpus_per_node=gpus_per_node)

    @property
    def num_nodes(self) -> int:
        return self.cell.num_gpus // self.gpus_per_node

    @property
    def recomputed_layers(self) -> int | None:
        """Return how many layers are recomputed; None: all, or none of them."""
        recompute = self.layout.recompute
        num_layers = recompute.layers_of(self.cell.model.num_layers)
        if recompute.mode is RecomputeMode.NONE or num_layers == self.cell.model.num_layers:
            return None
        return num_layers

    @property
    def is_fully_recomputed(self) -> bool:
        """True if whole layers are recomputed, however many."""
        return self.layout.recompute.mode is RecomputeMode.FULL

    def has(self, precision: Precision) -> bool:
        return self.layout.precision is precision

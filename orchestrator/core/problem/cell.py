"""One cell of a sweep: a model on a number of GPUs, with a sequence length and a global batch.

Each has a best layout of its own. Knows nothing of layouts: one belongs to a cell if its world size
and its global batch do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from orchestrator.core.problem.model_shape import PRESETS, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    model: ModelShape
    num_gpus: int
    sequence_length: int
    global_batch_size: int  # sequences per optimizer step

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def tokens_per_second_per_gpu(self, step_seconds: float) -> float:
        """Return the speed of a layout that takes so long for a step."""
        return self.tokens_per_step / step_seconds / self.num_gpus

    @property
    def key(self) -> str:
        """A readable, stable name, with the digest of a model that is not its name's preset."""
        model = self.model.name
        if PRESETS.get(model) != self.model:
            model += f"-{self.model.digest[:8]}"
        return f"{model}_{self.num_gpus}gpu_s{self.sequence_length}_gb{self.global_batch_size}"


def other_batches(asked: Collection[Cell], stored: Collection[Cell]) -> list[tuple[Cell, Cell]]:
    """Return each new cell with a stored one that it differs from in the global batch only.

    A stored cell that is still asked for does not count: the file names both batches.
    """
    left = [cell for cell in stored if cell not in asked]
    return [
        (new, old)
        for new in asked
        if new not in stored
        for old in left
        if replace(old, global_batch_size=new.global_batch_size) == new
    ]

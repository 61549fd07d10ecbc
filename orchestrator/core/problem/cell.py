"""One problem of a sweep: a model definition, a number of GPUs, a sequence length and a global batch. Each has a best layout of its own.

Knows nothing of layouts; whether one belongs to a cell is said by its world size and its global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def key(self) -> str:
        """A readable, stable name. A model that is not the preset of its name carries its digest: a label is not an identity."""
        model = (
            self.model.name
            if PRESETS.get(self.model.name) == self.model
            else f"{self.model.name}-{self.model.digest[:8]}"
        )
        return f"{model}_{self.num_gpus}gpu_s{self.sequence_length}_gb{self.global_batch_size}"

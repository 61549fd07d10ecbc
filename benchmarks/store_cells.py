"""The cells of the sweeps that benchmarks of the store write."""

from __future__ import annotations

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import PRESETS


def cells(num: int) -> list[Cell]:
    """Return cells of one model, each on twice the GPUs of the one before."""
    return [
        Cell(
            model=PRESETS["llama-3.1-8b"],
            num_gpus=8 * 2**i,
            sequence_length=4096,
            global_batch_size=1024,
        )
        for i in range(num)
    ]

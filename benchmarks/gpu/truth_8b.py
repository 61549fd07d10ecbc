"""Finds which layouts of the largest Llama fit on one GPU and how fast they are.

    python -m benchmarks.gpu.truth_8b OUT_DIR [--rehearse]

The 8B on a GPU that holds its 16 bytes a parameter (120 GiB), else the 3B, the 1B or the 60M. The
summary has both, predicted and measured, before and after calibration.
"""

from __future__ import annotations

from benchmarks.gpu.session import MIB, Session
from benchmarks.gpu.truth import Truth

# The least memory of a GPU, in MiB, for each model: 16 bytes a parameter and some activations.
SMALLEST_GPU = {
    "llama-3.1-8b": 133_000,
    "llama-3.2-3b": 62_000,
    "llama-3.2-1b": 30_000,
    "llama-60m": 0,
}


def main() -> None:
    with Session.of_command(__doc__, name="truth_8b") as session:
        truth = Truth.of(session, *cell_of(session), seconds=5.0, min_steps=4)
        truth.measure()
        session.finish(truth.summary())


def cell_of(session: Session) -> tuple[dict[str, object], dict[str, object]]:
    """The sizes and the axes of the cell."""
    if session.rehearse:
        sizes = {"model": "llama-tiny", "sequence_length": 64, "global_batch_size": 2}
        axes = {
            "micro_batch_size": [1, 2],
            "recompute": ["none", "full:2"],
            "options": {"loss": ["chunked:8"]},
        }
        return sizes, axes
    total = session.known_gpu().total_bytes
    model = next(name for name, least in SMALLEST_GPU.items() if total >= least * MIB)
    # Accumulated in 4, 2 or 1 micro-batches: gradients are freed only with 1.
    sizes = {"model": model, "sequence_length": 4096, "global_batch_size": 4}
    axes = {
        "micro_batch_size": [1, 2, 4],
        "recompute": ["none", "selective_ops", "full", "full:16"],
        "options": {"loss": ["chunked:8", "whole"], "compile": [True]},
    }
    return sizes, axes


if __name__ == "__main__":
    main()

"""Measures every layout of a 1B Llama on one GPU, and replays the search `auto` on that table.

    python -m benchmarks.gpu.truth_1b OUT_DIR [--rehearse]

Micro-batches of 1 to 16 sequences x recomputation x loss x compile: 60 layouts of 64K tokens a
step. They take two or three calls of this command.
"""

from __future__ import annotations

from benchmarks.gpu.session import Session
from benchmarks.gpu.truth import Truth


def main() -> None:
    with Session.of_command(__doc__, name="truth_1b") as session:
        truth = Truth.of(session, *cell_of(session), seconds=3.0, min_steps=3)
        truth.measure()
        session.finish({**truth.summary(), "auto": truth.searches()})


def cell_of(session: Session) -> tuple[dict[str, object], dict[str, object]]:
    """The sizes and the axes of the cell."""
    if session.rehearse:
        sizes = {"model": "llama-tiny", "sequence_length": 64, "global_batch_size": 4}
        axes = {
            "micro_batch_size": [1, 4],
            "recompute": ["none", "full"],
            "options": {"loss": ["chunked:8"]},
        }
        return sizes, axes
    sizes = {"model": "llama-3.2-1b", "sequence_length": 4096, "global_batch_size": 16}
    axes = {
        "micro_batch_size": [1, 2, 4, 8, 16],
        "recompute": ["none", "selective_ops", "full"],
        "options": {"loss": ["chunked:8", "whole"], "compile": [True, False]},
    }
    return sizes, axes


if __name__ == "__main__":
    main()

"""Compares the loss of every step between layouts that compute the same, on one GPU.

    python -m benchmarks.gpu.losses OUT_DIR [--rehearse]

Recomputation, compiling, and micro-batches of one or two sequences change the order of additions
only, so all layouts train alike from the same weights with the same tokens; transformers' Llama has
the same tokens, but weights of its own. Model by the GPU's memory, as truth_8b.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping

from benchmarks.arm_job import ArmJob, can_import
from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.session import Session
from benchmarks.gpu.truth_8b import cell_of

# Recomputation, sequences of a micro-batch, compiled: two sequences a step.
CASES = (
    ("none", 1, True),
    ("full", 1, True),
    ("full", 1, False),
    ("full", 2, True),
    ("selective_ops", 1, True),
    ("none", 1, False),
)
NUM_STEPS = 12


def main() -> None:
    with Session.of_command(__doc__, name="losses") as session:
        cases = [case for case in CASES if not (session.rehearse and case[2])]
        losses = {name_of(*case): train(session, "llama", *case) for case in cases}
        foreign = None
        if not session.rehearse and can_import(sys.executable, "transformers"):
            foreign = train(session, "transformers", "full", 1, True)
        session.finish(
            {
                "losses": losses,
                "losses_of_transformers": foreign,
                "furthest_apart": furthest_apart(losses),
            }
        )


def name_of(recompute: str, sequences: int, compiled: bool) -> str:
    return f"mbs{sequences} {recompute} {'compiled' if compiled else 'eager'}"


def train(
    session: Session, program: str, recompute: str, sequences: int, compiled: bool
) -> list[float] | str | None:
    """The losses of its steps, or why there are none."""
    sizes, _ = cell_of(session)
    attempt = Attempt(
        model=str(sizes["model"]),
        sequence_length=int(str(sizes["sequence_length"])),
        layout=layout(recompute, mbs=sequences, ga=2 // sequences, precision=session.precision),
        options={"compile": compiled},
    )
    job = ArmJob(
        arm=program,
        request=session.request(attempt),
        num_warmup=1,
        num_steps=(3 if session.rehearse else NUM_STEPS) - 1,
        compile=compiled,
    )
    key = f"{program}: {name_of(recompute, sequences, compiled)}"
    record = session.train(key, job, program=program, case=key)
    if record is None or "error" in record:
        return None if record is None else str(record["error"])[-300:]
    return list(record["losses"])


def furthest_apart(losses: Mapping[str, list[float] | str | None]) -> list[float]:
    """By step: how far the losses of two layouts are apart at most, over the mean of all."""
    curves = [curve for curve in losses.values() if isinstance(curve, list)]
    return [
        (max(values) - min(values)) / statistics.fmean(values)
        for values in zip(*curves, strict=True)
    ]


if __name__ == "__main__":
    main()

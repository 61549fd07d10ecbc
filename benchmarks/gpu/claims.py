"""Measures what is said of recomputation and attention: activations by length, and time costs.

    python -m benchmarks.gpu.claims OUT_DIR [--rehearse]

Eager attention stores a score matrix, so its activations grow with the square of the length; those
of fused attention grow linearly. Full recomputation costs about a third more FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.attempt_record import is_measured
from benchmarks.gpu.session import Session

RECOMPUTES = ("none", "selective_attention", "selective_ops", "full")


def main() -> None:
    with Session.of_command(__doc__, name="claims") as session:
        memory = {
            kind: {length: activations(session, kind, length) for length in lengths(session)}
            for kind in ("eager", "auto")
        }
        cases = [False] if session.rehearse else [False, True]
        time = {
            "compiled" if compiled else "eager": costs(session, compiled=compiled)
            for compiled in cases
        }
        session.finish(
            {
                "activation_bytes_of_attention": memory,
                "growth_of_activations": {kind: growth(found) for kind, found in memory.items()},
                "time_and_memory_of_recomputation": time,
            }
        )


def lengths(session: Session) -> list[int]:
    return [64, 256] if session.rehearse else [1024, 2048, 4096, 8192, 16384]


def activations(session: Session, attention: str, length: int) -> int | str | None:
    """The bytes of activations of one sequence, or how the attempt ended otherwise."""
    record = session.measure(
        Attempt(
            model="llama-tiny" if session.rehearse else "llama-3.2-1b",
            sequence_length=length,
            layout=layout(precision=session.precision, attention=attention, compile=False),
            options={},
            seconds=0.5,
        )
    )
    if record is None or not is_measured(record):
        return None if record is None else str(record["outcome"])
    parts = record["told"]["memory_bytes_by_part"]
    return int(parts["activations"]) if "activations" in parts else None


def growth(found: Mapping[int, Any]) -> float | None:
    """The exponent of the length by which activations grew from the shortest to the longest."""
    known = [(length, size) for length, size in found.items() if isinstance(size, int)]
    if len(known) < 2:
        return None
    (first, small), (last, large) = known[0], known[-1]
    return math.log(large / small) / math.log(last / first)


def costs(session: Session, *, compiled: bool) -> dict[str, Any]:
    """Step time and activations of each recomputation, also relative to none."""
    rows: dict[str, Any] = {}
    for recompute in RECOMPUTES[::3] if session.rehearse else RECOMPUTES:
        record = session.measure(
            Attempt(
                model="llama-tiny" if session.rehearse else "llama-3.2-1b",
                sequence_length=64 if session.rehearse else 4096,
                layout=layout(recompute, mbs=2, precision=session.precision, compile=compiled),
                options={},
                seconds=5.0,
                min_steps=10,
            )
        )
        if record is None or not is_measured(record):
            rows[recompute] = {"outcome": None if record is None else record["outcome"]}
            continue
        told, none = record["told"], rows.get("none", {}).get("step_seconds")
        seconds = record["step_seconds_median"]
        rows[recompute] = {
            "step_seconds": seconds,
            "over_none": None if none is None else seconds / none,
            "mfu": record["mfu"],
            "hfu": record["hfu"],
            "activation_bytes": told["memory_bytes_by_part"].get("activations"),
            "peak_memory_allocated_bytes": told["peak_memory_allocated_bytes"],
        }
    return rows


if __name__ == "__main__":
    main()

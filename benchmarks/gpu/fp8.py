"""Compares fp8 with bf16 at the same layouts on one GPU: speed, memory, and the first losses.

    python -m benchmarks.gpu.fp8 OUT_DIR [--rehearse]

Compiled layers; fp8 needs torchao and SM 8.9 or newer. The 1B, and the model of truth_8b. In a
rehearsal bf16 stands for fp8, and fp32 for bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.attempt_record import is_measured
from benchmarks.gpu.session import Session
from benchmarks.gpu.truth_8b import cell_of


def main() -> None:
    with Session.of_command(__doc__, name="fp8") as session:
        found = {}
        for model, recompute, sequences in cases(session):
            records = {
                precision: session.measure(
                    attempt_of(session, model, recompute, sequences, precision)
                )
                for precision in precisions(session)
            }
            found[f"{model} mbs{sequences} {recompute}"] = comparison(list(records.values()))
        session.finish({"fp8_over_bf16": found})


def cases(session: Session) -> list[tuple[str, str, int]]:
    """Model, recomputation, and sequences of a micro-batch."""
    if session.rehearse:
        return [("llama-tiny", "none", 1)]
    largest = str(cell_of(session)[0]["model"])
    return [("llama-3.2-1b", "none", 4), (largest, "full", 2)]


def precisions(session: Session) -> tuple[str, str]:
    return ("fp32", "bf16") if session.rehearse else ("bf16", "fp8")


def attempt_of(
    session: Session, model: str, recompute: str, sequences: int, precision: str
) -> Attempt:
    return Attempt(
        model=model,
        sequence_length=64 if session.rehearse else 4096,
        layout=layout(recompute, mbs=sequences, precision=precision, compile=not session.rehearse),
        options={},
        seconds=3.0,
    )


def comparison(records: list[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The second precision's numbers over the first's; what failed, if one was not measured."""
    if not all(is_measured(record) for record in records):
        return {"outcomes": [record and record.get("outcome") for record in records]}
    (wide, narrow) = (record for record in records if record is not None)
    return {
        "tokens_per_second": narrow["tokens_per_second"] / wide["tokens_per_second"],
        "peak_memory_allocated_bytes": narrow["told"]["peak_memory_allocated_bytes"]
        / wide["told"]["peak_memory_allocated_bytes"],
        "loss_first": [wide["told"]["loss_first"], narrow["told"]["loss_first"]],
        "loss_last": [wide["told"]["loss_last"], narrow["told"]["loss_last"]],
    }


if __name__ == "__main__":
    main()

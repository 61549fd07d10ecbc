"""Checks in a few minutes that everything works on this GPU, and that out-of-memories are clean.

    python -m benchmarks.gpu.smoke OUT_DIR [--rehearse]

The 60M and the 1B Llama with every recomputation and loss, eager and compiled. Then 50 layouts that
run out of memory: each has to be recognised as such, and the GPU has to be as empty as before
within 5 s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.gpu.attempt import Attempt, layout
from benchmarks.gpu.attempt_record import is_measured, record_of
from benchmarks.gpu.session import MIB, Session
from orchestrator.core.trial.failure_kinds import FailureKind

RECOMPUTES = ("none", "selective_ops", "selective_attention", "full", "full:2")
LOSSES = ("whole", "chunked:8")
NUM_OOMS = 50
CLEAN_SECONDS = 5.0
CLEAN_BYTES = 200 * MIB
POLL_SECONDS = 0.1
# A rank that imported CUDA before it was forked says so.
BAD_FORK = "Cannot re-initialize CUDA in forked subprocess"


def main() -> None:
    with Session.of_command(__doc__, name="smoke", seconds=300.0) as session:
        small, large = layouts(session)
        measured = [session.measure(attempt) for attempt in small]
        ooms = [run_out_of_memory(session, attempt) for attempt in too_large(session)]
        measured += [session.measure(attempt) for attempt in large]
        session.finish(
            summary(
                [record for record in measured if record is not None],
                [record for record in ooms if record is not None],
                rehearse=session.rehearse,
            )
        )


def layouts(session: Session) -> tuple[list[Attempt], list[Attempt]]:
    """Those of a small model, in which faults show first, and those of a larger one."""
    if session.rehearse:
        # Compiling for a CPU takes longer than a rehearsal.
        tiny = attempts("llama-tiny", 64, precision="fp32", compiles=[False])
        return tiny[::3], tiny[1:2]
    return (
        attempts("llama-60m", 2048, precision="bf16", compiles=[False, True]),
        attempts("llama-3.2-1b", 4096, precision="bf16", compiles=[False, True]),
    )


def attempts(model: str, length: int, *, precision: str, compiles: Sequence[bool]) -> list[Attempt]:
    """Every recomputation and loss, eager and compiled."""
    return [
        Attempt(
            model=model,
            sequence_length=length,
            layout=layout(recompute, precision=precision, loss=loss, compile=compiled),
            options={},
            seconds=0.5,
        )
        for compiled in compiles
        for recompute in RECOMPUTES
        for loss in LOSSES
    ]


def too_large(session: Session) -> list[Attempt]:
    """Layouts that exceed any GPU: in a forward pass, in the loss, and when the model is built."""
    if session.rehearse:
        return [
            Attempt(
                model="llama-tiny",
                sequence_length=64,
                layout=layout(precision="fp32"),
                options={"memory_limit_bytes": size * MIB},
            )
            # The peak is 20 MiB.
            for size in (6, 17, 19)
        ]
    small = [
        large_attempt("llama-60m", 8192, recompute, mbs, precision=precision, loss=loss)
        for precision, recompute, (loss, mbs) in product(
            ("bf16", "fp16", "fp32"),
            ("none", "selective_attention", "full:2"),
            (("whole", 192), ("chunked:8", 512)),
        )
    ]
    larger = [
        large_attempt("llama-3.2-1b", length, recompute, mbs, **options)
        for (recompute, mbs), (length, options) in product(
            (("none", 16), ("selective_ops", 32), ("full", 64), ("full:8", 32)),
            ((8192, {"loss": "whole"}), (16384, {"attention": "eager"})),
        )
    ]
    # 16 bytes a parameter: 1.1 TB and 6.5 TB, which the GPU lacks before the first step.
    built = [
        large_attempt("llama-3.1-70b", 4096, "full", 1),
        large_attempt("llama-3.1-405b", 4096, "full", 1),
    ]
    found = [*small, *larger, *built]
    again = [replace(attempt, run=1) for attempt in small]
    return [*found, *again, *(replace(attempt, run=2) for attempt in small)][:NUM_OOMS]


def large_attempt(
    model: str, length: int, recompute: str, mbs: int, *, precision: str = "bf16", **options: Any
) -> Attempt:
    return Attempt(
        model=model,
        sequence_length=length,
        layout=layout(recompute, mbs=mbs, precision=precision, compile=False, **options),
        options={},
    )


def run_out_of_memory(session: Session, attempt: Attempt) -> dict[str, Any] | None:
    """Run a layout that cannot fit, and watch the device until it is as empty as before."""

    def watched() -> dict[str, Any]:
        used_before = session.memory_used_bytes()
        request = session.request(attempt)
        report = session.launch(request)
        ended = time.monotonic()
        while (
            above := session.memory_used_bytes() - used_before
        ) > CLEAN_BYTES and time.monotonic() < ended + CLEAN_SECONDS:
            time.sleep(POLL_SECONDS)
        return {
            **record_of(request, report),
            "used_bytes_before": used_before,
            "bytes_above_before": above,
            "seconds_until_clean": time.monotonic() - ended,
        }

    return session.keep(f"too large: {attempt.key}", watched, kind="too large")


def summary(
    measured: list[Mapping[str, Any]], ooms: list[Mapping[str, Any]], *, rehearse: bool
) -> dict[str, Any]:
    """The checks, each with what speaks against it."""
    failed = [record for record in measured if not is_measured(record)]
    kernels = {record["told"].get("attention_kernel") for record in measured if "told" in record}
    not_classified = [r["outcome"] for r in ooms if r["outcome"] != FailureKind.OOM_GPU]
    not_clean = [r["bytes_above_before"] for r in ooms if r["bytes_above_before"] > CLEAN_BYTES]
    texts = [
        record.get("log_tail", "") + record.get("message", "") for record in (*measured, *ooms)
    ]
    # The memory by part of a measured layout may be unknown; its speed may not be lost.
    without_parts = [
        record["layout"]
        for record in measured
        if is_measured(record) and not record["told"]["memory_bytes_by_part"]
    ]
    checks = {
        "every_layout_is_measured": not failed,
        "ranks_are_forked_without_cuda": not any(BAD_FORK in text for text in texts),
        "attention_kernel_is_stored": None not in kernels,
        "attention_is_never_math": not any("math" in str(kernel) for kernel in kernels),
        "every_out_of_memory_is_classified": not not_classified,
        "memory_is_back_within_5_s": not not_clean,
    }
    return {
        "is_good": all(checks.values()),
        "checks": checks,
        "num_measured": len(measured) - len(failed),
        "num_out_of_memory": len(ooms),
        "failed": [
            {
                name: record.get(name)
                for name in ("model", "layout", "options", "outcome", "message")
            }
            for record in failed
        ],
        "attention_kernels": sorted(map(str, kernels)),
        "without_memory_by_part": without_parts,
        "other_outcomes_of_too_large_layouts": not_classified,
        "most_bytes_left": max((r["bytes_above_before"] for r in ooms), default=None),
        "most_seconds_until_clean": max((r["seconds_until_clean"] for r in ooms), default=None),
        "memory_is_that_of": "processes" if rehearse else "the GPU",
    }


if __name__ == "__main__":
    main()

"""A small table of measured runs for tests, from a formula that can be checked by hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from itertools import product

COLUMNS = (
    "table_id", "hardware", "gpu_mem_gb", "n_gpus", "gpus_per_node", "model", "n_params",
    "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings", "seq_len", "gbs",
    "dp", "tp", "pp", "cp", "mbs", "grad_acc", "recompute", "zero_stage", "precision",
    "attention_kernel", "status", "step_time_s", "peak_mem_gb", "peak_mem_kind", "replay",
)  # fmt: skip
NUM_GPUS, GLOBAL_BATCH = 8, 32
LIMIT_GIB = 80


def step_seconds(tp: int, mbs: int, recompute: str, kernel: str) -> float:
    """Best: tp 1, the largest micro-batch that fits, no recomputation, flash."""
    return (
        4.0
        * (1.0 + 0.3 * (tp - 1))
        * (1.0 + 0.2 / mbs)
        * (1.3 if recompute == "full" else 1.0)
        * (1.2 if kernel == "eager" else 1.0)
    )


def peak_gib(tp: int, mbs: int, recompute: str, kernel: str) -> float:
    return 20.0 / tp + 10.0 * mbs / tp * (0.2 if recompute == "full" else 1.0) * (
        2.0 if kernel == "eager" else 1.0
    )


def rows() -> list[dict[str, str]]:
    """24 layouts: 2 tp x 3 micro-batches x 2 recomputes x 2 kernels, less one; one has an error."""
    found = []
    for tp, mbs, recompute, kernel in product(
        (1, 2), (1, 2, 8), ("none", "full"), ("flash", "eager")
    ):
        if (tp, mbs, recompute, kernel) == (2, 1, "full", "eager"):
            continue  # nobody ran it
        dp = NUM_GPUS // tp
        if GLOBAL_BATCH % (dp * mbs):
            continue
        peak = peak_gib(tp, mbs, recompute, kernel)
        status = (
            "error"
            if (tp, mbs, recompute, kernel) == (2, 2, "none", "flash")
            else "oom"
            if peak > LIMIT_GIB
            else "ok"
        )
        ran = status == "ok"
        found.append(
            {
                **dict.fromkeys(COLUMNS, ""),
                **MODEL,
                "dp": str(dp),
                "tp": str(tp),
                "pp": "1",
                "cp": "1",
                "mbs": str(mbs),
                "grad_acc": str(GLOBAL_BATCH // dp // mbs),
                "recompute": recompute,
                "zero_stage": "1",
                "attention_kernel": kernel,
                "status": status,
                "step_time_s": f"{step_seconds(tp, mbs, recompute, kernel):.6f}" if ran else "",
                "peak_mem_gb": f"{peak:.3f}" if ran else "",
                "replay": "True",
            }
        )
    return found


MODEL: Mapping[str, str] = {
    "table_id": "formula-8gpu", "hardware": "H100-80GB", "gpu_mem_gb": str(LIMIT_GIB),
    "n_gpus": str(NUM_GPUS), "gpus_per_node": "8", "model": "Formula-8B", "layers": "32",
    "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256",
    "tied_embeddings": "False", "seq_len": "4096", "gbs": str(GLOBAL_BATCH), "precision": "bf16",
    "peak_mem_kind": "max_memory_reserved GiB",
}  # fmt: skip


def text(*more: Mapping[str, str], without: str | None = None) -> str:
    """The table as CSV, with some rows behind it; `without` leaves a column empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **({without: ""} if without else {})} for row in [*rows(), *more])
    return out.getvalue()

"""Measure how many layouts a second are enumerated and checked, and then ranked, on one core; print JSON.

python -m benchmarks.enumerate [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import describe_machine, write_result
from orchestrator.core.cell import Cell
from orchestrator.core.hardware import DEVICES
from orchestrator.core.planner import rank_candidates
from orchestrator.core.space import CellSpace, enumerate_cell
from orchestrator.core.spec import SweepSpec
from orchestrator.core.trainer import Trainer

WIDE = {
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": "auto",
    "context_parallel_size": "auto",
    "zero_stage": "auto",
    "recompute": ["none", "selective_attention", "selective_ops", "full", *(f"full:{k}" for k in range(1, 80))],
}
CONSTRAINTS = ["tp * cp <= 8", "not pp > 1 or zero_stage <= 1", "recompute != 'full' or mbs >= 2", "mbs <= 32"]


def sweep(*, constrained: bool) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "enumerate",
            "model": "llama-3.1-70b",
            "gpus": 512,
            "gpus_per_node": 8,
            "device": "h100-sxm",
            "sequence_length": 4096,
            "global_batch_tokens": "4M",
            "workload": "synthetic",
            "axes": WIDE,
            "constraints": CONSTRAINTS if constrained else [],
        }
    )


def seconds_of(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(*, constrained: bool, repeat: int) -> dict[str, object]:
    spec = sweep(constrained=constrained)
    cell = spec.cells()[0]
    found = enumerate_cell(spec, cell, gpus_per_node=8)
    by_rows = sum(found.rejected.get(constraint.reason, 0) for constraint in spec.constraints)
    checked = len(found.legal) + by_rows  # rows that were built; what products rule out is only counted
    enumerate_seconds = seconds_of(lambda: enumerate_cell(spec, cell, gpus_per_node=8), repeat)
    rank_seconds = seconds_of(lambda: rank(found, cell), repeat)
    return {
        "lattice": found.lattice_size,
        "rows_checked": checked,
        "legal": len(found.legal),
        "enumerate_seconds": round(enumerate_seconds, 4),
        "rank_seconds": round(rank_seconds, 4),
        "enumerated_per_second": round(checked / enumerate_seconds),
        "ranked_per_second": round(len(found.legal) / rank_seconds),
        "enumerated_and_ranked_per_second": round(len(found.legal) / (enumerate_seconds + rank_seconds)),
    }


def rank(found: CellSpace, cell: Cell) -> object:
    hardware = DEVICES["h100-sxm"]
    return rank_candidates(
        found.legal, cell, hardware=hardware, memory_limit_bytes=hardware.memory_bytes, gpus_per_node=8, trainer=Trainer()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the result here, with what it was measured on")
    arguments = parser.parse_args()
    machine = describe_machine()
    result = {
        "cores_used": 1,
        "without_constraints": measure(constrained=False, repeat=arguments.repeat),
        "with_four_constraints": measure(constrained=True, repeat=arguments.repeat),
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        write_result(arguments.out, benchmark="enumerate", machine=machine, result=result)


if __name__ == "__main__":
    main()

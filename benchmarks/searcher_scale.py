"""Measures what ask + tell costs when a sweep has grown, per strategy: time, memory and replay.

python -m benchmarks.searcher_scale --out benchmarks/results/searcher-scale_cpu-2core_DATE.json
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, parser_of, resident_bytes, write_result
from orchestrator.core.physics.trainer import Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.search.outcome import Measured, Outcome, OutOfMemory
from orchestrator.core.search.planner import Candidates, rank_candidates
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.search.layout_state import Known
from orchestrator.search.searcher import Searcher

GPUS, BATCH = 64, 2048
CELL = Cell(
    model=PRESETS["llama-3.1-8b"], num_gpus=GPUS, sequence_length=4096, global_batch_size=BATCH
)
LIMIT_BYTES = 79.0 * 2**30
TOLD = (100, 1_000, 5_000, 10_000)
ASKS = {Strategy.GP: 8}  # seconds each
ASKS_OTHERWISE = 200
GROWTH_OVER = 5_000


def candidates() -> Candidates:
    """About 15,000 layouts of Llama 3.1 8B on 64 GPUs, with any number of recomputed layers."""
    recomputes = [
        Recompute.parse("none"),
        *(
            Recompute.parse(f"{mode}:{k}")
            for mode in ("full", "selective_ops")
            for k in range(1, CELL.model.num_layers + 1)
        ),
    ]
    layouts = [
        Layout(
            data_parallel_size=GPUS // (tp * pp),
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=mbs,
            grad_accum_steps=BATCH * tp * pp // (GPUS * mbs),
            recompute=recompute,
            zero_stage=zero,
        )
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for mbs in (1, 2, 4, 8, 16, 32)
        for recompute in recomputes
        for zero in ((0, 1, 2, 3) if pp == 1 else (0, 1))
        if BATCH * tp * pp % (GPUS * mbs) == 0
    ]
    return rank_candidates(
        LayoutTable.of(layouts),
        CELL,
        hardware=DEVICES["h100-sxm"],
        memory_limit_bytes=LIMIT_BYTES,
        gpus_per_node=8,
        trainer=Trainer(),
    )


def outcome(ranked: Candidates, row: int, *, any_fits: bool = False) -> Outcome:
    excess = ranked.memory_bytes[row] / LIMIT_BYTES - 1
    if excess > 0 and not any_fits:
        return OutOfMemory(excess=float(excess))
    return Measured.of_step(
        float(ranked.step_seconds[row]),
        peak_memory_bytes=float(min(ranked.memory_bytes[row], LIMIT_BYTES)),
    )


def at_scale(ranked: Candidates, strategy: Strategy, told: int) -> dict[str, Any]:
    """Replay `told` outcomes, then ask and tell on top of them."""
    rows = {ranked.table.layout(row): row for row in range(len(ranked))}
    order = np.random.default_rng(0).permutation(len(ranked))[:told]
    known: list[tuple[Layout, Known]] = [
        (ranked.table.layout(int(row)), outcome(ranked, int(row), any_fits=True)) for row in order
    ]
    searcher = Searcher(
        ranked,
        cell=CELL,
        search=Search(strategy=strategy),
        objective=Objective.TOKENS_PER_SECOND_PER_GPU,
    )
    began = time.perf_counter()
    searcher.restore(known)
    replay_seconds = time.perf_counter() - began
    milliseconds, cpu_began = [], time.process_time()
    for _ in range(ASKS.get(strategy, ASKS_OTHERWISE)):
        began = time.perf_counter()
        proposal = searcher.ask()
        assert proposal is not None
        searcher.tell(proposal.layout, outcome(ranked, rows[proposal.layout], any_fits=True))
        milliseconds.append((time.perf_counter() - began) * 1e3)
    cpu_milliseconds = (time.process_time() - cpu_began) * 1e3 / len(milliseconds)
    return {
        "strategy": str(strategy),
        "told": told,
        "replay_seconds": round(replay_seconds, 3),
        "ask_and_tell_ms_median": round(float(np.median(milliseconds)), 3),
        "ask_and_tell_ms_mean": round(float(np.mean(milliseconds)), 3),
        "ask_and_tell_cpu_ms_mean": round(cpu_milliseconds, 3),
        "ask_and_tell_ms_p99": round(float(np.quantile(milliseconds, 0.99)), 3),
    }


def growth(ranked: Candidates, strategy: Strategy) -> dict[str, Any]:
    """Measure the memory gained while layouts are asked and told one by one."""
    rows = {ranked.table.layout(row): row for row in range(len(ranked))}
    searcher = Searcher(
        ranked,
        cell=CELL,
        search=Search(strategy=strategy),
        objective=Objective.TOKENS_PER_SECOND_PER_GPU,
    )
    # Loads imports and caches, which are not growth.
    for _ in range(100):
        proposal = searcher.ask()
        assert proposal is not None
        searcher.tell(proposal.layout, outcome(ranked, rows[proposal.layout]))
    before, began, asked = resident_bytes(), time.perf_counter(), 0
    while asked < GROWTH_OVER and (proposal := searcher.ask()) is not None:
        searcher.tell(proposal.layout, outcome(ranked, rows[proposal.layout]))
        asked += 1
    return {
        "strategy": str(strategy),
        "asked": asked,
        "told": searcher.told,
        "condemned": searcher.condemned,
        "seconds": round(time.perf_counter() - began, 1),
        "growth_mib": round((resident_bytes() - before) / 2**20, 1),
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    machine, ranked = describe_machine(), candidates()
    runs = [
        (strategy, told)
        for strategy in (Strategy.EXHAUSTIVE, Strategy.RANDOM, Strategy.TPE, Strategy.AUTO)
        for told in TOLD
    ]
    result = {
        "what": "ask + tell of orchestrator.search.searcher, in memory",
        "candidates": len(ranked),
        "memory": [
            growth(ranked, strategy)
            for strategy in (Strategy.EXHAUSTIVE, Strategy.TPE, Strategy.AUTO)
        ],
        "times": [
            at_scale(ranked, strategy, told) for strategy, told in [*runs, (Strategy.GP, 100)]
        ],
    }
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="searcher_scale", machine=machine, result=result)


if __name__ == "__main__":
    main()

"""Measures how many layouts one core enumerates, checks and ranks per CPU-second; prints JSON.

python -m benchmarks.enumerate [--repeat 5] [--llm-analysis PYTHON]

`--llm-analysis` names an interpreter with llm-analysis (PyPI 0.2.2). Its analysis of training,
which gives memory and step time of one layout per call, is timed in the same run, before and
after ours. It has no communication of pipelines and data parallelism, and needs a feed-forward
width that is a multiple of the hidden size; so the work is similar, not the same.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.machine import describe_machine, parser_of, write_result
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.search.planner import rank_space
from orchestrator.core.search.space import CellSpace, enumerate_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device

WIDE = {
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": "auto",
    "context_parallel_size": "auto",
    "zero_stage": "auto",
    "recompute": [
        "none",
        "selective_attention",
        "selective_ops",
        "full",
        *(f"full:{k}" for k in range(1, 80)),
    ],
}
# Every axis, for the trainer that has most of them. Fewer numbers of recomputed layers.
EVERY_AXIS = WIDE | {
    "pipeline_schedule": ["1f1b", "gpipe", "interleaved:2", "interleaved:4"],
    "recompute": ["none", "selective_attention", "selective_ops", "full", "full:20", "full:40"],
    "options": {
        "accumulate": ["scatter", "last"],
        "loss": ["whole", "chunked:8"],
        "compile": [True, False],
    },
}
CONSTRAINTS = [
    "tp * cp <= 8",
    "not pp > 1 or zero_stage <= 1",
    "recompute != 'full' or mbs >= 2",
    "mbs <= 32",
]


def sweep(
    axes: Mapping[str, object] = WIDE,
    *,
    workload: str = "synthetic",
    constraints: Sequence[str] = (),
) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "enumerate",
            "model": "llama-3.1-70b",
            "gpus": 512,
            "gpus_per_node": 8,
            "device": "h100-sxm",
            "sequence_length": 4096,
            "global_batch_tokens": "4M",
            "workload": workload,
            "axes": axes,
            "constraints": constraints,
        }
    )


def seconds_of(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure(spec: SweepSpec, *, repeat: int) -> dict[str, object]:
    cell = spec.cells()[0]
    found = enumerate_cell(spec, cell, gpus_per_node=8)
    by_rows = sum(found.rejected.get(constraint.reason, 0) for constraint in spec.constraints)
    # Rows that were built; combinations that products rule out are only counted.
    checked = len(found.legal) + by_rows
    enumerate_seconds = seconds_of(lambda: enumerate_cell(spec, cell, gpus_per_node=8), repeat)
    rank_seconds = seconds_of(lambda: rank(spec, found), repeat)
    return {
        "lattice": found.num_combinations,
        "rows_checked": checked,
        "legal": len(found.legal),
        "enumerate_seconds": round(enumerate_seconds, 4),
        "rank_seconds": round(rank_seconds, 4),
        "enumerated_per_second": round(checked / enumerate_seconds),
        "ranked_per_second": round(len(found.legal) / rank_seconds),
        "enumerated_and_ranked_per_second": round(
            len(found.legal) / (enumerate_seconds + rank_seconds)
        ),
    }


def rank(spec: SweepSpec, found: CellSpace) -> object:
    return rank_space(
        spec, found, hardware=DEVICES["h100-sxm"], gpus_per_node=8, device=Device.CUDA
    )


LLM_ANALYSIS_PROGRAM = """
import itertools, logging, time
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import (
    ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name)
logging.disable(logging.CRITICAL)
model = ModelConfig(
    name="70b", num_layers=80, n_head=64, hidden_dim=8192, vocab_size=128256, max_seq_len=4096,
    num_key_value_heads=8, ffn_embed_dim=32768)
gpu, dtype = get_gpu_config_by_name("a100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
gpu.mem_per_GPU_in_GB = 1e5  # it refuses layouts that do not fit
done, start = 0, time.process_time()
sizes = (1, 2, 4, 8)
for tp, pp, mbs, recompute, zero in itertools.product(
        sizes, sizes, sizes, ActivationRecomputation, DSZeRO):
    dp = 512 // (tp * pp)
    parallelism = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=dp)
    analysis = LLMAnalysis(
        model, gpu, dtype, parallelism, flops_efficiency=0.5, hbm_memory_efficiency=0.6)
    analysis.training(
        batch_size_per_gpu=mbs, gradient_accumulation_steps=max(1, 1024 // (dp * mbs)),
        seq_len=4096, activation_recomputation=recompute, ds_zero=zero)
    done += 1
print(done / (time.process_time() - start))
"""


def llm_analysis_per_second(interpreter: Path) -> float:
    found = subprocess.run(
        [interpreter, "-c", LLM_ANALYSIS_PROGRAM], capture_output=True, text=True, check=True
    )
    return float(found.stdout.split()[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--llm-analysis", type=Path, metavar="PYTHON", help="an interpreter with llm-analysis"
    )
    arguments = parser.parse_args()
    machine = describe_machine()
    theirs = (
        [llm_analysis_per_second(arguments.llm_analysis)]
        if arguments.llm_analysis is not None
        else []
    )
    result: dict[str, object] = {
        "cores_used": 1,
        "without_constraints": measure(sweep(), repeat=arguments.repeat),
        "with_four_constraints": measure(sweep(constraints=CONSTRAINTS), repeat=arguments.repeat),
        "every_axis_of_llama": measure(
            sweep(EVERY_AXIS, workload="llama"), repeat=arguments.repeat
        ),
    }
    if arguments.llm_analysis is not None:
        theirs.append(llm_analysis_per_second(arguments.llm_analysis))
        ours = measure(sweep(), repeat=arguments.repeat)["enumerated_and_ranked_per_second"]
        assert isinstance(ours, int)
        result["llm_analysis"] = {
            "analysed_per_second": [round(rate) for rate in theirs],
            "ours_times_faster": round(ours / max(theirs)),
        }
    print(json.dumps(result, indent=2))
    write_result(arguments.out, benchmark="enumerate", machine=machine, result=result)


if __name__ == "__main__":
    main()

"""Compares workload llama with torchtitan's and transformers' Llama on a CPU at the same layout.

Processes of the programs alternate. CPU-seconds per step count, since they depend little on other
load; and the peak of resident memory above the imports. Each program needs an environment of its
own, with torch of the same version:

python -m benchmarks.trainers --torchtitan-python PATH --transformers-python PATH
    --out benchmarks/results/trainers_cpu-2core_DATE.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.arm_job import ArmJob, can_import, run_arm
from benchmarks.machine import describe_machine, parser_of, write_result
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest

OURS = "llama"
ARM_SECONDS = 900.0
LIMITS = ("start", "rendezvous", "first_step", "steady", "teardown", "total")


@dataclass(frozen=True, kw_only=True)
class Arm:
    what: str
    program: str
    options: Mapping[str, Any] = field(default_factory=dict)


ARMS: Mapping[str, Arm] = {
    OURS: Arm(what="workload llama with its default options", program="llama"),
    "llama_chunked_2": Arm(
        what="workload llama, loss: chunked:2", program="llama", options={"loss": "chunked:2"}
    ),
    "torchtitan": Arm(
        what="torchtitan's Llama 3 with its SDPA module, fused AdamW, gradients clipped and freed",
        program="torchtitan",
    ),
    "transformers": Arm(
        what="LlamaForCausalLM with sdpa, fused AdamW, gradients clipped and freed",
        program="transformers",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cell and a layout of it."""

    micro_batch_size: int
    sequence_length: int
    recompute: str = "none"

    @property
    def name(self) -> str:
        return f"{self.micro_batch_size}x{self.sequence_length} {self.recompute}"


CASES = (
    Case(micro_batch_size=2, sequence_length=256),
    Case(micro_batch_size=2, sequence_length=512),
    Case(micro_batch_size=2, sequence_length=256, recompute="full"),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--torchtitan-python", help="an interpreter that has torchtitan")
    parser.add_argument("--transformers-python", help="an interpreter that has transformers")
    parser.add_argument("--model", default="llama-60m", choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a process")
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    arguments = parser.parse_args()
    machine = describe_machine()
    pythons = {
        "llama": sys.executable,
        "torchtitan": arguments.torchtitan_python,
        "transformers": arguments.transformers_python,
    }
    arms = {}
    for name, arm in ARMS.items():
        python = pythons[arm.program]
        if python is None or (arm.program != "llama" and not can_import(python, arm.program)):
            print(f"{name} is left out: give --{arm.program}-python", file=sys.stderr)
        else:
            arms[name] = arm
    result: dict[str, Any] = {
        "model": arguments.model,
        "precision": "fp32",
        "arms": {name: arm.what for name, arm in arms.items()},
        "cases": {},
    }
    for case in CASES[: arguments.cases]:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for _ in range(arguments.rounds):
            for name, arm in arms.items():
                job = ArmJob(
                    arm=arm.program,
                    request=request_of(arguments.model, case, arm.options),
                    num_warmup=2,
                    num_steps=arguments.steps,
                )
                run = run_arm(job, python=pythons[arm.program], timeout=ARM_SECONDS)
                if "error" in run:
                    raise SystemExit(f"{name}: {run['error']}")
                runs[name].append(run)
                print(
                    f"{case.name:16} {name:18} {run['cpu_seconds_per_step'] * 1e3:7.0f} CPU-ms"
                    f" a step   {run['peak_resident_bytes'] / 1e6:7.0f} MB",
                    flush=True,
                )
        result["cases"][case.name] = {"summary": summary(runs), "runs": runs}
        print(json.dumps(result["cases"][case.name]["summary"], indent=1), flush=True)
        write_result(arguments.out, benchmark="trainers", machine=machine, result=result)


def request_of(model: str, case: Case, options: Mapping[str, Any]) -> TrialRequest:
    layout = Layout(
        micro_batch_size=case.micro_batch_size,
        recompute=Recompute.parse(case.recompute),
        precision=Precision.FP32,
    )
    limits = dict.fromkeys(LIMITS, ARM_SECONDS)
    return TrialRequest(
        sweep="trainers",
        trial_id=1,
        attempt=1,
        workload="llama",
        options=dict(options),
        model=PRESETS[model],
        sequence_length=case.sequence_length,
        layout=layout,
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(**limits),
        seed=0,
    )


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds, and ours over each: of neighbours in a round, so drift cancels."""
    found: dict[str, Any] = {
        name: {
            "cpu_seconds_per_step": statistics.median(r["cpu_seconds_per_step"] for r in many),
            "tokens_per_cpu_second": statistics.median(r["tokens_per_cpu_second"] for r in many),
            "peak_resident_bytes": statistics.median(r["peak_resident_bytes"] for r in many),
        }
        for name, many in runs.items()
    }
    found["llama_over"] = {
        name: {
            number: statistics.median(
                ours[number] / theirs[number] for ours, theirs in zip(runs[OURS], many, strict=True)
            )
            for number in ("tokens_per_cpu_second", "peak_resident_bytes")
        }
        for name, many in runs.items()
        if name != OURS
    }
    return found


if __name__ == "__main__":
    main()

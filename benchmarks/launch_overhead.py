"""Measures what a launch of workload command adds to the time that the program itself needs.

`python -m benchmarks.launch_overhead [--repeat N] [--out FILE]`: a program that reports and ends,
run alone and through the launcher, alternately; and how long an endless program lives after its
steps are enough.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, parser_of, write_result
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from orchestrator.node.launcher import NodeLauncher

# It reports one step and ends: a shell, so that its own start takes little.
REPORTS = 'echo \'{{"step_seconds": [1.0]}}\' > "$SWEEP_RESULT_FILE"'
# It prints when its ninth line, the last that is needed, was written.
ENDLESS = """
import json, os, time
for step in range(10**9):
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        print(json.dumps({"step_seconds": 0.02}), file=file)
    if step == 8:
        print("enough at", time.time(), flush=True)
    time.sleep(0.02)
"""
SECONDS = 60.0  # of every limit


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=30)
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        launcher = NodeLauncher(Path(folder), node="here")
        try:
            launcher.run(order(0, 1, ["sh", "-c", REPORTS]))  # starts its server
            result = measure(launcher, Path(folder), arguments.repeat)
        finally:
            launcher.close()
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="launch_overhead", machine=machine, result=result)


def measure(launcher: NodeLauncher, folder: Path, repeat: int) -> dict[str, Any]:
    """Seconds, the median and the largest of some repetitions."""
    alone, added, after_enough = [], dict[int, list[float]]({1: [], 2: []}), []
    trial_id = 0
    for _ in range(repeat):
        began = time.perf_counter()
        environment = {**os.environ, "SWEEP_RESULT_FILE": str(folder / "alone.json")}
        subprocess.run(["sh", "-c", REPORTS], env=environment, check=True)
        alone.append(time.perf_counter() - began)
        for num_ranks, seconds in added.items():
            trial_id += 1
            began = time.perf_counter()
            measured(launcher.run(order(trial_id, num_ranks, ["sh", "-c", REPORTS])))
            seconds.append(time.perf_counter() - began - alone[-1])
    for _ in range(max(1, repeat // 6)):
        trial_id += 1
        program = ENDLESS.replace("{", "{{").replace("}", "}}")
        report = measured(launcher.run(order(trial_id, 1, [sys.executable, "-c", program])))
        after_enough.append(time.time() - float(report.ranks[0].log_tail.split()[-1]))
    return {
        "program_alone_seconds": _summary(alone),
        "added_seconds_by_ranks": {str(num): _summary(each) for num, each in added.items()},
        "endless_program_lives_seconds": _summary(after_enough),
    }


def order(trial_id: int, num_ranks: int, argv: list[str]) -> LaunchOrder:
    """One attempt of a program. Eight steps are enough if they are alike."""
    limits = dict.fromkeys(("start", "rendezvous", "first_step", "steady", "teardown"), SECONDS)
    return LaunchOrder(
        request=TrialRequest(
            sweep="launch-overhead",
            trial_id=trial_id,
            attempt=1,
            workload="command",
            options={"argv": argv},
            model=PRESETS["llama-tiny"],
            sequence_length=128,
            layout=Layout(data_parallel_size=num_ranks),
            device=Device.CPU,
            measurement=MeasurementPlan(
                warmup_steps=1, min_steps=5, max_steps=50, relative_confidence=0.02
            ),
            limits=PhaseLimits(**limits, total=2 * SECONDS),
            seed=0,
        ),
        program="workloads.command",
        local_world_size=num_ranks,
    )


def measured(report: NodeReport) -> NodeReport:
    if report.failure is not None:
        raise SystemExit(report.failure.message)
    return report


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 4), "most": round(max(seconds), 4)}


if __name__ == "__main__":
    main()

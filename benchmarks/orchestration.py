"""Measures what a trial costs in addition to its training: ask, store, launch, collect, tell.

Each trial is two fresh ranks that do nothing, through the real loop, Ray, launcher and SQLite. Ray
Tune with OptunaSearch runs alternately in the same run:

python -m benchmarks.orchestration --tune-python PATH
    --out benchmarks/results/orchestration_cpu-2core_DATE.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import PROJECT, describe_machine, parser_of, resident_bytes, write_result

TUNE_PROGRAM = PROJECT / "benchmarks" / "tune_noop.py"
ARM_SECONDS = 900.0
TARGET_TRIALS_PER_SECOND = 10.0
TARGET_OVER_FRESH = 10.0

# Two ranks, 10 micro-batch sizes x 129 recomputations x 4 ZeRO stages: 5,160 layouts, more than the
# search ever asks for. The ranks report a formula's numbers and end: nothing is trained, nothing
# waits, and no layout runs out of memory.
NOOP_SWEEP: Mapping[str, Any] = {
    "name": "orchestration",
    "model": {"preset": "llama-tiny", "num_layers": 128, "name": "tiny-128"},
    "gpus": 2,
    "device": "cpu",
    "sequence_length": 64,
    "global_batch_size": 1024,
    "axes": {
        "data_parallel_size": [2],
        "recompute": ["none", *(f"full:{k}" for k in range(1, 129))],
        "zero_stage": [0, 1, 2, 3],
    },
    "measurement": {"warmup_steps": 2, "min_steps": 2, "max_steps": 2},
    "workload": {"name": "synthetic", "options": {"device_memory_bytes": 1 << 50}},
}
# The fewest steps that a measurement may have, with 1.2 M parameters and 64 tokens: most of the
# cost is the process group, the model and the optimizer.
TORCH_SWEEP: Mapping[str, Any] = {
    "name": "orchestration-torch",
    "model": "llama-tiny",
    "gpus": 2,
    "device": "cpu",
    "sequence_length": 16,
    "global_batch_size": 4,
    "precision": "fp32",
    "axes": {
        "data_parallel_size": [2],
        "recompute": [
            "none",
            *(
                f"{mode}:{k}"
                for mode in ("full", "selective_ops", "selective_attention")
                for k in range(1, 5)
            ),
        ],
    },
    "measurement": {"warmup_steps": 2, "min_steps": 2, "max_steps": 2},
    "workload": {"name": "llama"},
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of the comparison: a program that runs in its own process with its own Ray."""

    name: str
    what: str
    arguments: Sequence[str]
    share: float  # of --trials; slow arms run fewer
    is_tune: bool = False


ARMS = (
    Arm(
        name="sweep_tpe",
        what="run_sweep, TPE: two fresh ranks a trial, one trial at a time",
        arguments=["--arm", "tpe"],
        share=1,
    ),
    Arm(
        name="sweep_random", what="the same, random layouts", arguments=["--arm", "random"], share=1
    ),
    Arm(
        name="tune_fresh",
        what="Tune, function trainable, one fresh actor process a trial, two trials at a time",
        arguments=[],
        share=0.1,
        is_tune=True,
    ),
    Arm(
        name="tune_reuse_actors",
        what="Tune, class trainable, reuse_actors: one process for all trials of a slot, "
        "two trials at a time",
        arguments=["--reuse-actors"],
        share=1,
        is_tune=True,
    ),
    Arm(
        name="tune_reuse_actors_gang",
        what="the same, each trial holding two cores as a gang does: one trial at a time",
        arguments=["--reuse-actors", "--cpus-per-trial", "2"],
        share=1,
        is_tune=True,
    ),
    Arm(
        name="tune_reuse_actors_no_log_files",
        what="as tune_reuse_actors, without Tune's CSV, JSON and TensorBoard files per trial",
        arguments=["--reuse-actors", "--no-log-files"],
        share=1,
        is_tune=True,
    ),
    Arm(
        name="sweep_torch",
        what="run_sweep, two ranks that train llama-tiny for four steps over gloo",
        arguments=["--arm", "torch"],
        share=0.1,
    ),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--trials", type=int, default=400, help="per arm and round; slow arms run a tenth"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--tune-python",
        default=sys.executable,
        help="a Python with ray[tune]==2.60.0 and optuna==5.0.0",
    )
    parser.add_argument(
        "--arms", nargs="*", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS]
    )
    # In a child process: run one arm and print its numbers.
    parser.add_argument("--arm", choices=["tpe", "random", "torch"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run_sweep_arm(arguments.arm, arguments.trials)))
        return
    machine = describe_machine()
    arms = [arm for arm in ARMS if arm.name in arguments.arms]
    if any(arm.is_tune for arm in arms) and not _has_tune(arguments.tune_python):
        print(
            f"Tune is left out: {arguments.tune_python} cannot import ray.tune"
            " (pip install 'ray[tune]==2.60.0' 'optuna==5.0.0')"
        )
        arms = [arm for arm in arms if not arm.is_tune]
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for _ in range(arguments.rounds):
        # Alternately, so that other load on the machine affects all arms.
        for arm in arms:
            run = run_arm(arm, max(4, int(arm.share * arguments.trials)), arguments.tune_python)
            runs[arm.name].append(run)
            print(
                f"{arm.name:32} {run['trials_per_second']:8.2f} trials/s"
                f"   {run['driver_cpu_ms_per_trial']:6.1f} ms CPU of the driver per trial"
            )
    result = {
        "summary": summarize(runs),
        "arms": {arm.name: {"what": arm.what, "runs": runs[arm.name]} for arm in arms},
    }
    print(json.dumps(result["summary"], indent=1))
    write_result(arguments.out, benchmark="orchestration", machine=machine, result=result)


def run_arm(arm: Arm, num_trials: int, tune_python: str) -> dict[str, Any]:
    """Run one arm once, in a fresh process, and return what it printed last."""
    program = (
        [tune_python, str(TUNE_PROGRAM)]
        if arm.is_tune
        else [sys.executable, "-m", "benchmarks.orchestration"]
    )
    done = subprocess.run(
        [*program, "--trials", str(num_trials), *arm.arguments],
        # Tune would upload its working folder.
        cwd=tempfile.gettempdir() if arm.is_tune else PROJECT,
        capture_output=True,
        text=True,
        timeout=ARM_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{arm.name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    run: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return run


def run_sweep_arm(kind: str, num_trials: int) -> dict[str, Any]:
    """Run the sweep as the command line does, without a progress display."""
    from db.store import Store
    from orchestrator.cluster.ray.scheduler import RayScheduler
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.core.trial.lifecycle import TrialState
    from orchestrator.core.trial.protocol import Device
    from orchestrator.sweep.progress import Snapshot
    from orchestrator.sweep.provenance import code_fingerprint
    from orchestrator.sweep.run import run_sweep

    search = {
        "strategy": "exhaustive" if kind == "torch" else kind,
        "max_trials": num_trials,
        "confirm": {"repeats": 0},
    }
    spec = SweepSpec.model_validate(
        {**(TORCH_SWEEP if kind == "torch" else NOOP_SWEEP), "search": search}
    )
    ends: list[float] = []

    def note_end(snapshot: Snapshot) -> None:
        ends.extend([time.monotonic()] * len(snapshot.ended))

    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(f"sqlite:///{folder}/sweep.sqlite") as store,
    ):
        result = run_sweep(
            spec,
            store=store,
            open_scheduler=lambda: RayScheduler(
                address=None, device=Device.CPU, root=Path(folder) / "runs"
            ),
            code=code_fingerprint(PROJECT),
            hardware=lambda _: None,
            clock=time.monotonic,
            observe=note_end,
        )
        attempts = store.trials(result.sweep_id)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    measured = result.counts.get(TrialState.MEASURED, 0)
    if measured != len(ends) or len(attempts) != measured:
        raise SystemExit(
            f"{len(ends)} trials ended, {measured} of them measured: {dict(result.counts)}"
        )
    return {
        "num_trials": len(ends),
        "seconds": time.monotonic() - began,
        "trials_per_second": (len(ends) - 1) / (ends[-1] - ends[0]),
        "trial_ms_median": 1e3 * statistics.median(b - a for a, b in pairwise(ends)),
        "driver_cpu_ms_per_trial": 1e3
        * (spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime)
        / len(ends),
        "driver_resident_bytes": resident_bytes(),
        "in_flight": 1,
        "num_ranks": 2,
    }


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds, ratios of medians, and whether the targets are met."""
    rate = {
        name: statistics.median(run["trials_per_second"] for run in many)
        for name, many in runs.items()
    }
    summary: dict[str, Any] = {"trials_per_second": rate}
    ours = rate.get("sweep_tpe")
    if ours is None:
        return summary
    over = {name: ours / theirs for name, theirs in rate.items() if name.startswith("tune_")}
    summary["sweep_tpe_over"] = over
    summary["at_least_10_trials_per_second"] = ours >= TARGET_TRIALS_PER_SECOND
    if "tune_fresh" in over:
        summary["at_least_10x_tune_fresh"] = over["tune_fresh"] >= TARGET_OVER_FRESH
    if "tune_reuse_actors" in over:
        summary["no_slower_than_tune_reuse_actors"] = over["tune_reuse_actors"] >= 1.0
    return summary


def _has_tune(python: str) -> bool:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return (
        subprocess.run(
            [python, "-c", "import ray.tune, optuna"],
            capture_output=True,
            env=environment,
            check=False,
        ).returncode
        == 0
    )


if __name__ == "__main__":
    main()

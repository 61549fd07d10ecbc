"""Measures how soon the same command launches again after a kill, by trials already measured.

python -m benchmarks.resume [--trials 5000] --out FILE.json

The time is from the start of the process to its first launch. A scripted scheduler replaces Ray,
whose start does not depend on the sweep.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.long_sweep import SWEEP, ScriptedScheduler
from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from db.store import Store
from orchestrator.core.machines.packing import Shape
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.sweep.provenance import code_fingerprint
from orchestrator.sweep.run import run_sweep

STRATEGIES = ("auto", "exhaustive", "tpe")
REPEATS = 3
TARGET_SECONDS = 10.0


class FirstLaunch(ScriptedScheduler):
    """Records its first launch by the wall clock, which two processes share."""

    at_unix_seconds: float | None = None

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        if self.at_unix_seconds is None:
            self.at_unix_seconds = time.time()
        super().start(request, shape, nodes)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument(
        "--launch",
        nargs=3,
        metavar=("URL", "STRATEGY", "TRIALS"),
        help="continue a sweep, and print the time of its first launch",
    )
    arguments = parser.parse_args()
    if arguments.launch is not None:
        url, strategy, trials = arguments.launch
        scheduler = _continue(url, strategy, int(trials))
        print(json.dumps(scheduler.at_unix_seconds))
        return
    machine = describe_machine()
    result = measure(arguments.trials)
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="resume", machine=machine, result=result)


def measure(num_trials: int) -> Mapping[str, Any]:
    """Seconds to the first launch, per strategy, of a large sweep and of an almost empty one."""
    with tempfile.TemporaryDirectory() as folder:
        full, new = f"sqlite:///{folder}/full.sqlite", f"sqlite:///{folder}/new.sqlite"
        _continue(full, "exhaustive", num_trials)
        Store.open(new).close()
        launches = [(strategy, repeat) for strategy in STRATEGIES for repeat in range(REPEATS)]
        seconds: dict[str, dict[str, list[float]]] = {
            strategy: {"new": [], "resumed": []} for strategy in STRATEGIES
        }
        for number, (strategy, _) in enumerate(launches):  # each launch adds one trial
            seconds[strategy]["new"].append(_seconds(new, strategy, number + 1))
            seconds[strategy]["resumed"].append(_seconds(full, strategy, num_trials + number + 1))
    slowest = max(value for of in seconds.values() for value in of["resumed"])
    return {
        "num_trials": num_trials,
        "seconds_to_first_launch": seconds,
        "slowest_resumed_seconds": slowest,
        "target_met": slowest <= TARGET_SECONDS,
    }


def _seconds(url: str, strategy: str, max_trials: int) -> float:
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "benchmarks.resume",
        "--launch",
        url,
        strategy,
        str(max_trials),
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return round(float(json.loads(done.stdout)) - began, 2)


def _continue(url: str, strategy: str, max_trials: int) -> FirstLaunch:
    """Run the sweep until it has this many trials."""
    spec = SweepSpec.model_validate(
        {
            **SWEEP,
            "search": {"strategy": strategy, "max_trials": max_trials, "confirm": {"repeats": 0}},
        }
    )
    scheduler = FirstLaunch()
    with Store.open(url) as store:
        run_sweep(
            spec,
            store=store,
            open_scheduler=lambda: scheduler,
            code=code_fingerprint(PROJECT),
            hardware=lambda _: None,
            clock=time.monotonic,
        )
    return scheduler


if __name__ == "__main__":
    main()

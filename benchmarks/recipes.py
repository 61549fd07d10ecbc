"""Compares the throughput of the recipes' trials with a stopwatch around the same steps, and with
the same program without a sweep: started by torchrun or by itself, with the settings that
`sweep export config` wrote.

`make recipes` makes the environments. Then, on a machine that does nothing else:

python -m benchmarks.recipes --out benchmarks/results/recipes_cpu-2core_DATE.json
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from orchestrator.node.processes import descendants

RECIPES = PROJECT / "sweeps" / "recipes"
ENVIRONMENTS = PROJECT / ".venv-recipes"
SWEEP = Path(sys.executable).with_name("sweep")
WARMUP_STEPS = 5
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")
# One layout of each recipe.
ONE_LAYOUT = ("axes.micro_batch_size=[4]", "axes.recompute=[none]")
POLL_SECONDS = 0.001
LONGEST_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, and how its program is started without a sweep."""

    zero_stage: int
    environment: str
    # The framework of the file that the program reads; None: it reads variables only.
    framework: str | None
    # FILE, LENGTH and STEPS are filled in.
    alone: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


BY_NAME: Mapping[str, Recipe] = {
    "transformers": Recipe(
        environment="transformers",
        zero_stage=0,
        framework="transformers",
        alone=(*TORCHRUN, "transformers_train.py", "FILE", "LENGTH", "STEPS"),
    ),
    "accelerate": Recipe(
        environment="transformers",
        zero_stage=0,
        framework="accelerate",
        alone=("accelerate", "launch", "--config_file=FILE", "accelerate_train.py"),
    ),
    "fsdp2": Recipe(
        environment="fsdp2", zero_stage=3, framework=None, alone=(*TORCHRUN, "fsdp2_train.py")
    ),
    "deepspeed": Recipe(
        environment="deepspeed",
        zero_stage=1,
        framework="deepspeed",
        alone=(*TORCHRUN, "deepspeed_train.py", "--deepspeed_config", "FILE"),
        variables={"DS_ACCELERATOR": "cpu"},
    ),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each recipe, under sweep and alone")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run")
    parser.add_argument("--only", nargs="*", choices=list(BY_NAME), default=list(BY_NAME))
    arguments = parser.parse_args()
    machine = describe_machine()
    result = {}
    for name in arguments.only:
        if not (ENVIRONMENTS / BY_NAME[name].environment / ".installed").exists():
            print(f"{name}: no environment; `make recipes` makes it", file=sys.stderr)
            continue
        runs = [one_run(name, arguments.steps) for _ in range(arguments.runs)]
        result[name] = summary(runs)
        print(name, json.dumps(result[name]), flush=True)
    write_result(arguments.out, benchmark="recipes", machine=machine, result=result)


def one_run(name: str, num_steps: int) -> dict[str, float]:
    """Measure a recipe's layout under sweep with a stopwatch next to it, then without a sweep."""
    recipe = BY_NAME[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **recipe.variables,
            "PATH": f"{ENVIRONMENTS / recipe.environment / 'bin'}:{os.environ['PATH']}",
            "SWEEP_HOME": folder,
            "SWEEP_DB": f"sqlite:///{folder}/sweep.sqlite",
            "OMP_NUM_THREADS": "1",
        }
        run = (
            SWEEP,
            "run",
            RECIPES / f"{name}.yaml",
            *ONE_LAYOUT,
            f"axes.zero_stage=[{recipe.zero_stage}]",
            f"workload.options.cwd={RECIPES}",
            f"workload.options.pass_env=[{', '.join(recipe.variables)}]",
            f"measurement.warmup_steps={WARMUP_STEPS}",
            f"measurement.min_steps={num_steps}",
            f"measurement.max_steps={num_steps}",
            "search.max_trials=1",
            "device=cpu",
            "--quiet",
        )
        watched = stopwatch(run, environment, Path(folder), "runs/**/program-metrics.jsonl")
        (trial,) = json.loads(output((SWEEP, "trials", "--json"), environment))["trials"]
        if trial["state"] != "measured":
            raise RuntimeError(f"{name}: the trial is {trial['state']}: sweep show 1")
        tokens = trial["tokens_per_second_per_gpu"] * trial["step_seconds_median"]
        steps = WARMUP_STEPS + num_steps
        alone = stopwatch(
            start_alone(recipe, trial, environment, Path(folder), steps),
            environment | variables_of(trial, Path(folder), steps),
            Path(folder),
            "alone.jsonl",
        )
        return {
            "trial": trial["tokens_per_second_per_gpu"],
            "stopwatch": tokens / statistics.fmean(steps_of(watched, num_steps)),
            "stopwatch_median": tokens / statistics.median(steps_of(watched, num_steps)),
            "alone_median": tokens / statistics.median(steps_of(alone, num_steps)),
        }


def start_alone(
    recipe: Recipe,
    trial: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    num_steps: int,
) -> Sequence[str | Path]:
    """The command without a sweep; its configuration file is written first."""
    file = folder / f"{recipe.framework}.{'yaml' if recipe.framework == 'accelerate' else 'json'}"
    if recipe.framework is not None:
        export = (SWEEP, "export", "config", "--to", recipe.framework, "-o", file)
        output(export, environment)
    filled = {"FILE": str(file), "LENGTH": str(trial["sequence_length"]), "STEPS": str(num_steps)}
    words = []
    for word in recipe.alone:
        for name, value in filled.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def variables_of(trial: Mapping[str, Any], folder: Path, num_steps: int) -> dict[str, str]:
    """What the programs of the recipes read."""
    return {
        "SWEEP_MICRO_BATCH_SIZE": str(trial["micro_batch_size"]),
        "SWEEP_GRAD_ACCUM_STEPS": str(trial["grad_accum_steps"]),
        "SWEEP_SEQUENCE_LENGTH": str(trial["sequence_length"]),
        "SWEEP_ZERO_STAGE": str(trial["zero_stage"]),
        "SWEEP_WORLD_SIZE": str(trial["num_gpus"]),
        "SWEEP_PRECISION": str(trial["precision"]),
        "SWEEP_RECOMPUTE": "none",
        "SWEEP_NUM_STEPS": str(num_steps),
        "SWEEP_METRICS_FILE": str(folder / "alone.jsonl"),
    }


def stopwatch(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: Path, pattern: str
) -> list[float]:
    """Run a command, and return when each line of its file of metrics appeared."""
    log = (folder / "log.txt").open("ab")
    process = subprocess.Popen(
        list(map(str, command)), cwd=RECIPES, env=environment, stdout=log, stderr=log
    )
    arrivals: list[float] = []
    lines = counting(folder, pattern)
    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            found = lines()
            arrivals += [time.perf_counter()] * (found - len(arrivals))
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        log.close()
    if process.returncode != 0:
        raise RuntimeError((folder / "log.txt").read_text()[-4000:])
    return arrivals


def counting(folder: Path, pattern: str) -> Callable[[], int]:
    """A function that says how many lines the file has; 0 while there is none."""
    found: list[Path] = []

    def lines() -> int:
        if not found:
            found.extend(sorted(folder.glob(pattern))[:1])
        return found[0].read_bytes().count(b"\n") if found else 0

    return lines


def steps_of(arrivals: Sequence[float], num_steps: int) -> list[float]:
    """Seconds of each step after the warm-up, from the end of the one before it."""
    timed = arrivals[WARMUP_STEPS - 1 : WARMUP_STEPS + num_steps]
    return [end - begin for begin, end in itertools.pairwise(timed)]


def output(command: Sequence[str | Path], environment: Mapping[str, str]) -> str:
    return subprocess.run(
        list(map(str, command)), env=environment, check=True, capture_output=True, text=True
    ).stdout


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of the runs in tokens/s/GPU, and of the trial over the others.

    A trial's throughput is that of its median step; a stopwatch around all steps has the mean.
    """
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratios = {
        f"trial_over_{other}": statistics.median(run["trial"] / run[other] for run in runs)
        for other in ("stopwatch", "stopwatch_median", "alone_median")
    }
    return medians | ratios | {"runs": list(runs)}


if __name__ == "__main__":
    main()

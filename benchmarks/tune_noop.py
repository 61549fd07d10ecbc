"""Runs Ray Tune with OptunaSearch over a trainable that reports one number.

python benchmarks/tune_noop.py --trials 40 [--reuse-actors] [--no-log-files]

`benchmarks.orchestration` compares against it. This program imports nothing of this project, so
that it can run with another Python that has ray[tune]. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import tempfile
import time
from typing import Any

import optuna
import ray
from ray import tune
from ray.tune.search.optuna import OptunaSearch

# As many values per axis as benchmarks.orchestration gives its sweep.
SPACE = {
    "micro_batch_size": tune.choice([2**i for i in range(10)]),
    "recompute": tune.choice(list(range(129))),
    "zero_stage": tune.choice([0, 1, 2, 3]),
}


class Reusable(tune.Trainable):
    """The class API, which lets Tune keep the actor's process for the next trial."""

    def setup(self, config: dict[str, Any]) -> None:
        self._value = float(config["micro_batch_size"])

    def step(self) -> dict[str, Any]:
        return {"value": self._value, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """There is nothing to save."""


def noop(config: dict[str, Any]) -> None:
    tune.report({"value": float(config["micro_batch_size"])})


class Clock(tune.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.ends.append(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--reuse-actors", action="store_true")
    parser.add_argument(
        "--no-log-files",
        action="store_true",
        help="without the CSV, JSON and TensorBoard files that Tune writes per trial",
    )
    parser.add_argument("--cpus-per-trial", type=float, default=1.0)
    arguments = parser.parse_args()
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1" if arguments.no_log_files else "0"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    clock = Clock()
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(
                Reusable if arguments.reuse_actors else noop, {"cpu": arguments.cpus_per_trial}
            ),
            param_space=SPACE,
            tune_config=tune.TuneConfig(
                metric="value",
                mode="max",
                search_alg=OptunaSearch(seed=0),
                num_samples=arguments.trials,
                reuse_actors=arguments.reuse_actors,
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[clock], verbose=0),
        ).fit()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    cores = int(ray.cluster_resources()["CPU"])
    ray.shutdown()
    print(
        json.dumps(
            {
                "num_trials": len(clock.ends),
                "num_errors": results.num_errors,
                "seconds": time.monotonic() - began,
                "trials_per_second": (len(clock.ends) - 1) / (clock.ends[-1] - clock.ends[0]),
                "driver_cpu_ms_per_trial": 1e3
                * (spent.ru_utime + spent.ru_stime - cpu.ru_utime - cpu.ru_stime)
                / len(clock.ends),
                "in_flight": int(cores / arguments.cpus_per_trial),
                "ray": ray.__version__,
                "optuna": optuna.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

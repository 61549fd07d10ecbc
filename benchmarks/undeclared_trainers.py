"""Counts the launches that the search needs on programs that nobody described; prints a table.

python -m benchmarks.undeclared_trainers [--problems N] [--first N] [--seeds N]
    [--methods auto,tpe,random] [--trainer default|NAME|wrong] [--parallel K] [--out FILE.json]

No table of anybody takes part: each problem is a random model, device, number of GPUs, batch, and a
random training program (benchmarks/simulated_trainer.py) whose constants the search cannot see.
Programs keep 8 to 20 bytes a weight, half to all of what plain torch keeps of a layer, losses in
chunks or in fp32. Half of the problems report no memory; up to two options vary whose words mean
nothing to the search.

`--trainer`: what the search is told. `default`: nothing. A name of core/physics/trainer.py: that
one, whatever the truth. `wrong`: a different name for each problem, in turn.

Numbers as in benchmarks/search_efficiency.py: `launches_to_5_percent` is the mean over problems of
the median over seeds. A few problems, whose best layout no formula expects, take ten times as many
launches as the others: hence the geometric mean as well. `failed`: launches that ran out of memory
or crashed until within 5 %. `auc_cold` and `auc_after_5`: the probability that the search holds a
layout that runs out of memory for less likely to fit than one that runs, before anything and after
5 launches (over the layouts that were not launched). `by_kind` has the means of problems with and
without reported memory, with and without options.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.search_drivers import AFTER, classification, driver_of
from benchmarks.search_efficiency import Run, search
from benchmarks.simulated_trainer import simulated_problem
from orchestrator.core.physics.trainer import TRAINERS
from orchestrator.core.pretend.replay import DEFAULT_PROFILE

STEPS = 15
METHODS = ("auto", "tpe", "gp", "random")


@dataclass(frozen=True, kw_only=True)
class Task:
    number: int
    methods: tuple[str, ...]
    seeds: int
    # What the search is told of the trainer.
    told: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the searches of one problem came to."""

    problem: str
    rows: int
    reports_memory: bool
    has_options: bool
    runs: dict[str, list[Run]]
    auc: tuple[float | None, float | None]  # before, and after some launches


def perform(task: Task) -> Outcome:
    warnings.filterwarnings("ignore", module="optuna")
    problem = simulated_problem(task.number, profile=_profile(task.told, task.number))
    runs = {
        method: [
            search(
                shuffled := problem.shuffled(seed),
                driver_of(shuffled, method, seed, mode="cold", calibration=None),
                steps=STEPS,
            )
            for seed in range(task.seeds)
        ]
        for method in task.methods
    }
    return Outcome(
        problem=problem.table_id,
        rows=len(problem.runs),
        reports_memory=any(run.peak_memory_bytes for run in problem.runs),
        has_options=bool(problem.runs[0].extra),
        runs=runs,
        auc=classification(problem.shuffled(0)),
    )


def _profile(told: str, number: int) -> str:
    if told == "default":
        return DEFAULT_PROFILE
    names = sorted(set(TRAINERS) - {DEFAULT_PROFILE})
    return names[number % len(names)] if told == "wrong" else told


def summarise(outcomes: Sequence[Outcome], method: str) -> dict[str, object]:
    medians, to_1, failed, worst = [], [], [], 0.0
    for one in outcomes:
        runs = one.runs[method]
        medians.append(float(np.median([run.to_5_percent or one.rows for run in runs])))
        to_1.append(float(np.median([run.to_1_percent or one.rows for run in runs])))
        failed.append(float(np.mean([run.out_of_memory + run.crashed for run in runs])))
        worst = max(worst, medians[-1])
    return {
        "problems": len(outcomes),
        "launches_to_5_percent": _mean(medians),
        "geometric_mean": round(float(np.exp(np.mean(np.log(medians)))), 3) if medians else None,
        "p90_of_problems": round(float(np.quantile(medians, 0.9)), 1) if medians else None,
        "worst": worst,
        "launches_to_1_percent": _mean(to_1),
        "failed": _mean(failed),
        "out_of_memory": _mean(
            [float(np.mean([run.out_of_memory for run in one.runs[method]])) for one in outcomes]
        ),
        **{
            name: _mean([one.auc[place] for one in outcomes if one.auc[place] is not None])
            for place, name in enumerate(("auc_cold", f"auc_after_{AFTER}"))
            if method == "auto"
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    return round(float(np.mean(np.array(values, dtype=np.float64))), 3) if values else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default="auto", metavar="A,B", help=f"of {', '.join(METHODS)}")
    parser.add_argument(
        "--trainer", default="default", choices=("default", "wrong", *TRAINERS), metavar="NAME"
    )
    parser.add_argument("--parallel", type=int, default=1)
    arguments = parser.parse_args()
    methods = tuple(arguments.methods.split(","))
    if unknown := set(methods) - set(METHODS):
        parser.error(f"--methods {', '.join(sorted(unknown))}: expected some of {METHODS}")
    machine = describe_machine()
    tasks = [
        Task(number=number, methods=methods, seeds=arguments.seeds, told=arguments.trainer)
        for number in range(arguments.first, arguments.first + arguments.problems)
    ]
    with ProcessPoolExecutor(arguments.parallel, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(perform, tasks) if arguments.parallel > 1 else map(perform, tasks))
    kinds = {
        "memory reported": [one for one in outcomes if one.reports_memory],
        "no memory reported": [one for one in outcomes if not one.reports_memory],
        "options": [one for one in outcomes if one.has_options],
        "no options": [one for one in outcomes if not one.has_options],
    }
    result = {
        method: summarise(outcomes, method)
        | {"by_kind": {kind: summarise(some, method) for kind, some in kinds.items()}}
        for method in methods
    }
    for method, found in result.items():
        by_kind = found.pop("by_kind")
        print(method, json.dumps(found))
        for kind, numbers in by_kind.items():  # type: ignore[attr-defined]
            print("   ", kind, json.dumps(numbers))
        found["by_kind"] = by_kind
    write_result(
        arguments.out,
        benchmark="undeclared_trainers",
        machine=machine,
        result={
            "trainer": arguments.trainer,
            "summary": result,
            "problems": {
                one.problem: {
                    method: float(np.median([run.to_5_percent or one.rows for run in runs]))
                    for method, runs in one.runs.items()
                }
                for one in outcomes
            },
        },
    )


if __name__ == "__main__":
    main()

"""Counts the launches that each search needs to come near the best layout; prints a table.

python -m benchmarks.search_efficiency --tables DIR [--table ID ...]
    [--methods auto,tpe,gp:2,random,heuristic] [--seeds N] [--mode cold|warm|blind]
    [--warm DIR_OR_IDS] [--warm-gpus N] [--trainer named|default|wrong|NAME] [--parallel K]
    [--steps N] [--unmarked] [--out FILE.json]

DIR holds CSV files with the columns of core/pretend/run_table.py; `--table` takes ids, and patterns
such as 'pb_*'. Each problem of a table (one model, number of GPUs, sequence length and batch) is
searched separately: a launch of a layout returns its measured row. Only rows with `replay` = True
can be proposed: layouts without a row are neither charged nor rewarded. If a layout has several
rows, one represents them (run_table.representative_run). Rows are shuffled for each seed, so that
the order of the file helps no search. Columns of words that vary (attention kernel, sequence
parallelism) are axes like any other. Problems with fewer than `--fewest-rows` are left out; if all
problems of a table are that small, the table is searched as one problem, without physics.

Methods, each with its own number of seeds if given (`gp:2`). `auto`, `tpe`, `gp` and `random` run
through `orchestrator.search.searcher.Searcher`, as in `sweep run` (tpe and gp are Optuna's, moved
to the nearest untried row). `heuristic` is the best rule in hindsight: layouts that a textbook
memory formula admits, no recomputation, smallest tp x pp, smallest pp, smallest micro-batch. For
`auto`, `tpe`, `gp` and `random` an out-of-memory rules out layouts that provably need more. A
layout that `auto` wants to measure again is charged as a launch, and returns the same row.

Modes. `cold`: only data sheets and the formulas' priors are known, for the trainer that the table's
words name (`--trainer named`, by the rule of `sweep replay`: never by the version that ran), for
the trainer that is assumed if none is named (`--trainer default`), for another one than the table's
(`--trainer wrong`), or for one by its name; tpe and gp use our prediction to choose between rows
that are equally near. `warm`: constants are calibrated to the other problems of the same hardware
and trainer, of the named tables (`--warm`: ids or patterns, comma-separated, or a folder; default:
all shown) but never of the table that is searched, nor of its problem under another id. With
`--warm-gpus 8` they are calibrated to problems of the same model on at most 8 GPUs, and larger ones
are searched: measure small, predict large. `blind`: axes have no names and only an order, nothing
is predicted, and no dominance is known; the memory limit and the measurements of launches are.

Numbers, per problem and method, over seeds. `launches_to_5_percent` and `launches_to_1_percent`:
launches, failed ones included, until one is within 5 % (1 %) of the best tokens/s/GPU of the table,
median and 90th percentile (the number of rows if it never is); `out_of_memory`, `crashed`,
`repeats`: such launches until within 5 %, mean; `gpu_seconds`: GPUs x (60 s a launch + `--steps`
steps, of those that ran) until within 5 %, median; `nothing_fits`: launches until that is declared,
for a table in which nothing ran; `auc_cold`, `auc_after_5`: the probability that `auto` holds a
layout that runs out of memory for less likely to fit than one that runs, before anything and after
5 launches. The summary has means over problems. `best_after`: mean over
problems and seeds of the best share so far after 1, 2, 3, ... launches.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.search_drivers import AFTER, METHODS, Driver, classification, driver_of
from benchmarks.search_problem import (
    FEWEST_ROWS,
    NAMED,
    WRONG,
    Problem,
    calibration_of,
    read_problems,
)
from benchmarks.table_folder import add_table_arguments
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.trainer import TRAINERS
from orchestrator.core.pretend.replay import DEFAULT_PROFILE
from orchestrator.core.pretend.run_table import RunStatus
from orchestrator.core.trial.measurement import LAUNCH_SECONDS

SHOWN_LAUNCHES = 100  # length of the curve
AUCS = ("auc_cold", f"auc_after_{AFTER}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one search of one problem with one seed."""

    to_5_percent: int | None  # launches
    to_1_percent: int | None
    nothing_fits: int | None
    # Launches until within 5 %, or to the end.
    out_of_memory: int
    crashed: int
    repeats: int
    gpu_seconds: float
    # Share of the best after each launch.
    best: tuple[float, ...]


def search(problem: Problem, driver: Driver, *, steps: int) -> Run:
    """Launch until within 1 % of the best or until no row is left.

    If no row of the table ran, launch until the search declares that nothing fits.
    """
    best, top = 0.0, float(problem.speeds.max())
    launches = out_of_memory = crashed = repeats = 0
    seconds, curve, to_5, to_1, given_up = 0.0, [], None, None, None
    while to_1 is None and given_up is None and (row := driver.ask()) is not None:
        run = problem.runs[row]
        driver.tell(row, run)
        for repeated in (False, True) if driver.again() else (False,):
            launches += 1
            repeats += repeated and to_5 is None
            held = LAUNCH_SECONDS + (
                steps * (run.step_seconds or 0.0) if problem.speeds[row] else 0.0
            )
            seconds += held * run.num_gpus if to_5 is None else 0.0
            best = max(best, problem.speeds[row] / top if top else 0.0)
            curve.append(best)
        if to_5 is None:
            out_of_memory += run.status is RunStatus.OOM
            crashed += run.status is RunStatus.ERROR
        to_5 = launches if to_5 is None and best >= 0.95 else to_5
        to_1 = launches if best >= 0.99 else None
        given_up = launches if not top and driver.nothing_fits() else None
    return Run(
        to_5_percent=to_5,
        to_1_percent=to_1,
        nothing_fits=(given_up or launches) if not top else None,
        out_of_memory=out_of_memory,
        crashed=crashed,
        repeats=repeats,
        gpu_seconds=seconds,
        best=tuple(curve[:SHOWN_LAUNCHES]),
    )


def summarise(
    problem: Problem, runs: Sequence[Run], auc: tuple[float | None, float | None]
) -> dict[str, object]:
    never = len(problem.runs)
    found: dict[str, object] = {"rows": len(problem.runs), "seeds": len(runs)}
    if not problem.speeds.max():
        return found | {
            "nothing_fits": float(np.median([run.nothing_fits or never for run in runs]))
        }
    for name, values in (
        ("launches_to_5_percent", [run.to_5_percent or never for run in runs]),
        ("launches_to_1_percent", [run.to_1_percent or never for run in runs]),
    ):
        found[name] = {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
    for name in ("out_of_memory", "crashed", "repeats"):
        found[name] = round(float(np.mean([getattr(run, name) for run in runs])), 2)
    for name, value in zip(AUCS, auc, strict=True):
        if value is not None:
            found[name] = round(value, 4)
    return found | {"gpu_seconds": round(float(np.median([run.gpu_seconds for run in runs])), 0)}


def total(
    problems: Mapping[str, Mapping[str, Any]], curves: Sequence[Sequence[float]]
) -> dict[str, object]:
    """Means over the problems in which something ran."""
    ran = [found for found in problems.values() if "launches_to_5_percent" in found]
    hopeless = [found for found in problems.values() if "nothing_fits" in found]
    means: dict[str, object] = {"problems": len(ran)}
    for name in ("launches_to_5_percent", "launches_to_1_percent"):
        means[name] = {key: _mean([found[name][key] for found in ran]) for key in ("median", "p90")}
        means[f"{name}_worst_median"] = max((found[name]["median"] for found in ran), default=None)
    for name in ("out_of_memory", "crashed", "repeats", "gpu_seconds"):
        means[name] = _mean([found[name] for found in ran])
    for name in AUCS:
        if scored := [found[name] for found in ran if name in found]:
            means[name] = round(float(np.mean(np.array(scored, dtype=np.float64))), 4)
    if hopeless:
        means["nothing_fits"] = {
            "problems": len(hopeless),
            "launches": _mean([found["nothing_fits"] for found in hopeless]),
        }
    if curves:
        filled = np.array(
            [[*curve, *[curve[-1]] * (SHOWN_LAUNCHES - len(curve))] for curve in curves]
        )
        means["best_after"] = [round(float(value), 4) for value in filled.mean(axis=0)]
    return means


def _mean(values: Sequence[object]) -> float | None:
    return round(float(np.mean(np.array(values, dtype=np.float64))), 2) if values else None


@dataclass(frozen=True, kw_only=True)
class Task:
    problem: Problem
    method: str
    seeds: int
    mode: str
    calibration: Calibration | None
    steps: int


def perform(task: Task) -> tuple[Task, list[Run], tuple[float | None, float | None]]:
    warnings.filterwarnings("ignore", module="optuna")
    runs = []
    for seed in range(task.seeds):
        problem = task.problem.shuffled(seed)
        driver = driver_of(problem, task.method, seed, mode=task.mode, calibration=task.calibration)
        runs.append(search(problem, driver, steps=task.steps))
    is_predicted = task.method == "auto" and task.mode != "blind" and task.problem.has_physics
    auc = classification(task.problem, task.calibration) if is_predicted else (None, None)
    return task, runs, auc


def tasks_of(arguments: argparse.Namespace) -> Iterator[Task]:
    problems = read_problems(
        arguments.tables,
        arguments.table,
        fewest_rows=arguments.fewest_rows,
        unmarked=arguments.unmarked,
        trainer=arguments.trainer,
    )
    relatives = _relatives(arguments, problems) if arguments.mode == "warm" else []
    most = arguments.warm_gpus
    if most is not None:
        problems = [problem for problem in problems if problem.runs[0].num_gpus > most]
    for problem in problems:
        calibration = (
            calibration_of(problem, _smaller(relatives, problem, most))
            if arguments.mode == "warm" and problem.runs[0].cell is not None
            else None
        )
        for method, seeds in arguments.methods.items():
            yield Task(
                problem=problem,
                method=method,
                seeds=seeds,
                mode=arguments.mode,
                calibration=calibration,
                steps=arguments.steps,
            )


def _smaller(relatives: list[Problem], problem: Problem, most: int | None) -> list[Problem]:
    """The relatives on at most this many GPUs, of the same model. None: all."""
    if most is None:
        return relatives
    return [
        other
        for other in relatives
        if other.runs[0].num_gpus <= most and other.runs[0].model == problem.runs[0].model
    ]


def _relatives(arguments: argparse.Namespace, problems: list[Problem]) -> list[Problem]:
    if arguments.warm is None:
        return problems
    if Path(arguments.warm).is_dir():
        return read_problems(Path(arguments.warm), None, trainer=arguments.trainer)
    return read_problems(arguments.tables, arguments.warm.split(","), trainer=arguments.trainer)


def _methods(text: str, seeds: int) -> dict[str, int]:
    """Method -> seeds."""
    found = {}
    for part in text.split(","):
        method, _, own = part.partition(":")
        found[method] = int(own or seeds)
    return found


def parsed() -> argparse.Namespace:
    """Read the command line, with the tasks that follow from it."""
    parser = parser_of(__doc__)
    add_table_arguments(parser, names="tables of these ids or patterns")
    parser.add_argument(
        "--methods",
        default="auto,tpe,random,heuristic",
        metavar="A,B:SEEDS",
        help=f"of {', '.join(METHODS)}",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mode", choices=("cold", "warm", "blind"), default="cold")
    parser.add_argument(
        "--warm",
        metavar="DIR_OR_IDS",
        help="tables in the store; default: all shown tables but the one searched",
    )
    parser.add_argument(
        "--trainer",
        choices=(NAMED, "default", WRONG, *TRAINERS),
        default=NAMED,
        metavar="NAME",
        help=f"whose memory is predicted: {NAMED}, default, {WRONG}, or {', '.join(TRAINERS)}",
    )
    parser.add_argument(
        "--warm-gpus",
        type=int,
        metavar="N",
        help="mode warm: tables of the same model on at most N GPUs, to search larger ones",
    )
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument(
        "--fewest-rows", type=int, default=FEWEST_ROWS, help="smaller problems are left out"
    )
    parser.add_argument(
        "--unmarked", action="store_true", help="also rows that are not marked for replay"
    )
    parser.add_argument(
        "--steps", type=int, default=15, help="warm-up and measured steps of a launch"
    )
    arguments = parser.parse_args()
    if arguments.trainer == "default":
        arguments.trainer = DEFAULT_PROFILE
    arguments.methods = _methods(arguments.methods, arguments.seeds)
    if unknown := set(arguments.methods) - set(METHODS):
        parser.error(
            f"--methods {', '.join(sorted(unknown))}: expected some of {', '.join(METHODS)}"
        )
    arguments.tasks = list(tasks_of(arguments))
    if not arguments.tasks:
        parser.error(
            f"no table with at least {arguments.fewest_rows} rows to replay in {arguments.tables}"
        )
    return arguments


def main() -> None:
    arguments, machine = parsed(), describe_machine()
    by_method: dict[str, dict[str, dict[str, object]]] = {
        method: {} for method in arguments.methods
    }
    curves: dict[str, list[Sequence[float]]] = {method: [] for method in arguments.methods}
    with ProcessPoolExecutor(arguments.parallel, mp_context=get_context("spawn")) as pool:
        for task, runs, auc in (pool.map if arguments.parallel > 1 else map)(
            perform, arguments.tasks
        ):
            by_method[task.method][task.problem.name] = summarise(task.problem, runs, auc)
            curves[task.method] += [
                run.best for run in runs if run.best and task.problem.speeds.max()
            ]
    summary = {method: total(found, curves[method]) for method, found in by_method.items()}
    for method, means in summary.items():
        print(
            method,
            json.dumps({name: value for name, value in means.items() if name != "best_after"}),
        )
    settings = {
        "mode": arguments.mode,
        "trainer": "default" if arguments.trainer == DEFAULT_PROFILE else arguments.trainer,
        "steps_per_launch": arguments.steps,
        "launch_seconds": LAUNCH_SECONDS,
    }
    write_result(
        arguments.out,
        benchmark="search_efficiency",
        machine=machine,
        result={**settings, "summary": summary, "problems": by_method},
    )


if __name__ == "__main__":
    main()

"""How many launches it takes to find the front of speed and free memory of a table.

A search launches layouts of a table of measured runs, or of a simulated trainer (`--simulated N`:
N programs with hidden constants, of those that report their memory), until the front of what it
measured dominates 95 % (99 %) of the volume that the table's true front dominates. The two merits
are tokens per second and GPU, and the share of the device's memory that stays free; the volume is
taken from 0 on, so it has no reference point to choose. Failed launches count, and so does a layout
that `auto` measures again.

Methods, each over all seeds. `auto` is the search of `sweep run` with both objectives. `fastest` is
the same search with the default objective: what is found by the way. `random` is a random order.
`nsga2` and `tpe` are Optuna's samplers for several objectives, with a population of 10 for the
first; the layout nearest to their proposal that is untried is launched, and a launch that failed
counts as 0 in both. In all of them an out-of-memory rules out layouts that provably need more.

Nothing is in the store, and the trainer that the table's words name is predicted (as `--trainer
named` of search_efficiency). Tables without physics or without the memory of all runs are left out.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.search_drivers import LayoutDriver
from benchmarks.search_problem import Problem, read_problems
from benchmarks.simulated_trainer import simulated_problem
from orchestrator.core.pretend.replay import DEFAULT_PROFILE
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.problem.hypervolume import hypervolume, on_front
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.proofs import Dominance, MemoryProof, Proofs
from orchestrator.core.sweepfile.search_section import Strategy
from orchestrator.core.trial.merit import Merit
from orchestrator.search.axes import free_axes

METHODS = ("auto", "fastest", "random", "nsga2", "tpe")
BOTH = (Merit.SPEED, Merit.HEADROOM)
POPULATION = 10
SHARES = (0.95, 0.99)


class Driver(Protocol):
    """A search over the rows of a problem."""

    def ask(self) -> int | None: ...

    def tell(self, row: int, run: MeasuredRun) -> None: ...

    def again(self) -> bool: ...


class OptunaDriver:
    """One of Optuna's samplers for several objectives, over the untried rows."""

    def __init__(self, problem: Problem, sampler: optuna.samplers.BaseSampler) -> None:
        cell = problem.runs[0].cell
        assert cell is not None
        num_layers = cell.model.num_layers
        table = LayoutTable.of(problem.layouts)
        self._axes = free_axes(table, num_layers=num_layers)
        places = [axis.places[axis.steps] for axis in self._axes]
        self._places = np.stack(places, axis=1) if places else np.zeros((len(table), 0))
        self._distributions: dict[str, BaseDistribution] = {
            axis.name: IntDistribution(0, len(axis) - 1)
            if axis.ordered
            else CategoricalDistribution(range(len(axis)))
            for axis in self._axes
        }
        known = problem.profile != DEFAULT_PROFILE
        self._proofs = Proofs(
            table,
            num_layers=num_layers,
            dominance=Dominance.TRUSTED if known else Dominance.CONFIRMED,
        )
        self._layouts, self._merits = problem.layouts, merits_of(problem)
        self._open = np.ones(len(table), dtype=np.bool_)
        self._study = optuna.create_study(sampler=sampler, directions=["maximize", "maximize"])
        self._asked: optuna.Trial | None = None

    def ask(self) -> int | None:
        untried = self._open & ~self._proofs.ruled_out
        if not untried.any():
            return None
        self._asked = self._study.ask(self._distributions)
        proposed = [axis.places[self._asked.params[axis.name]] for axis in self._axes]
        distance = np.abs(self._places - np.array(proposed)).sum(axis=1)
        row = int(np.argmin(np.where(untried, distance, np.inf)))
        self._open[row] = False
        return row

    def tell(self, row: int, run: MeasuredRun) -> None:
        assert self._asked is not None, "a row is told after it was asked for"
        self._study.tell(self._asked, self._merits[row].tolist())
        if run.status is RunStatus.OOM:
            self._proofs.add(
                MemoryProof(layout=self._layouts[row], num_attempts=1, is_measured=False)
            )
        elif run.status is RunStatus.OK:
            self._proofs.ran(row)

    def again(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Run:
    """The launches of one search until its front had each share of the true volume."""

    to_share: tuple[int, ...]
    failed: int  # of them, until the first share


def merits_of(problem: Problem) -> Floats:
    """Speed and free share of memory of each row; 0 in both if it did not run."""
    limit = problem.runs[0].memory_bytes
    assert limit is not None
    speeds = problem.speeds
    free = [
        max(1.0 - run.peak_memory_bytes / limit, 0.0) if run.peak_memory_bytes else 0.0
        for run in problem.runs
    ]
    return np.stack([speeds, np.where(speeds > 0, free, 0.0)], axis=1)


def search(problem: Problem, driver: Driver) -> Run:
    merits = merits_of(problem)
    top, found = hypervolume(merits), np.empty((0, 2))
    launches = failed = 0
    to_share: list[int] = []
    while len(to_share) < len(SHARES) and (row := driver.ask()) is not None:
        driver.tell(row, problem.runs[row])
        launches += 2 if driver.again() else 1
        failed += not to_share and problem.runs[row].status is not RunStatus.OK
        found = np.vstack([found, merits[row]])
        share = hypervolume(found) / top
        while len(to_share) < len(SHARES) and share >= SHARES[len(to_share)]:
            to_share.append(launches)
    never = [len(problem.runs)] * (len(SHARES) - len(to_share))
    return Run(to_share=(*to_share, *never), failed=failed)


def driver_of(problem: Problem, method: str, seed: int) -> Driver:
    match method:
        case "auto":
            return LayoutDriver(problem, Strategy.AUTO, seed, None, merits=BOTH)
        case "fastest":
            return LayoutDriver(problem, Strategy.AUTO, seed, None)
        case "random":
            return LayoutDriver(problem, Strategy.RANDOM, seed, None)
        case "nsga2":
            sampler = optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION)
            return OptunaDriver(problem, sampler)
        case _:
            return OptunaDriver(problem, optuna.samplers.TPESampler(seed=seed))


def usable(problem: Problem) -> bool:
    """Return whether the front of a problem is known: all runs have their memory."""
    ran = [run for run in problem.runs if run.status is RunStatus.OK]
    return (
        problem.has_physics
        and problem.runs[0].memory_bytes is not None
        and bool(ran)
        and all(run.peak_memory_bytes for run in ran)
        and hypervolume(merits_of(problem)) > 0
    )


def problems_of(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.tables is not None:
        yield from filter(usable, read_problems(arguments.tables, arguments.table))
    found, seed = 0, 0
    while found < arguments.simulated:
        problem = simulated_problem(seed, profile=DEFAULT_PROFILE)
        seed += 1
        if usable(problem):
            found += 1
            yield problem


def summarise(runs: Sequence[Run]) -> dict[str, object]:
    found: dict[str, object] = {}
    for place, share in enumerate(SHARES):
        launches = [run.to_share[place] for run in runs]
        found[f"launches_to_{1 - share:.0%}"] = {
            "median": float(np.median(launches)),
            "p90": float(np.quantile(launches, 0.9)),
        }
    return found | {"failed": round(float(np.mean([run.failed for run in runs])), 2)}


def total(problems: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    """Means over problems."""
    found: dict[str, object] = {"problems": len(problems)}
    for share in SHARES:
        name = f"launches_to_{1 - share:.0%}"
        found[name] = {
            key: _mean([of_problem[name][key] for of_problem in problems.values()])
            for key in ("median", "p90")
        }
    return found | {"failed": _mean([one["failed"] for one in problems.values()])}


def _mean(values: Sequence[object]) -> float:
    return round(float(np.mean(np.array(values, dtype=np.float64))), 2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tables", type=Path, help="folder of CSV files, a row per measured run")
    parser.add_argument(
        "--table", action="extend", nargs="+", metavar="ID", help="only tables of these ids"
    )
    parser.add_argument("--simulated", type=int, default=0, metavar="N", help="programs to draw")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(
            f"--methods {', '.join(sorted(unknown))}: expected some of {', '.join(METHODS)}"
        )
    warnings.filterwarnings("ignore", module="optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    machine = describe_machine()
    problems = list(problems_of(arguments))
    if not problems:
        parser.error("no table with the memory of all its runs; see --tables and --simulated")
    by_method: dict[str, dict[str, dict[str, object]]] = {method: {} for method in methods}
    sizes = {
        problem.name: {
            "rows": len(problem.runs),
            "on_front": int(on_front(merits_of(problem)).sum()),
        }
        for problem in problems
    }
    for problem in problems:
        for method in methods:
            shuffled = [problem.shuffled(seed) for seed in range(arguments.seeds)]
            runs = [search(one, driver_of(one, method, seed)) for seed, one in enumerate(shuffled)]
            by_method[method][problem.name] = summarise(runs)
    summary = {method: total(found) for method, found in by_method.items()}
    for method, means in summary.items():
        print(method, json.dumps(means))
    write_result(
        arguments.out,
        benchmark="pareto",
        machine=machine,
        result={
            "seeds": arguments.seeds,
            "summary": summary,
            "sizes": sizes,
            "problems": by_method,
        },
    )


if __name__ == "__main__":
    main()

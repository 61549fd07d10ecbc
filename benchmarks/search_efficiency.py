"""Count the launches that each search needs to come near the best layout of tables of measured runs; print a table, write JSON.

python -m benchmarks.search_efficiency --tables DIR [--table ID ...] [--methods auto,tpe,gp:2,random,heuristic] [--seeds N]
    [--mode cold|warm|blind] [--warm DIR_OR_IDS] [--trainer named|default] [--parallel K] [--steps N] [--unmarked] [--out FILE.json]

DIR holds CSV files with the columns of core/run_table.py; `--table` takes ids, and patterns such as 'pb_*'. Each problem of a table (one
model, number of GPUs, sequence length and batch) is searched on its own: a launch of a layout returns the row that was measured. Only rows
with `replay` = True are there to be proposed: what a table lacks is neither charged nor rewarded. Of several rows of one layout one stands
(run_table.standing_run). Rows are put in an order of chance for each seed: where a search has no reason, that of a file is none. Columns of words that vary (attention kernel, sequence parallelism) are axes like any other. Problems with fewer than
`--fewest-rows` are left out; where they are all that small, the table is searched as one problem, without physics.

Methods, each with seeds of its own where given (`gp:2`). `auto`, `tpe`, `gp` and `random` run through `orchestrator.searcher.Searcher`, as
`sweep run` does (tpe and gp: Optuna's, moved to the nearest untried row). `heuristic` is the rule that hindsight gives: what a textbook
memory formula admits, no recomputation, smallest tp x pp, smallest pp, smallest micro-batch. An out-of-memory rules out what provably
needs more, for `auto`, `tpe`, `gp` and `random` alike.
A layout that `auto` wants measured once more is charged as a launch, and returns the same row.

Modes. `cold`: nothing is known but data sheets and the formulas' priors, of the trainer that the table's words name (`--trainer named`, by
the rule of `sweep replay`: never by the version that ran), or of the one that is believed where nobody names one (`--trainer default`);
tpe and gp take our prediction where several rows are equally near. `warm`: constants are calibrated to the other problems of the same
hardware and trainer, of the named tables (`--warm`: ids or patterns, comma-separated, or a folder; default: all shown) but never of the
table that is searched, nor of its problem under another id. `blind`: axes have no names and values no meaning but their order, nothing is predicted, and no dominance is known;
a limit of memory and what a launch measured of it are.

Numbers, per problem and method, over seeds: `launches_to_5_percent` and `launches_to_1_percent`: launches, failed ones included, until one
is measured within 5 % (1 %) of the best tokens/s/GPU of the table, median and 90th percentile (the number of rows where it never is);
`out_of_memory`, `crashed`, `repeats`: launches so spent until within 5 %, mean; `gpu_seconds`: GPUs x (60 s a launch + `--steps` steps, of
those that ran) until within 5 %, median; `nothing_fits`: launches until that is declared, for a table of which nothing ran. The summary
gives means over problems. `best_after`: mean over problems and seeds of the best share so far after 1, 2, 3, ... launches.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import describe_machine, write_result
from benchmarks.prediction import observation, problem_key
from orchestrator.core.calibration import Calibration, Observation, calibrate
from orchestrator.core.hardware import Hardware, from_label
from orchestrator.core.lattice import Axis, Lattice
from orchestrator.core.layout import Layout
from orchestrator.core.layout_table import LayoutTable
from orchestrator.core.measurement import LAUNCH_SECONDS
from orchestrator.core.memory import predict_memory
from orchestrator.core.planner import Candidates, rank_candidates
from orchestrator.core.proposer import Told
from orchestrator.core.replay import DEFAULT_PROFILE
from orchestrator.core.run_table import MeasuredRun, RunStatus, named_profile, parse_runs, standing_run, tables
from orchestrator.core.spec import Objective, Search, Strategy
from orchestrator.core.trainer import TRAINERS, Trainer
from orchestrator.row_searcher import RowSearcher
from orchestrator.search_axes import all_axes, free_axes
from orchestrator.searcher import Failed, Measured, Outcome, OutOfMemory, Searcher

FEWEST_ROWS = 8
METHODS = ("auto", "tpe", "gp", "random", "heuristic")
SHOWN_LAUNCHES = 100  # of the curve


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One cell of one table: distinct layouts, each with the run that a launch of it returns."""

    table_id: str
    runs: tuple[MeasuredRun, ...]
    profile: str = DEFAULT_PROFILE  # the named trainer that predictions are of

    @property
    def name(self) -> str:
        run = self.runs[0]
        return f"{self.table_id}/all" if self.is_mixed else f"{self.table_id}/{run.num_gpus}gpu_gb{run.global_batch_size}"

    @property
    def is_mixed(self) -> bool:
        """Whether it holds several numbers of GPUs or batches, each too small a problem for itself."""
        return len({(run.num_gpus, run.global_batch_size, run.sequence_length) for run in self.runs}) > 1

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(_layout(run) for run in self.runs)

    @cached_property
    def hardware(self) -> Hardware:
        return from_label(self.runs[0].hardware, memory_bytes=self.runs[0].memory_bytes)

    @property
    def trainer(self) -> Trainer:
        return TRAINERS[self.profile]

    @cached_property
    def speeds(self) -> NDArray[np.float64]:
        """Tokens per second and GPU; 0 where it did not run."""
        ran = [run.status is RunStatus.OK and run.tokens_per_second_per_gpu for run in self.runs]
        return np.array([float(speed or 0.0) for speed in ran])

    def shuffled(self, seed: int) -> Problem:
        """Its rows in another order: files are sorted by speed, and what ties would go to the first."""
        order = np.random.default_rng(seed).permutation(len(self.runs))
        return replace(self, runs=tuple(self.runs[row] for row in order))

    def observations(self) -> list[Observation]:
        return [found for run in self.runs if (found := observation(run, self.hardware)) is not None]


class Driver(Protocol):
    """A search over the rows of a problem."""

    def ask(self) -> int | None: ...

    def tell(self, row: int, run: MeasuredRun) -> None: ...

    def again(self) -> bool: ...

    def nothing_fits(self) -> bool: ...

    def expected_gain(self) -> float | None: ...


class LayoutDriver:
    """The searcher of `sweep run`."""

    def __init__(self, problem: Problem, strategy: Strategy, seed: int, calibration: Calibration | None) -> None:
        cell = problem.runs[0].cell
        assert cell is not None
        self._layouts = problem.layouts
        self._rows = {layout: row for row, layout in enumerate(problem.layouts)}
        self._searcher = Searcher(
            candidates_of(problem, calibration),
            search=Search(strategy=strategy, seed=seed),
            objective=Objective.TOKENS_PER_SECOND_PER_GPU,
            num_layers=cell.model.num_layers,
        )

    def ask(self) -> int | None:
        proposal = self._searcher.ask()
        return None if proposal is None else self._rows[proposal.layout]

    def tell(self, row: int, run: MeasuredRun) -> None:
        self._searcher.tell(self._layouts[row], _outcome(run))

    def again(self) -> bool:
        return self._searcher.again() is not None

    def nothing_fits(self) -> bool:
        return self._searcher.nothing_fits() is not None

    def expected_gain(self) -> float | None:
        return self._searcher.expected_gain()


class RowDriver:
    """The same search over rows without names: blind, or of a model of which nothing is known, or in an order of one's own."""

    def __init__(self, problem: Problem, strategy: Strategy, seed: int, order: NDArray[np.int64] | None = None) -> None:
        axes = tuple(
            _nameless(axis, number) for number, axis in enumerate(all_axes(LayoutTable.of(problem.layouts), num_layers=_layers(problem)))
        )
        free = {axis.name for axis in free_axes(LayoutTable.of(problem.layouts), num_layers=_layers(problem))}
        names = [axis.name for axis in all_axes(LayoutTable.of(problem.layouts), num_layers=_layers(problem))]
        lattice = Lattice(axes=axes, memory_limit_bytes=problem.runs[0].memory_bytes)
        self._rows = RowSearcher(
            order=np.arange(len(problem.runs)) if order is None else order,
            lattice=lattice.take,
            sampled=[axis for axis, name in zip(axes, names, strict=True) if name in free],
            search=Search(strategy=strategy, seed=seed),
        )

    def ask(self) -> int | None:
        asked = self._rows.ask()
        return None if asked is None else asked.row

    def tell(self, row: int, run: MeasuredRun) -> None:
        match _outcome(run):
            case Measured(value=value, peak_memory_bytes=peak):
                self._rows.tell(Told(row=row, score=-float(np.log(value)), peak_memory_bytes=peak))
            case OutOfMemory():
                self._rows.tell(Told(row=row, out_of_memory=True))
            case Failed():
                self._rows.tell(Told(row=row))

    def again(self) -> bool:
        return False

    def nothing_fits(self) -> bool:
        return self._rows.hopeless() is not None

    def expected_gain(self) -> float | None:
        return self._rows.expected_gain()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one search of one problem with one seed came to."""

    to_5_percent: int | None  # launches
    to_1_percent: int | None
    nothing_fits: int | None
    out_of_memory: int  # launches until within 5 %, or to the end
    crashed: int
    repeats: int
    gpu_seconds: float
    best: tuple[float, ...]  # share of the best after each launch


def search(problem: Problem, driver: Driver, *, steps: int) -> Run:
    """Launch until within 1 % of the best, or until nothing is left; where nothing ran, until that is declared."""
    best, top = 0.0, float(problem.speeds.max())
    launches = out_of_memory = crashed = repeats = 0
    seconds, curve, to_5, to_1, given_up = 0.0, [], None, None, None
    while to_1 is None and given_up is None and (row := driver.ask()) is not None:
        run = problem.runs[row]
        driver.tell(row, run)
        for repeated in (False, True) if driver.again() else (False,):
            launches += 1
            repeats += repeated and to_5 is None
            held = LAUNCH_SECONDS + (steps * (run.step_seconds or 0.0) if problem.speeds[row] else 0.0)
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


def driver_of(problem: Problem, method: str, seed: int, *, mode: str, calibration: Calibration | None) -> Driver:
    if method == "heuristic":
        return RowDriver(problem, Strategy.EXHAUSTIVE, seed, _by_rule(problem))
    strategy = Strategy(method)
    if mode == "blind" or problem.runs[0].cell is None or problem.is_mixed:
        return RowDriver(problem, strategy, seed)
    return LayoutDriver(problem, strategy, seed, calibration)


def candidates_of(problem: Problem, calibration: Calibration | None) -> Candidates:
    """What the planner makes of a problem's rows."""
    run = problem.runs[0]
    assert run.cell is not None
    table = LayoutTable.of(problem.layouts)
    return rank_candidates(
        table,
        run.cell,
        hardware=problem.hardware,
        memory_limit_bytes=float(problem.hardware.memory_bytes),
        gpus_per_node=run.gpus_per_node,
        trainer=problem.trainer,
        calibration=calibration,
    )


def read_problems(
    folder: Path, patterns: Sequence[str] | None, *, fewest_rows: int = FEWEST_ROWS, unmarked: bool = False, named: bool = True
) -> list[Problem]:
    """The problems of a folder's tables, each with the trainer that its table's words name, or (not `named`) the one that nobody names."""
    found: list[Problem] = []
    for path in sorted(folder.glob("*.csv")):
        for table_id, cells in tables(parse_runs(path.read_text(encoding="utf-8"))).items():
            if patterns is not None and not any(fnmatch(table_id, pattern) for pattern in patterns):
                continue
            groups = [
                [run for run in cell.runs if (run.replay or unmarked) and run.layout is not None and _is_usable(run)] for cell in cells
            ]
            distinct = [tuple(_distinct(runs)) for runs in groups if runs]
            if not distinct:
                continue
            profile = named_profile(run for runs in distinct for run in runs) if named else DEFAULT_PROFILE
            problems = [Problem(table_id=table_id, runs=runs, profile=profile) for runs in distinct]
            large = [problem for problem in problems if len(problem.runs) >= fewest_rows]
            whole = Problem(table_id=table_id, runs=tuple(_distinct([run for runs in groups for run in runs])), profile=profile)
            found += large or ([whole] if len(whole.runs) >= fewest_rows else [])
    return found


def calibration_of(problem: Problem, relatives: Sequence[Problem]) -> Calibration | None:
    """What the relatives of a problem teach: other problems, of other tables, of its hardware and trainer."""
    rows = [
        row
        for other in relatives
        if other.table_id != problem.table_id
        and problem_key(other.runs[0]) != problem_key(problem.runs[0])
        and (other.hardware.name, other.trainer) == (problem.hardware.name, problem.trainer)
        for row in other.observations()
    ]
    return calibrate(rows, Calibration.prior(problem.trainer)).widened() if rows else None


def summarise(problem: Problem, runs: Sequence[Run]) -> dict[str, object]:
    never = len(problem.runs)
    found: dict[str, object] = {"rows": len(problem.runs), "seeds": len(runs)}
    if not problem.speeds.max():
        return found | {"nothing_fits": float(np.median([run.nothing_fits or never for run in runs]))}
    for name, values in (
        ("launches_to_5_percent", [run.to_5_percent or never for run in runs]),
        ("launches_to_1_percent", [run.to_1_percent or never for run in runs]),
    ):
        found[name] = {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
    for name in ("out_of_memory", "crashed", "repeats"):
        found[name] = round(float(np.mean([getattr(run, name) for run in runs])), 2)
    return found | {"gpu_seconds": round(float(np.median([run.gpu_seconds for run in runs])), 0)}


def total(problems: Mapping[str, Mapping[str, object]], curves: Sequence[Sequence[float]]) -> dict[str, object]:
    """Means over the problems of which something ran."""
    ran = [found for found in problems.values() if "launches_to_5_percent" in found]
    hopeless = [found for found in problems.values() if "nothing_fits" in found]
    means: dict[str, object] = {"problems": len(ran)}
    for name in ("launches_to_5_percent", "launches_to_1_percent"):
        means[name] = {key: _mean([found[name][key] for found in ran]) for key in ("median", "p90")}  # type: ignore[index]
        means[f"{name}_worst_median"] = max((found[name]["median"] for found in ran), default=None)  # type: ignore[index]
    for name in ("out_of_memory", "crashed", "repeats", "gpu_seconds"):
        means[name] = _mean([found[name] for found in ran])
    if hopeless:
        means["nothing_fits"] = {"problems": len(hopeless), "launches": _mean([found["nothing_fits"] for found in hopeless])}
    if curves:
        filled = np.array([[*curve, *[curve[-1]] * (SHOWN_LAUNCHES - len(curve))] for curve in curves])
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


def perform(task: Task) -> tuple[Task, list[Run]]:
    warnings.filterwarnings("ignore", module="optuna")
    runs = []
    for seed in range(task.seeds):
        problem = task.problem.shuffled(seed)
        driver = driver_of(problem, task.method, seed, mode=task.mode, calibration=task.calibration)
        runs.append(search(problem, driver, steps=task.steps))
    return task, runs


def tasks_of(arguments: argparse.Namespace) -> Iterator[Task]:
    named = arguments.trainer == "named"
    problems = read_problems(arguments.tables, arguments.table, fewest_rows=arguments.fewest_rows, unmarked=arguments.unmarked, named=named)
    relatives = _relatives(arguments, problems) if arguments.mode == "warm" else []
    for problem in problems:
        calibration = calibration_of(problem, relatives) if arguments.mode == "warm" and problem.runs[0].cell is not None else None
        for method, seeds in arguments.methods.items():
            yield Task(problem=problem, method=method, seeds=seeds, mode=arguments.mode, calibration=calibration, steps=arguments.steps)


def _relatives(arguments: argparse.Namespace, problems: list[Problem]) -> list[Problem]:
    if arguments.warm is None:
        return problems
    if Path(arguments.warm).is_dir():
        return read_problems(Path(arguments.warm), None, named=arguments.trainer == "named")
    return read_problems(arguments.tables, arguments.warm.split(","), named=arguments.trainer == "named")


def _layout(run: MeasuredRun) -> Layout:
    assert run.layout is not None
    return replace(run.layout, options=tuple(sorted(run.extra)))


def _is_usable(run: MeasuredRun) -> bool:
    return run.status in (RunStatus.OOM, RunStatus.ERROR) or (run.status is RunStatus.OK and run.tokens_per_second_per_gpu is not None)


def _distinct(runs: Sequence[MeasuredRun]) -> Iterator[MeasuredRun]:
    """One run of each layout."""
    groups: dict[Layout, list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(_layout(run), []).append(run)
    yield from map(standing_run, groups.values())


def _outcome(run: MeasuredRun) -> Outcome:
    match run.status:
        case RunStatus.OK:
            assert run.tokens_per_second_per_gpu is not None
            return Measured(value=run.tokens_per_second_per_gpu, peak_memory_bytes=run.peak_memory_bytes)
        case RunStatus.OOM:
            return OutOfMemory()
        case _:
            return Failed()


def _nameless(axis: Axis, number: int) -> Axis:
    return Axis(name=f"axis{number}", ordered=axis.ordered, steps=axis.steps, places=np.arange(len(axis), dtype=np.float64))


def _layers(problem: Problem) -> int:
    cell = problem.runs[0].cell
    return cell.model.num_layers if cell is not None else 1


def _by_rule(problem: Problem) -> NDArray[np.int64]:
    table = LayoutTable.of(problem.layouts)
    run = problem.runs[0]
    fits = np.ones(len(table), dtype=np.bool_)
    if run.cell is not None and run.memory_bytes is not None:
        fits = predict_memory(table, run.cell, Trainer()).total <= 0.95 * run.memory_bytes
    recomputes = np.array([axis_value is not None and str(axis_value) != "none" for axis_value in table.recomputes])[table.recompute]
    tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
    return np.lexsort((table.micro_batch_size, pp, tp * pp, recomputes, ~fits))


def _methods(text: str, seeds: int) -> dict[str, int]:
    """Method -> seeds."""
    found = {}
    for part in text.split(","):
        method, _, own = part.partition(":")
        found[method] = int(own or seeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of CSV files, one row per measured run")
    parser.add_argument("--table", action="append", metavar="ID", help="only tables of this id or pattern; may be given again")
    parser.add_argument("--methods", default="auto,tpe,random,heuristic", metavar="A,B:SEEDS", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--mode", choices=("cold", "warm", "blind"), default="cold")
    parser.add_argument("--warm", metavar="DIR_OR_IDS", help="what is in the store already; default: all shown tables but the one searched")
    parser.add_argument("--trainer", choices=("named", "default"), default="named", help="whose memory is predicted")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--fewest-rows", type=int, default=FEWEST_ROWS, help="of a problem that is searched")
    parser.add_argument("--unmarked", action="store_true", help="also rows that are not marked for replay")
    parser.add_argument("--steps", type=int, default=15, help="warm-up and measured steps of a launch")
    parser.add_argument("--out", type=Path, help="write the result here, with what it was measured on")
    arguments = parser.parse_args()
    arguments.methods = _methods(arguments.methods, arguments.seeds)
    if unknown := set(arguments.methods) - set(METHODS):
        parser.error(f"--methods {', '.join(sorted(unknown))}: expected some of {', '.join(METHODS)}")
    machine = describe_machine()
    tasks = list(tasks_of(arguments))
    if not tasks:
        parser.error(f"no table with at least {arguments.fewest_rows} rows to replay in {arguments.tables}")
    by_method: dict[str, dict[str, dict[str, object]]] = {method: {} for method in arguments.methods}
    curves: dict[str, list[Sequence[float]]] = {method: [] for method in arguments.methods}
    with ProcessPoolExecutor(arguments.parallel, mp_context=get_context("spawn")) as pool:
        for task, runs in pool.map(perform, tasks) if arguments.parallel > 1 else map(perform, tasks):
            by_method[task.method][task.problem.name] = summarise(task.problem, runs)
            curves[task.method] += [run.best for run in runs if run.best and task.problem.speeds.max()]
    summary = {method: total(found, curves[method]) for method, found in by_method.items()}
    for method, means in summary.items():
        print(method, json.dumps({name: value for name, value in means.items() if name != "best_after"}))
    if arguments.out is not None:
        settings = {
            "mode": arguments.mode,
            "trainer": arguments.trainer,
            "steps_per_launch": arguments.steps,
            "launch_seconds": LAUNCH_SECONDS,
        }
        write_result(
            arguments.out, benchmark="search_efficiency", machine=machine, result={**settings, "summary": summary, "problems": by_method}
        )


if __name__ == "__main__":
    main()

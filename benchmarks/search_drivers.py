"""Searches over the rows of a problem: those of `sweep run`, and a textbook rule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from benchmarks.search_problem import Problem, prior_of
from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.trainer import Trainer, with_options
from orchestrator.core.pretend.replay import DEFAULT_PROFILE
from orchestrator.core.pretend.run_table import MeasuredRun, RunStatus
from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.search.lattice import Lattice, LatticeAxis
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.search.planner import Candidates, rank_candidates
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.core.trial.merit import Merit
from orchestrator.search.axes import all_axes, free_axes
from orchestrator.search.row_searcher import RowSearcher
from orchestrator.search.searcher import Searcher

METHODS = ("auto", "tpe", "gp", "random", "heuristic")
# Launches after which the classification of out-of-memories is scored again.
AFTER = 5


class Driver(Protocol):
    """A search over the rows of a problem."""

    def ask(self) -> int | None: ...

    def tell(self, row: int, run: MeasuredRun) -> None: ...

    def again(self) -> bool: ...

    def nothing_fits(self) -> bool: ...

    def expected_gain(self) -> float | None: ...


class LayoutDriver:
    """The searcher of `sweep run`."""

    def __init__(
        self,
        problem: Problem,
        strategy: Strategy,
        seed: int,
        calibration: Calibration | None,
        *,
        merits: Collection[Merit] = (Merit.SPEED,),
    ) -> None:
        cell = problem.runs[0].cell
        assert cell is not None
        self._cell, self._layouts = cell, problem.layouts
        self._rows = {layout: row for row, layout in enumerate(problem.layouts)}
        self._searcher = Searcher(
            _candidates_of(problem, calibration),
            cell=cell,
            search=Search(strategy=strategy, seed=seed),
            objective=Objective.TOKENS_PER_SECOND_PER_GPU,
            # The rule of `sweep replay`.
            dominance=Dominance.CONFIRMED
            if problem.profile == DEFAULT_PROFILE
            else Dominance.TRUSTED,
            merits=merits,
        )

    def ask(self) -> int | None:
        proposal = self._searcher.ask()
        return None if proposal is None else self._rows[proposal.layout]

    def tell(self, row: int, run: MeasuredRun) -> None:
        tokens = self._cell.tokens_per_step / self._cell.num_gpus
        self._searcher.tell(self._layouts[row], _outcome(run, tokens=tokens))

    def again(self) -> bool:
        return self._searcher.doubtful() is not None

    def nothing_fits(self) -> bool:
        return self._searcher.nothing_fits() is not None

    def expected_gain(self) -> float | None:
        return self._searcher.expected_gain()

    def fits(self) -> Floats | None:
        """The probability that each row fits."""
        return self._searcher.probability_of_fitting()


class RowDriver:
    """The same search over rows without names: blind, of an unknown model, or in a given order."""

    def __init__(
        self,
        problem: Problem,
        strategy: Strategy,
        seed: int,
        order: Ints | None = None,
    ) -> None:
        table, num_layers = LayoutTable.of(problem.layouts), _layers(problem)
        every = all_axes(table, num_layers=num_layers)
        free = {axis.name for axis in free_axes(table, num_layers=num_layers)}
        axes = tuple(_nameless(axis, number) for number, axis in enumerate(every))
        lattice = Lattice(axes=axes, memory_limit_bytes=problem.runs[0].memory_bytes)
        self._rows = RowSearcher(
            order=np.arange(len(problem.runs)) if order is None else order,
            lattice=lattice.take,
            sampled=[axis for axis, named in zip(axes, every, strict=True) if named.name in free],
            search=Search(strategy=strategy, seed=seed),
        )

    def ask(self) -> int | None:
        asked = self._rows.ask()
        return None if asked is None else asked[0]

    def tell(self, row: int, run: MeasuredRun) -> None:
        # Without a cell the unit is unknown, and does not matter.
        self._rows.tell(row, _outcome(run, tokens=1.0))

    def again(self) -> bool:
        return False

    def nothing_fits(self) -> bool:
        return self._rows.hopeless() is not None

    def expected_gain(self) -> float | None:
        return self._rows.expected_gain()


def driver_of(
    problem: Problem, method: str, seed: int, *, mode: str, calibration: Calibration | None
) -> Driver:
    if method == "heuristic":
        return RowDriver(problem, Strategy.EXHAUSTIVE, seed, _by_rule(problem))
    strategy = Strategy(method)
    if mode == "blind" or not problem.has_physics:
        return RowDriver(problem, strategy, seed)
    return LayoutDriver(problem, strategy, seed, calibration)


def classification(
    problem: Problem, calibration: Calibration | None = None
) -> tuple[float | None, float | None]:
    """The AUC of the probability to fit, before anything is told and after AFTER launches.

    It is the probability that the search holds a layout that runs out of memory for less likely to
    fit than one that runs; over the layouts that were not launched. None: no memory limit is known,
    or one of the two kinds is missing.
    """
    driver = LayoutDriver(problem, Strategy.AUTO, 0, calibration)
    before = _auc(problem, driver, set())
    told: set[int] = set()
    while len(told) < AFTER and (row := driver.ask()) is not None:
        driver.tell(row, problem.runs[row])
        told.add(row)
    return before, _auc(problem, driver, told)


def _auc(problem: Problem, driver: LayoutDriver, told: set[int]) -> float | None:
    fits = driver.fits()
    if fits is None:
        return None
    left = [row for row in range(len(problem.runs)) if row not in told]
    ran = fits[[row for row in left if problem.runs[row].status is RunStatus.OK]]
    out = fits[[row for row in left if problem.runs[row].status is RunStatus.OOM]]
    if not len(ran) or not len(out):
        return None
    higher = (ran[:, None] > out[None, :]).mean() + 0.5 * (ran[:, None] == out[None, :]).mean()
    return float(higher)


def _candidates_of(problem: Problem, calibration: Calibration | None) -> Candidates:
    """The rows of a problem, ranked by the planner."""
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
        trainers=[with_options(problem.trainer, dict(words)) for words in table.option_sets],
        calibration=calibration or prior_of(problem),
    )


def _outcome(run: MeasuredRun, *, tokens: float) -> Outcome:
    """The outcome of a run, whose step has so many tokens per GPU."""
    match run.status:
        case RunStatus.OK:
            assert run.tokens_per_second_per_gpu is not None
            return Measured.of_step(
                tokens / run.tokens_per_second_per_gpu, peak_memory_bytes=run.peak_memory_bytes
            )
        case RunStatus.OOM:
            return OutOfMemory()
        case _:
            return Failed()


def _nameless(axis: LatticeAxis, number: int) -> LatticeAxis:
    return LatticeAxis(
        name=f"axis{number}",
        ordered=axis.ordered,
        steps=axis.steps,
        places=np.arange(len(axis), dtype=np.float64),
    )


def _layers(problem: Problem) -> int:
    cell = problem.runs[0].cell
    return cell.model.num_layers if cell is not None else 1


def _by_rule(problem: Problem) -> Ints:
    table = LayoutTable.of(problem.layouts)
    run = problem.runs[0]
    fits = np.ones(len(table), dtype=np.bool_)
    if run.cell is not None and run.memory_bytes is not None:
        fits = predict_memory(table, run.cell, Trainer()).total <= 0.95 * run.memory_bytes
    recomputes = np.array(
        [axis_value is not None and str(axis_value) != "none" for axis_value in table.recomputes]
    )[table.recompute]
    tp, pp = table.tensor_parallel_size, table.pipeline_parallel_size
    return np.lexsort((table.micro_batch_size, pp, tp * pp, recomputes, ~fits))

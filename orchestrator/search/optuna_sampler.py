"""The search of this project for any Optuna study: a sampler over a finite set of layouts.

A layout is a dictionary of parameters:

    layouts = [
        {"tp": tp, "mbs": mbs, "recompute": recompute}
        for tp in (1, 2, 4)
        for mbs in (1, 2, 4)
        for recompute in ("none", "full")
        if tp * mbs <= 8
    ]
    sampler = LayoutSampler(
        layouts, memory_bytes=predicted, memory_limit_bytes=79 * 2**30, seed=0
    )
    study = optuna.create_study(direction="maximize", sampler=sampler)
    trial = study.ask(sampler.distributions)
    ...                                                # measure trial.params
    trial.set_user_attr("peak_memory_bytes", peak)     # if it was read
    study.tell(trial, tokens_per_second)

For an out-of-memory call `trial.set_constraint("memory", excess)` with how far it was over the
limit, relative (0.05 if unknown), and tell `state=TrialState.FAIL`. A failure without a constraint,
or an infinite value, is the fault of the layout or the code. Nothing is learned from a pruned
trial, and its layout is not asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.arrays import Floats
from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.search.row_searcher import RowSearcher, RowStatus

# The user attribute of a trial that read it.
PEAK_MEMORY = "peak_memory_bytes"
# How far predictions may be off, in the logarithm: all of them together, and each besides.
STEP_LEVEL_SD, STEP_RESIDUAL_SD = 0.5, 0.25
MEMORY_LEVEL_SD, MEMORY_RESIDUAL_SD = 0.15, 0.12


class LayoutsExhausted(UsageInvalid):
    """Every layout of the sampler was asked for. End the study, or give it more layouts."""


class LayoutSampler(BaseSampler):
    """Proposes each layout at most once, the most promising per second first.

    Objectives must be positive: a time, or a throughput.
    """

    def __init__(
        self,
        layouts: Sequence[Mapping[str, int | float | str]],
        *,
        step_seconds: Sequence[float] | None = None,
        memory_bytes: Sequence[float] | None = None,
        memory_limit_bytes: float | None = None,
        lattice: Lattice | None = None,
        seed: int = 0,
    ) -> None:
        """Predicted seconds and bytes, one per layout, count for less the more they prove wrong;
        `lattice` replaces both.

        Raises UsageInvalid when layouts differ in their parameters or two are the same.
        """
        self._params = [dict(layout) for layout in layouts]
        self._names = _names(self._params)
        self._rows_of = {self._key(params): row for row, params in enumerate(self._params)}
        if len(self._rows_of) < len(self._params):
            repeated, num = len(self._params) - len(self._rows_of), len(self._params)
            raise UsageInvalid(f"{repeated} of {num} layouts repeat another: give each once")
        num = len(layouts)
        if lattice is None:
            axes = (_axis(name, [params[name] for params in self._params]) for name in self._names)
            lattice = Lattice(
                axes=tuple(axis for axis in axes if len(axis) > 1),
                seconds=_belief(step_seconds, num, STEP_LEVEL_SD, STEP_RESIDUAL_SD),
                memory=_belief(memory_bytes, num, MEMORY_LEVEL_SD, MEMORY_RESIDUAL_SD),
                memory_limit_bytes=memory_limit_bytes,
            )
        order = np.arange(num)
        if lattice.seconds is not None:
            order = np.argsort(lattice.seconds.mean, kind="stable")
        self._rows = RowSearcher(
            order=order,
            lattice=lattice.take,
            sampled=lattice.axes,
            search=Search(strategy=Strategy.AUTO, seed=seed),
            memory=None if lattice.memory is None else lattice.memory.mean,
        )
        # Log seconds plus log throughput; None until the first throughput shows it.
        self._offset: float | None = 0.0 if lattice.seconds is None else None
        self._prior = lattice.seconds
        # Number of the first trial not read yet.
        self._next = 0
        # Number of a trial -> its row, if known.
        self._unfinished: dict[int, int | None] = {}
        self._fallback = RandomSampler(seed=seed)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """All parameters for `study.ask`, so that the trial is one of the layouts."""
        values = {name: {params[name] for params in self._params} for name in self._names}
        return {
            name: CategoricalDistribution(sorted(some, key=lambda v: (isinstance(v, str), v)))
            for name, some in values.items()
        }

    def num_left(self, study: Study) -> int:
        """The number of layouts that no trial of the study has had."""
        self._read_trials(study, but=None)
        return self._rows.count(RowStatus.UNTRIED)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the layout to measure next.

        Raises LayoutsExhausted when each was asked for.
        """
        self._raise_error_if_multi_objective(study)
        self._read_trials(study, but=trial.number)
        asked = self._rows.ask()
        if asked is None:
            study.tell(trial.number, state=TrialState.FAIL)  # else it would run forever
            raise LayoutsExhausted(f"all {len(self._params)} layouts of the sampler were asked for")
        row, _ = asked
        self._unfinished[trial.number] = row
        return dict(self._params[row])

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw a parameter that no layout has at random."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self._fallback.reseed_rng()

    def _read_trials(self, study: Study, *, but: int | None) -> None:
        """Record how the study's trials ended, also those that others ran."""
        trials = study.get_trials(deepcopy=False)
        for number in [*self._unfinished, *range(self._next, len(trials))]:
            if number == but:
                continue
            trial = trials[number]
            row = self._unfinished.get(number)
            if row is None:
                row = self._rows_of.get(self._key(trial.params))
                if row is not None and self._rows.status(row) is RowStatus.UNTRIED:
                    self._rows.start(row)
            if not trial.state.is_finished():
                self._unfinished[number] = row
                continue
            self._unfinished.pop(number, None)
            ran = self._ran(trial, row)
            if (
                row is not None
                and row != ran
                and self._rows.status(row) is RowStatus.UNDER_WAY
                and row not in self._unfinished.values()
            ):
                self._rows.forget(row)
            if ran is not None:
                self._record(study, trial, ran)
        self._next = len(trials)
        if but is not None and but < len(trials):
            self._unfinished.setdefault(but, None)

    def _ran(self, trial: FrozenTrial, asked: int | None) -> int | None:
        """The row of a finished trial, by its parameters: enqueued ones replace what was asked."""
        if all(name in trial.params for name in self._names):
            return self._rows_of.get(self._key(trial.params))
        # It ended before it took all parameters: the row asked for, if those that it took agree.
        is_as_asked = asked is not None and all(
            self._params[asked].get(name) == value
            for name, value in trial.params.items()
            if name in self._names
        )
        return asked if is_as_asked else None

    def _record(self, study: Study, trial: FrozenTrial, row: int) -> None:
        if trial.state is TrialState.PRUNED and not _is_infeasible(trial):
            if self._rows.status(row) is not RowStatus.TOLD:
                self._rows.set_aside(row)
            return
        self._rows.tell(row, self._outcome(study, trial, row))

    def _outcome(self, study: Study, trial: FrozenTrial, row: int) -> Outcome:
        if _is_infeasible(trial):
            return OutOfMemory(excess=max(trial.constraints.values()))
        if trial.state is not TrialState.COMPLETE or not isfinite(trial.value or 0.0):
            return Failed()
        assert trial.value is not None
        peak = trial.user_attrs.get(PEAK_MEMORY)
        return Measured(
            score=self._score(study, trial.value, row),
            peak_memory_bytes=None if peak is None else float(peak),
        )

    def _score(self, study: Study, value: float, row: int) -> float:
        if not value > 0:
            raise UsageInvalid(
                f"objective {value} of a trial: "
                "a LayoutSampler needs positive ones, a time or a throughput"
            )
        if study.direction is StudyDirection.MINIMIZE:
            return log(value)
        if self._offset is None:
            # The unit of a throughput is unknown: the first one is taken to be as predicted.
            assert self._prior is not None
            self._offset = log(value) + float(self._prior.mean[row])
        return self._offset - log(value)

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(params.get(name) for name in self._names)


def _names(params: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    if not params:
        raise UsageInvalid("no layouts: a LayoutSampler chooses among at least one")
    names = tuple(params[0])
    for number, one in enumerate(params, 1):
        if set(one) != set(names):
            raise UsageInvalid(
                f"layout {number} has parameters {', '.join(one)}, the first {', '.join(names)}: "
                "all have the same"
            )
    return names


def _axis(name: str, values: Sequence[int | float | str]) -> LatticeAxis:
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return LatticeAxis.of_words(name, [str(value) for value in values])
    return LatticeAxis.of(name, numbers, doublings=min(numbers) > 0)


def _belief(
    predicted: Sequence[float] | None, num: int, level_sd: float, residual_sd: float
) -> Belief | None:
    if predicted is None:
        return None
    values: Floats = np.asarray(predicted, dtype=np.float64)
    if len(values) != num or not (values > 0).all():
        raise UsageInvalid(
            f"{len(values)} predictions for {num} layouts: one positive number for each"
        )
    return Belief(
        mean=np.log(values),
        basis=np.ones((num, 1)),
        covariance=np.array([[level_sd**2]]),
        residual_sd=residual_sd,
    )


def _is_infeasible(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())

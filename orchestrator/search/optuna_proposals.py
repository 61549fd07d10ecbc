"""Optuna's own samplers (TPE, Gaussian process) over the rows of a lattice.

A proposal that is no open row is moved to the nearest one. The study is a projection of what was
told: it may be thrown away and rebuilt at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from math import exp
from typing import assert_never

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.search.lattice import LatticeAxis
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.search.proposer import Reason

# Told rows: the GP's cost is cubic in them, and the loop waits for an ask; 0.25 s at 190.
GP_AT_MOST = 200
# Told rows that a rebuilt study shows the sampler: TPE's cost is linear in them, 85 ms at 10,000.
SHOWN_BEST, SHOWN_SPREAD = 100, 300
# Trials in a study, spent ones included.
REBUILD_AT = 1500
# Relative, of an out-of-memory whose size is unknown.
UNKNOWN_EXCESS = 0.05
# The constraint of a layout that fits; its true headroom is not known for every layout.
HEADROOM = -0.05


class OptunaProposals:
    """A `Sampler` that asks one of Optuna's.

    Scores are logarithms, lower is better; the sampler is shown them as negative throughputs.
    """

    def __init__(
        self,
        axes: Sequence[LatticeAxis],
        *,
        rank: Ints,
        seed: int,
        gp: bool,
    ) -> None:
        """`rank` decides between rows equally near to a proposal of Optuna's.

        Raises UsageInvalid when the GP's packages are not installed.
        """
        if gp:
            _require_gp()
        self._rank = rank
        self._axes = tuple(axes)
        self._gp = gp
        self._places = np.zeros((len(rank), 0))
        if axes:
            self._places = np.stack([axis.places[axis.steps] for axis in axes], axis=1)
        # Several rows have the same steps if they differ in nothing that is an axis.
        self._rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, steps in enumerate(zip(*(axis.steps.tolist() for axis in axes), strict=True)):
            self._rows_of.setdefault(steps, []).append(row)
        self._distributions = {axis.name: _distribution(axis) for axis in axes}
        self._told: dict[int, Outcome] = {}  # in the order of telling
        self._worst: float | None = None  # measured
        # Row under way -> the number of its running trial in the study.
        self._running: dict[int, int | None] = {}
        self._tpe_sampler = optuna.samplers.TPESampler(seed=seed)
        self._gp_sampler = optuna.samplers.GPSampler(seed=seed) if gp else None
        self._study: optuna.Study | None = None
        # Trials in the study, spent ones included.
        self._num_entries = 0

    def choose(self, open_rows: Mask) -> tuple[int, Reason] | None:
        if np.count_nonzero(open_rows) <= 1:
            return None
        study = self._ready()
        kind = "gp" if self._uses_gp else "tpe"
        # One proposal. With 1, 2, 3 of them, on 800 layouts, 90 trials, 8 runs: 138, 143, 132
        # proposals ran out of memory, and the best found is 97, 99, 95 % of the true best. That is
        # noise, and an ask is nearly all the sampler's time.
        with _one_torch_thread() if self._uses_gp else nullcontext():
            trial = study.ask(self._distributions)
        self._num_entries += 1
        proposed = tuple(int(trial.params[axis.name]) for axis in self._axes)
        # The row that is launched gets a running trial of its own (`start`).
        study.tell(trial, state=TrialState.FAIL)
        why = f"{kind} from {len(self._told)} told"
        for row in self._rows_of.get(proposed, []):
            if open_rows[row]:
                return row, why
        place = np.array(
            [axis.places[step] for axis, step in zip(self._axes, proposed, strict=True)]
        )
        # Among several at the same distance, the one with the best prediction is nearest.
        distance = np.abs(self._places - place).sum(axis=1) + 0.5 * self._rank / len(self._rank)
        distance[~open_rows] = np.inf
        return int(np.argmin(distance)), f"{why}, the nearest untried to its proposal"

    def start(self, row: int) -> None:
        # Others should keep some distance from it.
        self._running[row] = None
        if self._study is not None:
            self._add_running(row)

    def tell(self, row: int, outcome: Outcome) -> None:
        is_first = row not in self._told
        self._drop(row)
        self._told[row] = outcome
        if isinstance(outcome, Measured):
            score = outcome.score
            self._worst = score if self._worst is None else max(self._worst, score)
        if not is_first:
            self._study = None
        elif self._study is not None:
            self._add(self._finished(row, outcome))

    def forget(self, row: int) -> None:
        self._drop(row)
        if self._told.pop(row, None) is not None:
            self.rebuild(self._told, sorted(self._running))

    def _drop(self, row: int) -> None:
        """Note that a row is no longer under way."""
        number = self._running.pop(row, None)
        if self._study is not None and number is not None:
            # The row's result, if any, is a trial of its own.
            self._study.tell(number, state=TrialState.FAIL)

    def rebuild(self, told: Mapping[int, Outcome], under_way: Sequence[int]) -> None:
        self._told = dict(told)
        self._worst = max(self._scores().values(), default=None)
        self._running = dict.fromkeys(under_way)
        self._study = None

    @property
    def _uses_gp(self) -> bool:
        return self._gp and len(self._told) < GP_AT_MOST

    def _ready(self) -> optuna.Study:
        """The study, rebuilt once most of it is spent or no longer worth showing."""
        sampler = self._gp_sampler if self._uses_gp else self._tpe_sampler
        # The GP takes the worst value for what did not fit: it has to be today's worst.
        if (
            self._study is None
            or self._uses_gp
            or self._study.sampler is not sampler
            or self._num_entries > REBUILD_AT
        ):
            # It logs every study and trial; ours are a projection.
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            storage = optuna.storages.InMemoryStorage()
            self._study = optuna.create_study(
                storage=storage, sampler=sampler, direction=StudyDirection.MINIMIZE
            )
            self._num_entries = 0
            for row in self._shown():
                self._add(self._finished(row, self._told[row]))
            for row in list(self._running):
                self._add_running(row)
        return self._study

    def _shown(self) -> list[int]:
        """The told rows to show: all, or the best and an even spread over the rest, in order."""
        rows = list(self._told)
        if len(rows) <= SHOWN_BEST + SHOWN_SPREAD:
            return rows
        scores = self._scores()
        shown = set(sorted(scores, key=scores.__getitem__)[:SHOWN_BEST])
        rest = [row for row in rows if row not in shown]
        spread = np.linspace(0, len(rest) - 1, SHOWN_SPREAD).astype(int).tolist()
        shown |= {rest[i] for i in spread}
        return [row for row in rows if row in shown]

    def _add(self, trial: FrozenTrial) -> None:
        assert self._study is not None
        self._study.add_trial(trial)
        self._num_entries += 1

    def _add_running(self, row: int) -> None:
        self._running[row] = self._num_entries
        self._add(
            create_trial(
                state=TrialState.RUNNING,
                params=self._params(row),
                distributions=self._distributions,
            )
        )

    def _scores(self) -> dict[int, float]:
        """The scores of the rows that ran, in the order of telling."""
        return {row: one.score for row, one in self._told.items() if isinstance(one, Measured)}

    def _finished(self, row: int, outcome: Outcome) -> FrozenTrial:
        # The worst measured score replaces a missing one: a far worse one would hide what a GP
        # sees elsewhere.
        score = outcome.score if isinstance(outcome, Measured) else self._worst
        return create_trial(
            value=0.0 if score is None else -exp(-score),
            constraints={"infeasible": _excess(outcome)},
            params=self._params(row),
            distributions=self._distributions,
        )

    def _params(self, row: int) -> dict[str, int]:
        return {axis.name: int(axis.steps[row]) for axis in self._axes}


def _shown_excess(excess: float | None) -> float:
    """The constraint of an out-of-memory, above zero; the sampler prefers less of it."""
    return UNKNOWN_EXCESS if excess is None else max(excess, 1e-3)


def _excess(outcome: Outcome) -> float:
    match outcome:
        case Measured():
            return HEADROOM
        case OutOfMemory(excess=excess):
            return _shown_excess(excess)
        case Failed():
            return 1.0
        case _:
            assert_never(outcome)


def _distribution(axis: LatticeAxis) -> BaseDistribution:
    if axis.ordered:
        return IntDistribution(0, len(axis) - 1)
    return CategoricalDistribution(range(len(axis)))


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread: the GP's matrices are small, and running trials need the cores.

    Measured on 2 busy cores: 6 s an ask with threads, 0.25 s without.
    """
    import torch  # only the gp extra has it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _require_gp() -> None:
    missing = [name for name in ("scipy", "torch") if find_spec(name) is None]
    if missing:
        raise UsageInvalid(
            f"search.strategy gp needs {' and '.join(missing)}: "
            "pip install '.[gp]' in the cloned folder, or take tpe"
        )

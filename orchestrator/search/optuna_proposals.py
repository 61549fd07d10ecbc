"""Optuna's own samplers (TPE, Gaussian process) over the rows of a lattice, kept from proposing what is not open.

The study is a projection of what was told: it may be thrown away and rebuilt at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from math import exp

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.search.lattice import Axis, Ints
from orchestrator.core.search.proposer import Mask, Told

GP_AT_MOST = 200  # told rows: the GP's cost is cubic, and an ask holds up the loop; 0.25 s at 190
SHOWN_BEST, SHOWN_SPREAD = (
    100,
    300,
)  # told rows that a rebuilt study shows the sampler: TPE's cost is linear in them, 85 ms at 10,000
REBUILD_AT = 1500  # trials in a study, spent ones included
UNKNOWN_EXCESS = 0.05  # relative, of an out-of-memory that told no size
HEADROOM = (
    -0.05
)  # the constraint of what fits; its true headroom would say more, but is not known of every layout


class OptunaProposals:
    """What an Optuna sampler would measure next. It is shown throughputs, negative: scores are logarithms, and lower is better."""

    def __init__(self, axes: Sequence[Axis], num_rows: int, *, seed: int, gp: bool) -> None:
        """Raises UsageInvalid when the GP's packages are not installed."""
        if gp:
            _require_gp()
        optuna.logging.set_verbosity(
            optuna.logging.WARNING
        )  # it reports every study and trial; ours are a projection
        self._axes = tuple(axes)
        self._gp = gp
        self._places = (
            np.stack([axis.places[axis.steps] for axis in axes], axis=1)
            if axes
            else np.zeros((num_rows, 0))
        )
        self._rows_of: dict[
            tuple[int, ...], list[int]
        ] = {}  # several where rows differ in nothing that is an axis
        for row, steps in enumerate(zip(*(axis.steps.tolist() for axis in axes), strict=True)):
            self._rows_of.setdefault(steps, []).append(row)
        self._distributions = {axis.name: _distribution(axis) for axis in axes}
        self._told: dict[int, Told] = {}
        self._worst: float | None = None  # measured
        self._running: dict[
            int, int | None
        ] = {}  # row in flight -> number of the trial that stands in for it in the study
        self._tpe_sampler = optuna.samplers.TPESampler(seed=seed)
        self._gp_sampler = optuna.samplers.GPSampler(seed=seed) if gp else None
        self._study: optuna.Study | None = None
        self._num_entries = 0  # trials in the study, spent ones included

    def propose(self, open_rows: Mask, rank: Ints) -> tuple[int, str]:
        """Return an open row and the reason for it. `rank` decides between rows equally near to what was proposed."""
        study = self._ready()
        kind = "gp" if self._uses_gp else "tpe"
        # One proposal: measured on 800 layouts, 90 trials, 8 runs, with 1, 2, 3 of them 138, 143, 132 proposals ran out of memory and the
        # best found is 97, 99, 95 % of the true best: noise, while an ask is nearly all the sampler's time.
        with _one_torch_thread() if self._uses_gp else nullcontext():
            trial = study.ask(self._distributions)
        self._num_entries += 1
        proposed = tuple(int(trial.params[axis.name]) for axis in self._axes)
        # A proposal is not a trial: the row that is launched for it gets a running trial of its own (`hold`).
        study.tell(trial, state=TrialState.FAIL)
        for row in self._rows_of.get(proposed, []):
            if open_rows[row]:
                return row, f"{kind} from {len(self._told)} told"
        place = np.array(
            [axis.places[step] for axis, step in zip(self._axes, proposed, strict=True)]
        )
        # Of several at the same distance, the one with the better prediction.
        distance = np.abs(self._places - place).sum(axis=1) + 0.5 * rank / len(rank)
        distance[~open_rows] = np.inf
        return int(
            np.argmin(distance)
        ), f"{kind} from {len(self._told)} told, the nearest untried to what it proposes"

    def hold(self, row: int) -> None:
        """A row is in flight: others should keep some distance from it."""
        self._running[row] = None
        if self._study is not None:
            self._add_running(row)

    def tell(self, told: Told) -> None:
        self.drop(told.row)
        again = told.row in self._told
        self._told[told.row] = told
        if told.score is not None:
            self._worst = told.score if self._worst is None else max(self._worst, told.score)
        if again:
            self._study = None
        elif self._study is not None:
            self._add(self._finished(told))

    def drop(self, row: int) -> None:
        """A row is no longer in flight."""
        number = self._running.pop(row, None)
        if self._study is not None and number is not None:
            self._study.tell(
                number, state=TrialState.FAIL
            )  # of the stand-in: its result, if any, is a trial of its own

    def rebuild(self, told: Iterable[Told], in_flight: Iterable[int]) -> None:
        """Start again from what is known: the next proposal sees nothing else."""
        self._told = {one.row: one for one in told}
        self._worst = max(
            (one.score for one in self._told.values() if one.score is not None), default=None
        )
        self._running = dict.fromkeys(in_flight)
        self._study = None

    @property
    def _uses_gp(self) -> bool:
        return self._gp and len(self._told) < GP_AT_MOST

    def _ready(self) -> optuna.Study:
        """The study, rebuilt when it has grown by what is spent or no longer worth showing."""
        sampler = self._gp_sampler if self._uses_gp else self._tpe_sampler
        # The GP is told the worst value for what did not fit, and takes it for one: it has to be today's worst.
        if (
            self._study is None
            or self._uses_gp
            or self._study.sampler is not sampler
            or self._num_entries > REBUILD_AT
        ):
            storage = optuna.storages.InMemoryStorage()
            self._study = optuna.create_study(
                storage=storage, sampler=sampler, direction=StudyDirection.MINIMIZE
            )
            self._num_entries = 0
            for row in self._shown():
                self._add(self._finished(self._told[row]))
            for row in list(self._running):
                self._add_running(row)
        return self._study

    def _shown(self) -> list[int]:
        """The told rows that the sampler is shown: all, or the best and an even spread over the rest, in the order of telling."""
        rows = list(self._told)
        if len(rows) <= SHOWN_BEST + SHOWN_SPREAD:
            return rows
        measured = {row: one.score for row, one in self._told.items() if one.score is not None}
        best = set(sorted(measured, key=measured.__getitem__)[:SHOWN_BEST])
        rest = [row for row in rows if row not in best]
        chosen = best | {
            rest[i] for i in np.linspace(0, len(rest) - 1, SHOWN_SPREAD).astype(int).tolist()
        }
        return [row for row in rows if row in chosen]

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

    def _finished(self, told: Told) -> FrozenTrial:
        # What stands for a score where there is none: the worst measured. Something far worse would flatten what a GP sees of the rest.
        return create_trial(
            value=_negative_throughput(told.score if told.score is not None else self._worst),
            constraints={"infeasible": _excess(told)},
            params=self._params(told.row),
            distributions=self._distributions,
        )

    def _params(self, row: int) -> dict[str, int]:
        return {axis.name: int(axis.steps[row]) for axis in self._axes}


def _distribution(axis: Axis) -> BaseDistribution:
    return (
        IntDistribution(0, len(axis) - 1)
        if axis.ordered
        else CategoricalDistribution(range(len(axis)))
    )


def _negative_throughput(score: float | None) -> float:
    return 0.0 if score is None else -exp(-score)


def _excess(told: Told) -> float:
    """The constraint: above zero is infeasible, and the sampler prefers less of it."""
    if told.score is not None:
        return HEADROOM
    if told.out_of_memory:
        return max(told.excess, 1e-3) if told.excess is not None else UNKNOWN_EXCESS
    return 1.0


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The GP's matrices are small: beside running trials, torch's threads wait for each other (measured on 2 busy cores: 6 s an ask against 0.25)."""
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
            f"search.strategy gp needs {' and '.join(missing)}: pip install 'layout-sweep[gp]', or take tpe"
        )

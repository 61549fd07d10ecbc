"""Ask and tell: which layout of a cell to measure next, and what its outcome says about the others. The only importer of optuna.

The candidates are finite and enumerated. SQL is the truth: a Searcher is rebuilt from it with `replay`, and its Optuna study is a
projection that may be thrown away and rebuilt at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from importlib.util import find_spec
from math import isnan

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.core.dominance import needs_at_least
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.layout import Layout
from orchestrator.core.layout_table import COLUMNS, Ints, Mask
from orchestrator.core.planner import Candidates
from orchestrator.core.spec import Objective, Search, Strategy
from orchestrator.search_axes import Axis, free_axes

WALK_WITHOUT_BUDGET = 64  # `auto` walks a space of this size from best prediction to worst; a larger one is searched
HEAD_SHARE = 0.1  # of the budget `auto` spends on the best predictions before it lets TPE propose
HEAD_AT_LEAST = 5
HEAD_AT_MOST = 64
GP_AT_MOST = 200  # told layouts: the GP's cost is cubic, and an ask holds up the loop; 0.25 s at 190
SHOWN_BEST, SHOWN_SPREAD = 100, 300  # told layouts that a rebuilt study shows the sampler: TPE's cost is linear in them, 85 ms at 10,000
REBUILD_AT = 1500  # trials in a study, spent ones included
UNKNOWN_EXCESS = 0.05  # relative, of an out-of-memory that told no size
HEADROOM = -0.05  # the constraint of what fits; its true headroom would say more, but is not known of every layout


@dataclass(frozen=True, kw_only=True)
class Measured:
    value: float  # of the sweep's objective


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    excess: float | None = None  # how far over the limit, relative to it; None where unknown


@dataclass(frozen=True, kw_only=True)
class Failed:
    """By the layout's or the code's fault. The machine's fault is not told: `Searcher.forget`."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Asked for, and neither told nor forgotten yet."""


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """Needs at least the memory of a layout that was out of it; never launched."""


Outcome = Measured | OutOfMemory | Failed
Known = Outcome | InFlight | Condemned


@dataclass(frozen=True, kw_only=True)
class Proposal:
    layout: Layout
    why: str  # one line, for people
    predicted_tokens_per_second_per_gpu: float | None
    predicted_memory_bytes: int | None


class _Status(IntEnum):
    UNTRIED = 0
    IN_FLIGHT = 1
    TOLD = 2
    CONDEMNED = 3


class Searcher:
    """The search over one cell's candidates. Several asks may be outstanding; no layout is asked twice unless it is forgotten."""

    def __init__(self, candidates: Candidates, *, search: Search, objective: Objective, num_layers: int, sequence: int = 0) -> None:
        """`num_layers` is the model's; `sequence` tells the cells of a sweep apart, so that each has random numbers of its own.

        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        if search.strategy is Strategy.GP:
            _require_gp()
        self._candidates = candidates
        self._num_layers = num_layers
        self._status = np.full(len(candidates), _Status.UNTRIED, dtype=np.int8)
        self._rows = {candidates.table.layout(row): row for row in range(len(candidates))}
        self._outcomes: dict[int, Outcome] = {}  # by row, in the order of telling
        self._rank = np.empty(len(candidates), dtype=np.int64)
        self._rank[candidates.order] = np.arange(len(candidates))
        seed = np.random.SeedSequence((search.seed, sequence))
        self._shuffled = np.random.default_rng(seed).permutation(len(candidates)).astype(np.int64)
        self._strategy = search.strategy
        self._num_first = _num_walked_first(search, len(candidates))
        self._sampler: _Sampler | None = None
        if self._num_first < len(candidates) and search.strategy is not Strategy.RANDOM:
            gp = search.strategy is Strategy.GP
            self._sampler = _Sampler(candidates, num_layers, objective, seed=int(seed.generate_state(1)[0]), gp=gp)

    def knows(self, layout: Layout) -> bool:
        """Whether the layout is one of the candidates."""
        return layout in self._rows

    @property
    def untried(self) -> int:
        return self._count(_Status.UNTRIED)

    @property
    def in_flight(self) -> int:
        return self._count(_Status.IN_FLIGHT)

    @property
    def told(self) -> int:
        return self._count(_Status.TOLD)

    @property
    def condemned(self) -> int:
        return self._count(_Status.CONDEMNED)

    def ask(self) -> Proposal | None:
        """Propose a layout and hold it in flight; None when every one is told, in flight or condemned."""
        open_rows = self._status == _Status.UNTRIED
        num_open = int(open_rows.sum())
        if num_open == 0:
            return None
        if self._strategy is Strategy.RANDOM:
            row = int(self._shuffled[np.argmax(open_rows[self._shuffled])])
            why = f"random among {num_open} untried"
        elif self._sampler is None or num_open == 1 or self.in_flight + self.told < self._num_first:
            row = int(self._candidates.order[np.argmax(open_rows[self._candidates.order])])
            why = ""
        else:
            row, why = self._sampler.propose(open_rows, self._rank)
        self._hold(row)
        return self._proposal(row, f"{why}; {self._ranked(row)}" if why else self._ranked(row))

    def tell(self, layout: Layout, outcome: Outcome, *, proves: bool = True) -> list[Layout]:
        """Record how a layout ended. Returns the untried layouts that an out-of-memory condemns, if it `proves` so: they are not asked for."""
        row = self._rows.get(layout)
        if row is not None:
            self._status[row] = _Status.TOLD
            self._outcomes[row] = outcome
            if self._sampler is not None:
                self._sampler.tell(row, outcome)
        if not isinstance(outcome, OutOfMemory) or not proves:
            return []
        return [self._candidates.table.layout(r) for r in self._condemn(layout)]

    def replay(self, known: Iterable[tuple[Layout, Known]]) -> dict[Layout, Layout]:
        """Rebuild the state from the store. Returns what its out-of-memories condemn beyond what it knew: layout -> the one that proves it.

        A layout that is no candidate (the axes were narrowed since) is not counted, but its out-of-memory condemns candidates all the same.
        """
        self._status[:] = _Status.UNTRIED
        self._outcomes.clear()
        proofs = []
        for layout, fact in known:
            if isinstance(fact, OutOfMemory):
                proofs.append(layout)
            row = self._rows.get(layout)
            if row is None:
                continue
            match fact:
                case InFlight():
                    self._status[row] = _Status.IN_FLIGHT
                case Condemned():
                    self._status[row] = _Status.CONDEMNED
                case Measured() | OutOfMemory() | Failed():
                    self._status[row] = _Status.TOLD
                    self._outcomes[row] = fact
        condemned = {self._candidates.table.layout(row): proof for proof in self._weakest(proofs) for row in self._condemn(proof)}
        if self._sampler is not None:
            self._sampler.rebuild(self._outcomes, np.flatnonzero(self._status == _Status.IN_FLIGHT).tolist())
        return condemned

    def forget(self, layout: Layout) -> None:
        """Put a layout back to untried: its attempts ended by the machine's fault, or its result was invalidated."""
        row = self._rows.get(layout)
        if row is None:
            return
        self._status[row] = _Status.UNTRIED
        was_told = self._outcomes.pop(row, None) is not None
        if self._sampler is None:
            return
        if was_told:
            self._sampler.rebuild(self._outcomes, np.flatnonzero(self._status == _Status.IN_FLIGHT).tolist())
        else:
            self._sampler.drop(row)

    def _count(self, status: _Status) -> int:
        return int((self._status == status).sum())

    def _hold(self, row: int) -> None:
        self._status[row] = _Status.IN_FLIGHT
        if self._sampler is not None:
            self._sampler.hold(row)

    def _condemn(self, proof: Layout) -> list[int]:
        needing = needs_at_least(self._candidates.table, proof, num_layers=self._num_layers)
        rows = np.flatnonzero(needing & (self._status == _Status.UNTRIED))
        self._status[rows] = _Status.CONDEMNED
        return [int(row) for row in rows]

    def _weakest(self, proofs: list[Layout]) -> Iterator[Layout]:
        """The proofs that none before them implies: what needs more than they do condemns nothing that they do not."""
        ruled_out = np.zeros(len(self._candidates), dtype=np.bool_)
        for proof in sorted(proofs, key=lambda p: (p.micro_batch_size, -p.zero_stage)):
            if (row := self._rows.get(proof)) is None or not ruled_out[row]:
                ruled_out |= needs_at_least(self._candidates.table, proof, num_layers=self._num_layers)
                yield proof

    def _proposal(self, row: int, why: str) -> Proposal:
        tokens, memory = self._candidates.tokens_per_second_per_gpu[row], self._candidates.memory_bytes[row]
        return Proposal(
            layout=self._candidates.table.layout(row),
            why=why,
            predicted_tokens_per_second_per_gpu=None if isnan(tokens) else float(tokens),
            predicted_memory_bytes=None if isnan(memory) else int(memory),
        )

    def _ranked(self, row: int) -> str:
        candidates = self._candidates
        facts = []
        if not isnan(candidates.tokens_per_second_per_gpu[row]):
            facts.append(f"{candidates.tokens_per_second_per_gpu[row]:,.0f} tokens/s/GPU")
        if not isnan(candidates.memory_bytes[row]):
            limit = "" if candidates.memory_limit_bytes is None else f" of {candidates.memory_limit_bytes / 2**30:.1f}"
            facts.append(f"{candidates.memory_bytes[row] / 2**30:.1f}{limit} GiB")
        if not candidates.fits[row]:
            facts.append("predicted not to fit")
        return f"prediction ranks it {int(self._rank[row]) + 1} of {len(candidates)}" + (f": {', '.join(facts)}" if facts else "")


def export_study(url: str, name: str, known: Iterable[tuple[Layout, Known]], *, objective: Objective) -> int:
    """Copy a cell's layouts into an Optuna storage, for optuna-dashboard. Returns how many. Raises UsageInvalid when the name is taken."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = _direction(objective)
    rows = [(layout, fact) for layout, fact in known if not isinstance(fact, InFlight)]
    distributions: dict[str, BaseDistribution] = {
        axis: CategoricalDistribution(sorted({_readable(layout, axis) for layout, _ in rows}, key=lambda v: (isinstance(v, str), v)))
        for axis in COLUMNS
        if rows
    }
    worst = _worst((fact for _, fact in rows), direction)
    trials = [
        create_trial(
            value=_shown_value(fact, worst),
            constraints={"infeasible": _excess(fact)},
            params={axis: _readable(layout, axis) for axis in COLUMNS},
            distributions=distributions,
            user_attrs={"layout": layout.key, "outcome": type(fact).__name__},
        )
        for layout, fact in rows
    ]
    try:
        study = optuna.create_study(storage=url, study_name=name, direction=direction)
    except optuna.exceptions.DuplicatedStudyError as exc:
        raise UsageInvalid(f"a study {name!r} is in that storage already: export under another name, or delete it there") from exc
    except (SQLAlchemyError, ImportError) as exc:
        # The cause, without the URL: it may hold a password.
        cause = str(getattr(exc, "orig", None) or exc).splitlines()[0]
        raise UsageInvalid(f"no Optuna study can be written there: {cause}. Expected a URL such as sqlite:///optuna.db") from exc
    study.add_trials(trials)
    return len(trials)


class _Sampler:
    """An Optuna sampler over the candidates' axes, kept from proposing what is not legal, known, or condemned."""

    def __init__(self, candidates: Candidates, num_layers: int, objective: Objective, *, seed: int, gp: bool) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it reports every study and trial; ours are a projection
        self._axes = free_axes(candidates.table, num_layers=num_layers)
        self._direction = _direction(objective)
        self._gp = gp
        self._seed = seed
        self._places = np.stack([axis.places[axis.steps] for axis in self._axes], axis=1) if self._axes else np.zeros((len(candidates), 0))
        self._row_of = {steps: row for row, steps in enumerate(zip(*(axis.steps.tolist() for axis in self._axes), strict=True))}
        self._distributions = {axis.name: _distribution(axis) for axis in self._axes}
        self._outcomes: dict[int, Outcome] = {}
        self._worst: float | None = None  # measured
        self._running: dict[int, int | None] = {}  # row in flight -> number of the trial that stands in for it in the study
        self._tpe_sampler = optuna.samplers.TPESampler(seed=seed)
        self._gp_sampler = optuna.samplers.GPSampler(seed=seed) if gp else None
        self._study: optuna.Study | None = None
        self._num_entries = 0  # trials in the study, spent ones included

    def propose(self, open_rows: Mask, rank: Ints) -> tuple[int, str]:
        """Return an open row and the reason for it."""
        study = self._ready()
        kind = "gp" if self._uses_gp else "tpe"
        # One proposal: measured on 800 layouts, 90 trials, 8 runs, with 1, 2, 3 of them 138, 143, 132 proposals ran out of memory and the
        # best found is 97, 99, 95 % of the true best: noise, while an ask is nearly all the sampler's time.
        with _one_torch_thread() if self._uses_gp else nullcontext():
            trial = study.ask(self._distributions)
        self._num_entries += 1
        proposed = tuple(int(trial.params[axis.name]) for axis in self._axes)
        # A proposal is not a trial: the layout that is launched for it gets a running trial of its own (`hold`).
        study.tell(trial, state=TrialState.FAIL)
        row = self._row_of.get(proposed)
        if row is not None and open_rows[row]:
            return row, f"{kind} from {len(self._outcomes)} told"
        place = np.array([axis.places[step] for axis, step in zip(self._axes, proposed, strict=True)])
        # Of several at the same distance, the one with the better prediction.
        distance = np.abs(self._places - place).sum(axis=1) + 0.5 * rank / len(rank)
        distance[~open_rows] = np.inf
        return int(np.argmin(distance)), f"{kind} from {len(self._outcomes)} told, the nearest untried to what it proposes"

    def hold(self, row: int) -> None:
        """A layout is in flight: others should keep some distance from it."""
        self._running[row] = None
        if self._study is not None:
            self._add_running(row)

    def tell(self, row: int, outcome: Outcome) -> None:
        self.drop(row)
        self._outcomes[row] = outcome
        if isinstance(outcome, Measured):
            self._worst = outcome.value if self._worst is None else _worse(self._worst, outcome.value, self._direction)
        if self._study is not None:
            self._add(self._finished(row, outcome))

    def drop(self, row: int) -> None:
        """A layout is no longer in flight."""
        number = self._running.pop(row, None)
        if self._study is not None and number is not None:
            self._study.tell(number, state=TrialState.FAIL)  # of the stand-in: its result, if any, is a trial of its own

    def rebuild(self, outcomes: dict[int, Outcome], in_flight: Sequence[int]) -> None:
        """Start again from what is known: the next proposal sees nothing else."""
        self._outcomes = dict(outcomes)
        self._worst = _worst(outcomes.values(), self._direction)
        self._running = dict.fromkeys(in_flight)
        self._study = None

    @property
    def _uses_gp(self) -> bool:
        return self._gp and len(self._outcomes) < GP_AT_MOST

    def _ready(self) -> optuna.Study:
        """The study, rebuilt when it has grown by what is spent or no longer worth showing."""
        sampler = self._gp_sampler if self._uses_gp else self._tpe_sampler
        # The GP is told the worst value for what did not fit, and takes it for one: it has to be today's worst.
        if self._study is None or self._uses_gp or self._study.sampler is not sampler or self._num_entries > REBUILD_AT:
            self._study = optuna.create_study(storage=optuna.storages.InMemoryStorage(), sampler=sampler, direction=self._direction)
            self._num_entries = 0
            for row in self._shown():
                self._add(self._finished(row, self._outcomes[row]))
            for row in list(self._running):
                self._add_running(row)
        return self._study

    def _shown(self) -> list[int]:
        """The told rows that the sampler is shown: all, or the best and an even spread over the rest, in the order of telling."""
        rows = list(self._outcomes)
        if len(rows) <= SHOWN_BEST + SHOWN_SPREAD:
            return rows
        sign = -1 if self._direction is StudyDirection.MAXIMIZE else 1
        measured = {row: sign * fact.value for row, fact in self._outcomes.items() if isinstance(fact, Measured)}
        best = set(sorted(measured, key=measured.__getitem__)[:SHOWN_BEST])
        rest = [row for row in rows if row not in best]
        chosen = best | {rest[i] for i in np.linspace(0, len(rest) - 1, SHOWN_SPREAD).astype(int).tolist()}
        return [row for row in rows if row in chosen]

    def _add(self, trial: FrozenTrial) -> None:
        assert self._study is not None
        self._study.add_trial(trial)
        self._num_entries += 1

    def _add_running(self, row: int) -> None:
        self._running[row] = self._num_entries
        self._add(create_trial(state=TrialState.RUNNING, params=self._params(row), distributions=self._distributions))

    def _finished(self, row: int, outcome: Outcome) -> FrozenTrial:
        return create_trial(
            value=_shown_value(outcome, self._worst),
            constraints={"infeasible": _excess(outcome)},
            params=self._params(row),
            distributions=self._distributions,
        )

    def _params(self, row: int) -> dict[str, int]:
        return {axis.name: int(axis.steps[row]) for axis in self._axes}


def _distribution(axis: Axis) -> BaseDistribution:
    return IntDistribution(0, len(axis) - 1) if axis.ordered else CategoricalDistribution(range(len(axis)))


def _num_walked_first(search: Search, num_candidates: int) -> int:
    """How many layouts are taken best prediction first, before a sampler proposes."""
    match search.strategy:
        case Strategy.EXHAUSTIVE:
            return num_candidates
        case Strategy.AUTO if num_candidates <= (search.max_trials or WALK_WITHOUT_BUDGET):
            return num_candidates
        case Strategy.AUTO:
            share = int(HEAD_SHARE * min(search.max_trials or num_candidates, num_candidates))
            return min(num_candidates, max(HEAD_AT_LEAST, min(HEAD_AT_MOST, share)))
        case _:
            return 0


def _direction(objective: Objective) -> StudyDirection:
    return StudyDirection.MINIMIZE if objective is Objective.STEP_SECONDS else StudyDirection.MAXIMIZE


def _excess(fact: Known) -> float:
    """The constraint: above zero is infeasible, and the sampler prefers less of it."""
    match fact:
        case Measured() | InFlight():
            return HEADROOM
        case OutOfMemory(excess=excess):
            return max(excess, 1e-3) if excess is not None else UNKNOWN_EXCESS
        case Failed():
            return 1.0
        case Condemned():
            return UNKNOWN_EXCESS


def _worst(facts: Iterable[Known], direction: StudyDirection) -> float | None:
    values = [fact.value for fact in facts if isinstance(fact, Measured)]
    return reduce(lambda a, b: _worse(a, b, direction), values) if values else None


def _worse(a: float, b: float, direction: StudyDirection) -> float:
    return min(a, b) if direction is StudyDirection.MAXIMIZE else max(a, b)


def _shown_value(fact: Known, worst: float | None) -> float:
    """What stands for a value where there is none: the worst measured. A zero among thousands would flatten what a GP sees of the rest."""
    return fact.value if isinstance(fact, Measured) else worst or 0.0


def _readable(layout: Layout, axis: str) -> int | str:
    value = getattr(layout, axis)
    return value if isinstance(value, int) else str(value)


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
        raise UsageInvalid(f"search.strategy gp needs {' and '.join(missing)}: pip install 'layout-sweep[gp]', or take tpe")

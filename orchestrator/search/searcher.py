"""Ask and tell: which layout of a cell to measure next, and what its outcome says about the others.

The candidates are finite and enumerated. SQL is the truth: a Searcher is rebuilt from it with `replay`. Layouts only: rows, models and
Optuna's samplers are in row_searcher.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import exp, inf, isnan, log

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import create_trial
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.core.errors import UsageInvalid
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import COLUMNS, Ints, Mask
from orchestrator.core.problem.proofs import Dominance, MemoryProof, Proofs
from orchestrator.core.search.planner import Candidates
from orchestrator.core.search.proposer import Choice, Told
from orchestrator.core.sweepfile.sections import Objective, Search
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.search.axes import free_axes, lattice_of
from orchestrator.search.optuna_proposals import HEADROOM, UNKNOWN_EXCESS
from orchestrator.search.row_searcher import Asked, RowSearcher, RowStatus

CORRECTED_FROM = 0.02  # of the logarithm: a smaller correction is within what runs vary by


@dataclass(frozen=True, kw_only=True)
class Measured:
    value: float  # of the sweep's objective; where it is no positive number, nothing is learned of it, and it is not asked for again
    peak_memory_bytes: float | None = None  # as the prediction counts it; None: not read


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    excess: float | None = None  # how far over the limit, relative to it; None where unknown
    # Attempts whose failure proves that the layout does not fit. 0: the cause may be another.
    num_proofs: int = 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """By the layout's or the code's fault. The machine's fault is not told: `Searcher.forget`."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Asked for, and neither told nor forgotten yet."""


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """Needs at least the memory of layouts that were out of it; never launched."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A trial that told us nothing: it is not proposed again."""


Outcome = Measured | OutOfMemory | Failed
Known = Outcome | InFlight | Condemned | SetAside


@dataclass(frozen=True, kw_only=True)
class Proposal:
    layout: Layout
    why: str  # one line, for people
    predicted_tokens_per_second_per_gpu: float | None
    predicted_memory_bytes: int | None
    predicted_step: PredictedStep | None = None  # None: of this device nothing is predicted


@dataclass(frozen=True, kw_only=True)
class DoubtfulResult:
    """A measured layout to measure once more."""

    layout: Layout
    why: str


class Searcher:
    """The search over one cell's candidates. Several asks may be outstanding; no layout is asked twice unless it is forgotten."""

    def __init__(
        self,
        candidates: Candidates,
        *,
        search: Search,
        objective: Objective,
        num_layers: int,
        sequence: int = 0,
        launch_seconds: float | None = None,
        steps_per_trial: float | None = None,
        dominance: Dominance = Dominance.TRUSTED,
    ) -> None:
        """`num_layers` is the model's; `sequence` tells the cells of a sweep apart, so that each has random numbers of its own.
        `dominance` says how many out-of-memories prove that what needs as much memory cannot run.

        `launch_seconds` (of a trial beside its steps) and `steps_per_trial` are what a trial costs here; None: what is usual.
        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        self._candidates = candidates
        self._num_layers = num_layers
        self._objective = objective
        self._of_layout = {layout: row for row, layout in enumerate(candidates.table.layouts())}
        self._rows = RowSearcher(
            order=candidates.order,
            lattice=partial(lattice_of, candidates, num_layers=num_layers),
            sampled=free_axes(candidates.table, num_layers=num_layers),
            search=search,
            sequence=sequence,
            memory=candidates.memory_bytes,
            launch_seconds=launch_seconds,
            steps_per_trial=steps_per_trial,
        )
        self._scale = _scale(candidates)
        self._doubted: set[int] = set()
        self._step_log_sd = candidates.step_log_sd()
        self._proofs = Proofs(candidates.table, num_layers=num_layers, dominance=dominance)
        self._ruled_out: Mask = self._proofs.ruled_out
        self._freed: list[Layout] = []
        self._set_aside: set[int] = set()  # rows that no proof frees

    def knows(self, layout: Layout) -> bool:
        """Whether the layout is one of the candidates."""
        return layout in self._of_layout

    def predicted_step(self, layout: Layout) -> PredictedStep | None:
        """The step time predicted when the search began. None: nothing is predicted."""
        row = self._of_layout.get(layout)
        return None if row is None or self._step_log_sd is None else self._predicted_step(row, None)

    @property
    def untried(self) -> int:
        return self._rows.count(RowStatus.UNTRIED)

    @property
    def in_flight(self) -> int:
        return self._rows.count(RowStatus.IN_FLIGHT)

    @property
    def told(self) -> int:
        return self._rows.count(RowStatus.TOLD)

    @property
    def condemned(self) -> int:
        return self._rows.count(RowStatus.CONDEMNED)

    def ask(self) -> Proposal | None:
        """Propose a layout and hold it in flight; None when every one is told, in flight or condemned."""
        asked = self._rows.ask()
        return None if asked is None else self._proposal(asked)

    def tell(self, layout: Layout, outcome: Outcome) -> list[Layout]:
        """Record how a layout ended; of one measured again, what it comes to now.

        Returns the untried layouts that an out-of-memory condemns: they are not asked for. What a measurement frees, `take_freed` tells.
        """
        row = self._of_layout.get(layout)
        if row is not None and _says_nothing(outcome):
            self._rows.set_aside(row)
            self._set_aside.add(row)
        elif row is not None:
            self._rows.tell(self._told(row, outcome))
        match outcome:
            case OutOfMemory(num_proofs=num) if num:
                self._proofs.add(_proof(layout, outcome))
                return [self._candidates.table.layout(r) for r in self._condemn()]
            case Measured() if row is not None and self._proofs.ran(row):
                self._free(np.flatnonzero(self._ruled_out & ~self._proofs.ruled_out))
                self._condemn()
        return []

    def proofs_of(self, layout: Layout) -> tuple[MemoryProof, ...]:
        """The out-of-memories that condemn a layout: one, or two that agree."""
        return self._proofs.of(self._of_layout[layout])

    def take_freed(self) -> list[Layout]:
        """Layouts that were condemned, and are not any more, since this was last asked: what condemned them is contradicted or withdrawn."""
        freed, self._freed = self._freed, []
        return freed

    def correct(self, layout: Layout, value: float) -> None:
        """A measured layout has this objective, as the machine is now; what differs by no more than noise is left as it was told."""
        row = self._of_layout.get(layout)
        told = self._rows.told.get(row) if row is not None else None
        if row is None or told is None or told.score is None:
            return
        score = self._told(row, Measured(value=value)).score
        assert score is not None, "a measured layout has a score"
        if abs(score - told.score) > CORRECTED_FROM:
            self._rows.tell(replace(told, score=score))

    def replay(self, known: Iterable[tuple[Layout, Known]]) -> dict[Layout, Layout]:
        """Rebuild the state from the store. Returns what its out-of-memories condemn beyond what it knew: layout -> the one that proves it.

        A layout that is no candidate (the axes were narrowed since) is not counted, but its out-of-memory condemns candidates all the same.
        """
        told: dict[int, Told] = {}
        in_flight, was_condemned, set_aside, ran, proofs = [], [], [], [], []
        for layout, fact in known:
            if isinstance(fact, OutOfMemory) and fact.num_proofs:
                proofs.append(_proof(layout, fact))
            row = self._of_layout.get(layout)
            if row is None:
                continue
            if isinstance(fact, Measured):
                ran.append(row)
            match fact:
                case InFlight():
                    in_flight.append(row)
                case Condemned():
                    was_condemned.append(row)
                case SetAside():
                    set_aside.append(row)
                case Measured() if _says_nothing(fact):
                    set_aside.append(row)
                case Measured() | OutOfMemory() | Failed():
                    told[row] = self._told(row, fact)
        self._rows.rebuild(told.values(), in_flight=in_flight, condemned=set_aside)
        self._set_aside = set(set_aside)
        self._proofs.replace(proofs, np.array(ran, dtype=np.int64))
        table, known_before = self._candidates.table, set(was_condemned)
        self._ruled_out = np.zeros(len(table), dtype=np.bool_)
        found = self._condemn()
        self._freed = [table.layout(row) for row in was_condemned if not self._ruled_out[row]]
        return {
            table.layout(row): self._proofs.of(row)[0].layout
            for row in found
            if row not in known_before
        }

    def forget(self, layout: Layout) -> None:
        """Put a layout back to untried: its attempts ended by the machine's fault, or its result was invalidated."""
        row = self._of_layout.get(layout)
        if row is not None:
            self._rows.forget(row)

    def again(self) -> DoubtfulResult | None:
        """A measured layout that its neighbours contradict, where it would matter: to be measured once more before it is believed.

        Each layout at most once. Tell what it comes to: it takes the place of what was told before.
        """
        found = self._rows.doubtful(but=self._doubted)
        if found is None:
            return None
        row, said = found
        self._doubted.add(row)
        was = self._rows.told[row].score
        assert was is not None
        return DoubtfulResult(
            layout=self._candidates.table.layout(row),
            why=f"measured {self._in_words(was)}, where its neighbours say {self._in_words(said)}: once more before it is believed",
        )

    def expected_gain(self) -> float | None:
        """The most that an untried layout is expected to gain over the best, relative; None: the strategy has no model, or nothing has run yet."""
        return self._rows.expected_gain()

    def nothing_fits(self) -> str | None:
        """The evidence that no layout of the cell fits, or None: nothing was measured, and what needs least ran out of memory."""
        row = self._rows.hopeless()
        if row is None:
            return None
        layout, limit = self._candidates.table.layout(row), self._candidates.memory_limit_bytes
        room = f" of {limit / 2**30:.1f} GiB" if limit is not None else ""
        match sum(told.out_of_memory for told in self._rows.told.values()) - 1:
            case 0:
                others = ""
            case 1:
                others = ", and so did 1 other"
            case num:
                others = f", and so did {num} others"
        return f"{layout.short}, predicted to need least, ran out of memory{room}{others}; none was measured"

    def _condemn(self) -> list[int]:
        """Set aside what the proofs rule out by now. The rows that were untried."""
        self._ruled_out = self._proofs.ruled_out
        return self._rows.condemn(self._ruled_out)

    def _free(self, rows: Ints) -> None:
        """Put rows that no proof rules out any more back to untried."""
        rows = np.array([row for row in rows if row not in self._set_aside], dtype=np.int64)
        self._freed += [self._candidates.table.layout(row) for row in self._rows.free(rows)]

    # -- scores: logarithms of the seconds of a step, or of what stands for them ------------------------------------------------

    def _told(self, row: int, outcome: Outcome) -> Told:
        match outcome:
            case Measured(value=value, peak_memory_bytes=peak):
                score = (
                    log(value)
                    if self._objective is Objective.STEP_SECONDS
                    else log(self._scale / value)
                )
                return Told(row=row, score=score, peak_memory_bytes=peak)
            case OutOfMemory(excess=excess):
                return Told(row=row, out_of_memory=True, excess=excess)
            case Failed():
                return Told(row=row)

    def _in_words(self, score: float) -> str:
        if self._objective is Objective.STEP_SECONDS:
            return f"{exp(score):,.3g} s a step"
        value = self._scale / exp(score)
        return f"{value:,.0f} tokens/s/GPU" if value >= 100 else f"{value:,.3g} tokens/s/GPU"

    # -- what is said of a proposal -----------------------------------------------------------------------------------------------

    def _proposal(self, asked: Asked) -> Proposal:
        row = asked.row
        tokens, memory = (
            float(self._candidates.tokens_per_second_per_gpu[row]),
            float(self._candidates.memory_bytes[row]),
        )
        if asked.choice is not None:
            why = self._expected(asked.choice, asked.row)
            # Also of a device that nothing was predicted of at first, once neighbours that were measured tell: it is what the words say.
            told = not isnan(tokens) or asked.choice.improvement is not None
            if (
                asked.choice.score is not None
                and self._objective is not Objective.STEP_SECONDS
                and told
            ):
                tokens = self._scale / exp(asked.choice.score)
            if asked.choice.memory_bytes is not None and not isnan(memory):
                memory = asked.choice.memory_bytes
        else:
            why = f"{asked.why}; {self._ranked(row)}" if asked.why else self._ranked(row)
        return Proposal(
            layout=self._candidates.table.layout(row),
            why=why,
            predicted_tokens_per_second_per_gpu=None if isnan(tokens) else tokens,
            predicted_memory_bytes=None if isnan(memory) else int(memory),
            predicted_step=self._predicted_step(row, asked.choice),
        )

    def _predicted_step(self, row: int, choice: Choice | None) -> PredictedStep | None:
        """The step time by physics, or by the search's model where trials of the cell show that it takes longer."""
        if self._step_log_sd is None:
            return None
        seconds, log_sd = float(self._candidates.step_seconds[row]), self._step_log_sd
        if choice is not None and choice.score is not None and exp(choice.score) > seconds:
            seconds, log_sd = exp(choice.score), max(choice.score_sd, log_sd)
        return PredictedStep(seconds=seconds, log_sd=log_sd)

    def _expected(self, choice: Choice, row: int) -> str:
        """As `auto` sees it: predicted 9,800 tokens/s/GPU (6 % better than the best so far), 71.0 of 79.0 GiB, 93 % likely to fit."""
        if choice.score is None:
            return "far from all that is known; nothing is predicted yet"
        if choice.improvement is None and isnan(self._candidates.step_seconds[row]):
            return "the least work per token; nothing is predicted of this device yet"
        facts = [
            f"predicted {self._in_words(choice.score)}, give or take a factor of {exp(choice.score_sd):.2f}"
        ]
        if choice.improvement is not None:
            gain = (
                exp(choice.improvement) - 1
                if self._objective is not Objective.STEP_SECONDS
                else 1 - exp(-choice.improvement)
            )
            facts[0] += (
                f" ({abs(gain):.0%} {'better' if gain > 0 else 'worse'} than the best so far)"
            )
        limit = self._candidates.memory_limit_bytes
        if choice.memory_bytes is not None and limit is not None:
            facts.append(f"{choice.memory_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB")
        if choice.fits is not None:
            facts.append(f"{choice.fits:.0%} likely to fit")
        if choice.fails > 0.15:
            facts.append(f"{choice.fails:.0%} likely to fail as its like did")
        return ", ".join(facts)

    def _ranked(self, row: int) -> str:
        candidates = self._candidates
        facts = []
        if not isnan(candidates.tokens_per_second_per_gpu[row]):
            facts.append(f"{candidates.tokens_per_second_per_gpu[row]:,.0f} tokens/s/GPU")
        if not isnan(candidates.memory_bytes[row]):
            limit = (
                ""
                if candidates.memory_limit_bytes is None
                else f" of {candidates.memory_limit_bytes / 2**30:.1f}"
            )
            facts.append(f"{candidates.memory_bytes[row] / 2**30:.1f}{limit} GiB")
        if not candidates.fits[row]:
            facts.append("predicted not to fit")
        return f"prediction ranks it {int(self._rows.rank[row]) + 1} of {len(candidates)}" + (
            f": {', '.join(facts)}" if facts else ""
        )


def export_study(
    url: str, name: str, known: Iterable[tuple[Layout, Known]], *, objective: Objective
) -> int:
    """Copy a cell's layouts into an Optuna storage, for optuna-dashboard. Returns how many. Raises UsageInvalid when the name is taken."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = _direction(objective)
    rows = [(layout, fact) for layout, fact in known if not isinstance(fact, InFlight)]
    told = [_params(layout) for layout, _ in rows]
    distributions: dict[str, BaseDistribution] = {
        axis: CategoricalDistribution(
            sorted(
                {params[axis] for params in told if axis in params},
                key=lambda v: (isinstance(v, str), v),
            )
        )
        for axis in dict.fromkeys(axis for params in told for axis in params)
    }
    worst = _worst((fact for _, fact in rows), direction)
    trials = [
        create_trial(
            value=_shown_value(fact, worst),
            constraints={"infeasible": _excess(fact)},
            params=params,
            distributions={axis: distributions[axis] for axis in params},
            user_attrs={"layout": layout.key, "outcome": type(fact).__name__},
        )
        for (layout, fact), params in zip(rows, told, strict=True)
    ]
    try:
        study = optuna.create_study(storage=url, study_name=name, direction=direction)
    except optuna.exceptions.DuplicatedStudyError as exc:
        raise UsageInvalid(
            f"a study {name!r} is in that storage already: export under another name, or delete it there"
        ) from exc
    except (SQLAlchemyError, ImportError) as exc:
        # The cause, without the URL: it may hold a password.
        cause = str(getattr(exc, "orig", None) or exc).splitlines()[0]
        raise UsageInvalid(
            f"no Optuna study can be written there: {cause}. Expected a URL such as sqlite:///optuna.db"
        ) from exc
    study.add_trials(trials)
    return len(trials)


def _proof(layout: Layout, outcome: OutOfMemory) -> MemoryProof:
    return MemoryProof(
        layout=layout, num_attempts=outcome.num_proofs, is_measured=outcome.excess is not None
    )


def _says_nothing(outcome: Outcome) -> bool:
    """Whether it was measured and the number is none: of a clock that stood still, 0 or infinite."""
    return isinstance(outcome, Measured) and not 0 < outcome.value < inf


def _scale(candidates: Candidates) -> float:
    """Seconds of a step times tokens per second and GPU: the same for every layout of a cell; 1 where nothing is predicted."""
    products = candidates.step_seconds * candidates.tokens_per_second_per_gpu
    known = products[np.isfinite(products)]
    return float(known[0]) if len(known) else 1.0


def _direction(objective: Objective) -> StudyDirection:
    return (
        StudyDirection.MINIMIZE if objective is Objective.STEP_SECONDS else StudyDirection.MAXIMIZE
    )


def _excess(fact: Known) -> float:
    """The constraint: above zero is infeasible, and the sampler prefers less of it."""
    match fact:
        case Measured() | InFlight():
            return HEADROOM
        case OutOfMemory(excess=excess):
            return max(excess, 1e-3) if excess is not None else UNKNOWN_EXCESS
        case Failed():
            return 1.0
        case Condemned() | SetAside():
            return UNKNOWN_EXCESS


def _worst(facts: Iterable[Known], direction: StudyDirection) -> float | None:
    values = [fact.value for fact in facts if isinstance(fact, Measured)]
    return reduce(lambda a, b: _worse(a, b, direction), values) if values else None


def _worse(a: float, b: float, direction: StudyDirection) -> float:
    return min(a, b) if direction is StudyDirection.MAXIMIZE else max(a, b)


def _shown_value(fact: Known, worst: float | None) -> float:
    """What stands for a value where there is none: the worst measured. A zero among thousands would flatten what a GP sees of the rest."""
    return fact.value if isinstance(fact, Measured) else worst or 0.0


def _params(layout: Layout) -> dict[str, int | str]:
    """Each axis under its name, options of the workload that vary included."""
    sizes = ((axis, getattr(layout, axis)) for axis in COLUMNS if axis != "options")
    return {
        axis: value if isinstance(value, int) else str(value)
        for axis, value in (*sizes, *layout.options)
    }

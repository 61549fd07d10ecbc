"""Ask and tell: which layout of a cell to measure next, and what its outcome shows of the others.

The candidates are finite and enumerated. The store is the truth: `restore` rebuilds a Searcher from
it. Layouts only: the states of rows, models and Optuna's samplers are in row_searcher.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, isnan, log

import numpy as np

from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import Ints
from orchestrator.core.problem.proofs import Dominance, MemoryProof, Proofs
from orchestrator.core.search.lattice import Floats
from orchestrator.core.search.planner import Candidates
from orchestrator.core.search.proposer import Choice
from orchestrator.core.search.told import Told
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.sections import Search
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.core.trial.merit import Merit
from orchestrator.search.axes import free_axes, lattice_of
from orchestrator.search.row_searcher import RowSearcher, RowStatus

# A correction of the logarithm below this is within what runs vary by.
CORRECTED_FROM = 0.02


@dataclass(frozen=True, kw_only=True)
class Measured:
    # The sweep's objective. 0, infinity and NaN teach nothing, and the layout is not asked for
    # again.
    value: float
    # As the prediction counts it; None: not read.
    peak_memory_bytes: float | None = None
    joules_per_token: float | None = None  # None: not read


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    # Over the limit, relative to it; None: unknown.
    excess: float | None = None
    # Attempts whose failure proves that the layout does not fit. 0: the cause may be another.
    num_proofs: int = 1


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The layout or the code is at fault. For the machine's fault, call `Searcher.forget`."""


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Asked for, and neither told nor forgotten yet."""


@dataclass(frozen=True, kw_only=True)
class Condemned:
    """Needs at least the memory of layouts that ran out of it; never launched."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A trial that told us nothing: it is not proposed again."""


Outcome = Measured | OutOfMemory | Failed
Known = Outcome | UnderWay | Condemned | SetAside


@dataclass(frozen=True, kw_only=True)
class Proposal:
    layout: Layout
    why: str  # one line, for people
    predicted_tokens_per_second_per_gpu: float | None
    predicted_memory_bytes: int | None
    # None: nothing is predicted on this device.
    predicted_step: PredictedStep | None = None


@dataclass(frozen=True, kw_only=True)
class DoubtfulResult:
    """A measured layout to measure once more."""

    layout: Layout
    why: str


class Searcher:
    """The search over one cell's candidates.

    Several asks may be outstanding; no layout is asked twice unless it is forgotten.
    """

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
        sums_shards: bool = False,
        merits: Collection[Merit] = (Merit.SPEED,),
    ) -> None:
        """`num_layers` is the model's; `sequence` numbers the cells of a sweep, so that each has
        other random numbers; `dominance` is how many out-of-memories rule a layout out, of a
        program that sums shards of gradients up over replicas or does not.
        A trial costs `launch_seconds` and `steps_per_trial` steps; None: as is usual. The values
        that it is told are of `objective`; it looks for the front of the `merits`.

        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        self._candidates = candidates
        self._objective = objective
        self._row_of = candidates.table.row_of
        self._rows = RowSearcher(
            order=candidates.order,
            lattice=partial(lattice_of, candidates, num_layers=num_layers),
            sampled=free_axes(candidates.table, num_layers=num_layers),
            search=search,
            sequence=sequence,
            memory=candidates.memory_bytes,
            launch_seconds=launch_seconds,
            steps_per_trial=steps_per_trial,
            merits=merits,
        )
        self._scale = _scale(candidates)
        self._repeated: set[int] = set()  # rows that `doubtful` has returned
        self._step_log_sd = candidates.step_log_sd()
        self._proofs = Proofs(
            candidates.table,
            num_layers=num_layers,
            dominance=dominance,
            sums_shards=sums_shards,
        )
        self._freed: list[Layout] = []  # until `take_freed`

    def knows(self, layout: Layout) -> bool:
        """True if the layout is one of the candidates."""
        return layout in self._row_of

    def predicted_step(self, layout: Layout) -> PredictedStep | None:
        """The step time predicted when the search began. None: nothing is predicted."""
        row = self._row_of.get(layout)
        return None if row is None else self._predicted_step(Choice(row=row))

    @property
    def memory_limit_bytes(self) -> float | None:
        """The memory that a layout must keep to; None if it is unknown."""
        return self._candidates.memory_limit_bytes

    @property
    def untried(self) -> int:
        return self._rows.count(RowStatus.UNTRIED)

    @property
    def told(self) -> int:
        return self._rows.count(RowStatus.TOLD)

    @property
    def condemned(self) -> int:
        """Layouts that are not launched: condemned or set aside."""
        return self._rows.count(RowStatus.CONDEMNED) + self._rows.count(RowStatus.SET_ASIDE)

    def ask(self) -> Proposal | None:
        """Propose an untried layout, which is under way from now on; None when there is none."""
        asked = self._rows.ask()
        return None if asked is None else self._proposal(asked)

    def tell(self, layout: Layout, outcome: Outcome) -> list[Layout]:
        """Record how a layout ended; a second telling replaces the first.

        Returns the untried layouts that an out-of-memory condemns: they are not asked for.
        `take_freed` returns those that a measurement frees.
        """
        row = self._row_of.get(layout)
        if row is not None and _is_useless(outcome):
            self._rows.set_aside(row)
        elif row is not None:
            self._rows.tell(self._told(row, outcome))
        match outcome:
            case OutOfMemory(num_proofs=num) if num:
                self._proofs.add(_proof(layout, outcome))
                return self._layouts(self._rule_out())
            case Measured() if row is not None and self._proofs.ran(row):
                self._rule_out()
        return []

    def proofs_of(self, layout: Layout) -> tuple[MemoryProof, ...]:
        """The out-of-memories that condemn a layout: one, or two that agree."""
        return self._proofs.of(self._row_of[layout])

    def take_freed(self) -> list[Layout]:
        """The layouts that are no longer condemned, since the last call.

        What condemned them is contradicted or withdrawn.
        """
        freed, self._freed = self._freed, []
        return freed

    def correct(self, layout: Layout, value: float) -> None:
        """Replace the objective of a measured layout, as the machine is now.

        A difference within noise changes nothing.
        """
        row = self._row_of.get(layout)
        told = self._rows.told.get(row) if row is not None else None
        if row is None or told is None or told.score is None:
            return
        score = self._score(value)
        if abs(score - told.score) > CORRECTED_FROM:
            self._rows.tell(replace(told, score=score))

    def restore(self, known: Iterable[tuple[Layout, Known]]) -> dict[Layout, Layout]:
        """Rebuild the state from the store.

        Returns what its out-of-memories condemn beyond what it knew: layout -> the one that proves
        it. A layout that is no candidate (the axes were narrowed since) is not counted, but its
        out-of-memory condemns candidates all the same.
        """
        told: list[Told] = []
        under_way, set_aside, ran, proofs = [], [], [], []
        was_condemned: dict[int, Layout] = {}
        for layout, fact in known:
            if isinstance(fact, OutOfMemory) and fact.num_proofs:
                proofs.append(_proof(layout, fact))
            row = self._row_of.get(layout)
            if row is None:
                continue
            if isinstance(fact, Measured):
                ran.append(row)
            match fact:
                case UnderWay():
                    under_way.append(row)
                case Condemned():
                    was_condemned[row] = layout
                case SetAside():
                    set_aside.append(row)
                case Measured() if _is_useless(fact):
                    set_aside.append(row)
                case Measured() | OutOfMemory() | Failed():
                    told.append(self._told(row, fact))
        self._rows.rebuild(told, under_way=under_way, set_aside=set_aside)
        self._proofs.replace(proofs, np.array(ran, dtype=np.int64))
        condemned = self._rule_out()
        ruled_out = self._proofs.ruled_out
        self._freed = [layout for row, layout in was_condemned.items() if not ruled_out[row]]
        return {
            self._candidates.table.layout(row): self._proofs.of(row)[0].layout
            for row in condemned.tolist()
            if row not in was_condemned
        }

    def forget(self, layout: Layout) -> None:
        """Put a layout back to untried: the machine was at fault, or its result was invalidated."""
        row = self._row_of.get(layout)
        if row is not None:
            self._rows.forget(row)

    def set_aside(self, layout: Layout) -> None:
        """Never propose a layout again, and learn nothing from it."""
        row = self._row_of.get(layout)
        if row is not None:
            self._rows.set_aside(row)

    def doubtful(self) -> DoubtfulResult | None:
        """A measured layout that its neighbours contradict, if that matters: measure it once more.

        Each layout at most once. Tell the new result: it replaces the first.
        """
        found = self._rows.doubtful(but=self._repeated)
        if found is None:
            return None
        row, expected = found
        self._repeated.add(row)
        was = self._rows.told[row].score
        assert was is not None
        return DoubtfulResult(
            layout=self._candidates.table.layout(row),
            why=f"measured {self._in_words(was)}, but its neighbours say "
            f"{self._in_words(expected)}: measured once more before it is used",
        )

    def expected_gain(self) -> float | None:
        """The largest expected gain of an untried layout over the best, relative.

        None: the strategy has no model, or nothing has run yet.
        """
        return self._rows.expected_gain()

    def probability_of_fitting(self) -> Floats | None:
        """The probability that each candidate fits, by all that is known so far.

        None: no limit is known, or the strategy has no model; NaN: one of very many candidates.
        """
        return self._rows.probability_of_fitting()

    def nothing_fits(self) -> str | None:
        """The evidence that no layout of the cell fits, or None.

        Nothing was measured, and the layout that needs least ran out of memory.
        """
        row = self._rows.hopeless()
        if row is None:
            return None
        layout, limit = self._candidates.table.layout(row), self._candidates.memory_limit_bytes
        memory = f" of {limit / 2**30:.1f} GiB" if limit is not None else ""
        num = sum(told.out_of_memory for told in self._rows.told.values()) - 1
        others = f", and so did {num} other{'s' if num > 1 else ''}" if num else ""
        return (
            f"{layout.short}, predicted to need least, ran out of memory{memory}{others}; "
            "none was measured"
        )

    def _rule_out(self) -> Ints:
        """Condemn and free rows by the proofs so far. Returns the condemned ones."""
        condemned, freed = self._rows.rule_out(self._proofs.ruled_out)
        self._freed += self._layouts(freed)
        return condemned

    def _layouts(self, rows: Ints) -> list[Layout]:
        return self._candidates.table.take(rows).layouts() if len(rows) else []

    # -- scores: logarithms of the seconds of a step, or of what replaces them ------------------

    def _told(self, row: int, outcome: Outcome) -> Told:
        match outcome:
            case Measured(value=value, peak_memory_bytes=peak, joules_per_token=joules):
                return Told(
                    row=row,
                    score=self._score(value),
                    peak_memory_bytes=peak,
                    joules_per_token=joules,
                )
            case OutOfMemory(excess=excess):
                return Told(row=row, out_of_memory=True, excess=excess)
            case Failed():
                return Told(row=row)

    def _score(self, value: float) -> float:
        return log(value if self._is_time else self._scale / value)

    def _in_words(self, score: float) -> str:
        if self._is_time:
            return f"{exp(score):,.3g} s a step"
        value = self._scale / exp(score)
        return f"{value:,.0f} tokens/s/GPU" if value >= 100 else f"{value:,.3g} tokens/s/GPU"

    @property
    def _is_time(self) -> bool:
        return self._objective is Objective.STEP_SECONDS

    # -- the reasons of a proposal ----------------------------------------------------------------

    def _proposal(self, choice: Choice) -> Proposal:
        row = choice.row
        tokens = float(self._candidates.tokens_per_second_per_gpu[row])
        memory = float(self._candidates.memory_bytes[row])
        if choice.why is not None:
            why = f"{choice.why}; {self._ranked(row)}" if choice.why else self._ranked(row)
        else:
            why = self._expected(choice)
            # Measured neighbours predict a layout also on a device that physics does not know.
            is_predicted = not isnan(tokens) or choice.improvement is not None
            if choice.score is not None and not self._is_time and is_predicted:
                tokens = self._scale / exp(choice.score)
            if choice.memory_bytes is not None and not isnan(memory):
                memory = choice.memory_bytes
        return Proposal(
            layout=self._candidates.table.layout(row),
            why=why,
            predicted_tokens_per_second_per_gpu=None if isnan(tokens) else tokens,
            predicted_memory_bytes=None if isnan(memory) else int(memory),
            predicted_step=self._predicted_step(choice),
        )

    def _predicted_step(self, choice: Choice) -> PredictedStep | None:
        """The step time by physics, or by the search's model if measured trials show it longer."""
        if self._step_log_sd is None:
            return None
        seconds, log_sd = float(self._candidates.step_seconds[choice.row]), self._step_log_sd
        if choice.score is not None and exp(choice.score) > seconds:
            seconds, log_sd = exp(choice.score), max(choice.score_sd, log_sd)
        return PredictedStep(seconds=seconds, log_sd=log_sd)

    def _expected(self, choice: Choice) -> str:
        """Describe what `auto` expects, for example:

        predicted 9,800 tokens/s/GPU, give or take a factor of 1.10 (6% better than the best so
        far), 71.0 of 79.0 GiB, 93% likely to fit
        """
        if choice.score is None:
            return "far from every known layout; nothing is predicted yet"
        if choice.improvement is None and isnan(self._candidates.step_seconds[choice.row]):
            return "the least work per token; nothing is predicted on this device yet"
        score, factor = self._in_words(choice.score), exp(choice.score_sd)
        facts = [f"predicted {score}, give or take a factor of {factor:.2f}"]
        if choice.front_gain is not None:
            facts[0] += f" (expected to enlarge the front by {choice.front_gain:.1%})"
        elif (better := choice.improvement) is not None:
            gain = 1 - exp(-better) if self._is_time else exp(better) - 1
            word = "better" if gain > 0 else "worse"
            facts[0] += f" ({abs(gain):.0%} {word} than the best so far)"
        limit = self._candidates.memory_limit_bytes
        if choice.memory_bytes is not None and limit is not None:
            facts.append(f"{choice.memory_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB")
        if choice.fits is not None:
            facts.append(f"{choice.fits:.0%} likely to fit")
        if choice.fails > 0.15:
            facts.append(f"{choice.fails:.0%} likely to fail as similar layouts did")
        return ", ".join(facts)

    def _ranked(self, row: int) -> str:
        candidates = self._candidates
        tokens, memory = candidates.tokens_per_second_per_gpu[row], candidates.memory_bytes[row]
        limit = candidates.memory_limit_bytes
        facts = []
        if not isnan(tokens):
            facts.append(f"{tokens:,.0f} tokens/s/GPU")
        if not isnan(memory):
            of_limit = "" if limit is None else f" of {limit / 2**30:.1f}"
            facts.append(f"{memory / 2**30:.1f}{of_limit} GiB")
        if not candidates.fits[row]:
            facts.append("predicted not to fit")
        rank = f"prediction ranks it {int(self._rows.rank[row]) + 1} of {len(candidates)}"
        return f"{rank}: {', '.join(facts)}" if facts else rank


def _proof(layout: Layout, outcome: OutOfMemory) -> MemoryProof:
    return MemoryProof(
        layout=layout, num_attempts=outcome.num_proofs, is_measured=outcome.excess is not None
    )


def _is_useless(outcome: Outcome) -> bool:
    """True for a measured value that is none: from a clock that stood still, 0 or infinite."""
    return isinstance(outcome, Measured) and not 0 < outcome.value < inf


def _scale(candidates: Candidates) -> float:
    """Seconds of a step times tokens per second and GPU: the same for every layout of a cell.

    1 if nothing is predicted.
    """
    products = candidates.step_seconds * candidates.tokens_per_second_per_gpu
    known = products[np.isfinite(products)]
    return float(known[0]) if len(known) else 1.0

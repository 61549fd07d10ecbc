"""Ask and tell: which layout of a cell to measure next, and what its outcome shows of the others.

The candidates are finite and enumerated. The store is the truth: `restore` rebuilds a Searcher from
it. Layouts only: the states of rows, models and Optuna's samplers are in row_searcher.py, the
reasons of proposals in proposal.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.memory_text import memory_text
from orchestrator.core.problem.proofs import Dominance, MemoryProof, Proofs
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.search.planner import Candidates
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.sweepfile.search_section import Search
from orchestrator.core.trial.limits import PredictedStep
from orchestrator.core.trial.merit import Merit
from orchestrator.search.axes import free_axes, lattice_of
from orchestrator.search.layout_state import Condemned, Known, SetAside, UnderWay
from orchestrator.search.proposal import DoubtfulResult, Proposal, Proposals
from orchestrator.search.row_searcher import RowSearcher, RowStatus
from orchestrator.search.score_scale import ScoreScale

# A correction of the logarithm below this is within what runs vary by.
CORRECTED_FROM = 0.02


class Searcher:
    """The search over one cell's candidates.

    Several asks may be outstanding; no layout is asked twice unless it is forgotten.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        cell: Cell,
        search: Search,
        objective: Objective,
        sequence: int = 0,
        launch_seconds: float | None = None,
        steps_per_trial: float | None = None,
        dominance: Dominance = Dominance.TRUSTED,
        sums_shards: bool = False,
        merits: Collection[Merit] = (Merit.SPEED,),
    ) -> None:
        """`cell` is the one that the candidates belong to; `sequence` numbers the cells of a sweep,
        so that each has other random numbers; `dominance` is how many out-of-memories rule a layout
        out, of a program that sums shards of gradients up over replicas or does not.
        A trial costs `launch_seconds` and `steps_per_trial` steps; None: as is usual. Reasons name
        values of `objective`; the search looks for the front of the `merits`.

        Raises UsageInvalid when the strategy needs packages that are not installed.
        """
        num_layers = cell.model.num_layers
        self._candidates = candidates
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
        self._scores = ScoreScale(cell, objective)
        self._proposals = Proposals(candidates, self._scores)
        self._repeated: set[int] = set()  # rows that `doubtful` has returned
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
        return None if row is None else self._proposals.predicted_step(row)

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
        if asked is None:
            return None
        row, reason = asked
        return self._proposals.of(row, reason, rank=int(self._rows.rank[row]))

    def tell(self, layout: Layout, outcome: Outcome) -> list[Layout]:
        """Record how a layout ended; a second telling replaces the first.

        Returns the untried layouts that an out-of-memory condemns: they are not asked for.
        `take_freed` returns those that a measurement frees.
        """
        row = self._row_of.get(layout)
        if row is not None:
            self._rows.tell(row, outcome)
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

    def correct(self, layout: Layout, step_seconds: float) -> None:
        """Replace the step time of a measured layout, as the machine is now.

        A difference within noise changes nothing.
        """
        row = self._row_of.get(layout)
        told = self._rows.told.get(row) if row is not None else None
        if row is None or not isinstance(told, Measured):
            return
        score = Measured.of_step(step_seconds).score
        if abs(score - told.score) > CORRECTED_FROM:
            self._rows.tell(row, replace(told, score=score))

    def restore(self, known: Iterable[tuple[Layout, Known]]) -> dict[Layout, Layout]:
        """Rebuild the state from the store.

        Returns what its out-of-memories condemn beyond what it knew: layout -> the one that proves
        it. A layout that is no candidate (the axes were narrowed since) is not counted, but its
        out-of-memory condemns candidates all the same.
        """
        told: dict[int, Outcome] = {}
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
                case Measured() | OutOfMemory() | Failed():
                    told[row] = fact
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
        was = self._rows.told[row]
        assert isinstance(was, Measured)
        return DoubtfulResult(
            layout=self._candidates.table.layout(row),
            why=f"measured {self._scores.text(was.score)}, but its neighbours say "
            f"{self._scores.text(expected)}: measured once more before it is used",
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
        memory = f" of {memory_text(limit)}" if limit is not None else ""
        num = sum(isinstance(told, OutOfMemory) for told in self._rows.told.values()) - 1
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


def _proof(layout: Layout, outcome: OutOfMemory) -> MemoryProof:
    return MemoryProof(
        layout=layout, num_attempts=outcome.num_proofs, is_measured=outcome.excess is not None
    )

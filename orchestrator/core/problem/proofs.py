"""The layouts of a cell that out-of-memories rule out so far, and the proof of each.

An out-of-memory of one layout proves that every layout that needs at least as much memory cannot
run (dominance.py). How much proof is needed depends on whose memory is known: `Dominance`. A layout
that ran, and needs at least as much, contradicts the proof, which counts for nothing from then on.
Knows nothing of trials or of a search.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from orchestrator.core.problem.arrays import Ints, Mask
from orchestrator.core.problem.dominance import needs_at_least
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable

# Out-of-memories that agree, if one alone may be the program's mistake.
ENOUGH = 2


class Dominance(StrEnum):
    """The amount of proof that rules a layout out without a launch."""

    # One rules out every layout that needs at least as much memory.
    TRUSTED = "trusted"
    # Two that agree do, or one whose message shows that it needs more than the device has.
    CONFIRMED = "confirmed"
    OFF = "off"  # nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProof:
    """A layout whose attempts ran out of memory."""

    layout: Layout
    num_attempts: int = 1
    # The bytes held and asked for are known, and are more than the device has.
    is_measured: bool = False

    @property
    def weight(self) -> int:
        """The number of agreeing out-of-memories that it counts for."""
        return ENOUGH if self.is_measured else self.num_attempts


class Proofs:
    """The out-of-memories of one cell, and what they rule out of the rows of its table."""

    def __init__(
        self,
        table: LayoutTable,
        *,
        num_layers: int,
        dominance: Dominance,
        sums_shards: bool = False,
    ) -> None:
        """`sums_shards`: see needs_at_least."""
        self._table, self._num_layers, self._dominance = table, num_layers, dominance
        self._sums_shards = sums_shards
        # Contradicted ones are kept: the measurement that contradicts them may be withdrawn.
        self._proofs: list[MemoryProof] = []
        self._ran: Mask = np.zeros(len(table), dtype=np.bool_)
        # By row: the weight of the uncontradicted proofs against it, the first and the second of
        # these, and the first of the row's own kind.
        self._weight: Ints = np.zeros(len(table), dtype=np.int64)
        self._first, self._second, self._own = np.full((3, len(table)), -1, dtype=np.int64)

    def add(self, proof: MemoryProof) -> None:
        """A layout ran out of memory."""
        self._proofs.append(proof)
        self._count(len(self._proofs) - 1)

    def ran(self, row: int) -> bool:
        """A row ran. True if that contradicts a proof: less may be ruled out than before."""
        self._ran[row] = True
        if not self._weight[row]:
            return False
        self._recount()
        return True

    def replace(self, proofs: list[MemoryProof], ran: Ints) -> None:
        """Start again with these."""
        self._proofs = list(proofs)
        self._ran[:] = False
        self._ran[ran] = True
        self._recount()

    @property
    def ruled_out(self) -> Mask:
        """The rows that are not to be launched."""
        match self._dominance:
            case Dominance.TRUSTED:
                found: Mask = self._weight > 0
            case Dominance.CONFIRMED:
                found = (self._weight >= ENOUGH) & (self._own >= 0)
            case Dominance.OFF:
                found = np.zeros(len(self._table), dtype=np.bool_)
        return found

    def of(self, row: int) -> tuple[MemoryProof, ...]:
        """The proofs that rule out a row: one, or two that agree."""
        first = self._proofs[self._first[row]]
        if self._dominance is not Dominance.CONFIRMED:
            return (first,)
        own = self._proofs[self._own[row]]
        if own.weight >= ENOUGH:
            return (own,)
        return own, first if first is not own else self._proofs[self._second[row]]

    def _recount(self) -> None:
        self._weight[:] = 0
        for found in (self._first, self._second, self._own):
            found[:] = -1
        # Those that need least first: a layout shows the first proof against it.
        for place in sorted(range(len(self._proofs)), key=lambda n: _least_first(self._proofs[n])):
            self._count(place)

    def _count(self, place: int) -> None:
        proof = self._proofs[place]
        if self._dominance is Dominance.OFF:
            return
        mask = needs_at_least(
            self._table,
            proof.layout,
            num_layers=self._num_layers,
            sums_shards=self._sums_shards,
        )
        rows = np.flatnonzero(mask)
        if self._ran[rows].any():
            return  # contradicted
        is_first = self._first[rows] < 0
        self._weight[rows] += proof.weight
        self._first[rows[is_first]] = place
        # The others have one proof only.
        if self._dominance is Dominance.CONFIRMED:
            self._second[rows[~is_first & (self._second[rows] < 0)]] = place
            is_own = self._is_of_its_kind(rows, proof.layout)
            self._own[rows[is_own & (self._own[rows] < 0)]] = place

    def _is_of_its_kind(self, rows: Ints, layout: Layout) -> Mask:
        """Mark the rows with the same recomputation and ZeRO stage.

        A program's mistake in one of these says nothing of the others.
        """
        same = np.array([r == layout.recompute for r in self._table.recomputes], dtype=np.bool_)
        same_stage = self._table.zero_stage[rows] == layout.zero_stage
        mask: Mask = same[self._table.recompute[rows]] & same_stage
        return mask


def _least_first(proof: MemoryProof) -> tuple[int, int]:
    return proof.layout.micro_batch_size, -proof.layout.zero_stage

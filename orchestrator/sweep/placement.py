"""Whose turn it is: of the cells that want to start a gang, which one does, and on which nodes (core/machines/packing.py decides).

It knows who holds what and until when, as predicted; it starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape, WaitingGang
from orchestrator.sweep.cell_search import CellSearch

FIRST_TRIALS = 8  # of each cell, before any goes on: a search is near its best by then, and a budget may end soon after


class Placement:
    """Decides which cell starts the next gang in one call of `run_sweep`. `exclusive`: every gang wants its nodes for itself."""

    def __init__(
        self,
        slots_of: Mapping[str, int],
        *,
        exclusive: bool,
        turn_of: Callable[[CellSearch], tuple[float, ...]] | None = None,
    ) -> None:
        """`turn_of` gives the place of a cell among those that share a budget, smallest first; None: what fills the cluster goes first."""
        self._free_slots = FreeSlots(slots_of)
        self._exclusive, self._turn_of = exclusive, turn_of
        self._num_starts = 0
        self._since: dict[int, int] = {}  # cell id -> starts by when it began to wait

    def see(self, slots_of: Mapping[str, int]) -> None:
        """Nodes may have come or gone."""
        self._free_slots.resize(slots_of)

    def is_possible(self, shape: Shape) -> bool:
        """Whether the nodes that are left hold such a gang, once they are free."""
        return self._free_slots.holds(shape)

    def may_have_room(self, runs: Sequence[CellSearch]) -> bool:
        """Whether as many slots are free as the narrowest gang has; where not, whose turn it is need not be worked out."""
        free = self._free_slots.count
        return any(run.shape.num_slots <= free for run in runs)

    def next(
        self,
        runs: Sequence[CellSearch],
        now: float,
        free_on_nodes: Mapping[str, FreeOnNode],
        *,
        suspected: Collection[int] = (),
    ) -> tuple[CellSearch, tuple[str, ...]] | None:
        """The cell that starts a gang now, and its nodes; None: none of them can without delaying one that was here first.

        Cells that are `suspected`, by id, let others go first.
        """
        waiting = [
            WaitingGang(
                shape=run.shape,
                seconds=run.expected_seconds,
                is_first=run.launched < FIRST_TRIALS,
                passed_over=self._num_starts - self._since.setdefault(run.id, self._num_starts),
                exclusive=self._is_exclusive(run) or run.has_only_suspects,
                is_suspected=run.id in suspected,
                turn=self._turn_of(run) if self._turn_of is not None else (),
            )
            for run in runs
        ]
        start = self._free_slots.next_start(waiting, now=now, free_on_nodes=free_on_nodes)
        return None if start is None else (runs[start.index], start.nodes)

    def is_possible_without(self, shape: Shape, nodes: Collection[str]) -> bool:
        """Say whether the other nodes, once they are free, hold such a gang."""
        return self._free_slots.holds_without(shape, nodes)

    def elsewhere(
        self, run: CellSearch, without: Collection[str], free_on_nodes: Mapping[str, FreeOnNode]
    ) -> tuple[str, ...] | None:
        """Free nodes for a gang of the cell, none of these among them; None: there are not enough now."""
        gang = WaitingGang(
            shape=run.shape, seconds=run.expected_seconds, exclusive=self._is_exclusive(run)
        )
        return self._free_slots.place_elsewhere(gang, without, free_on_nodes=free_on_nodes)

    def _is_exclusive(self, run: CellSearch) -> bool:
        """Whether all gangs of the cell get their nodes for themselves: as asked, or since one of its trials ran a node out of memory."""
        return self._exclusive or run.needs_own_nodes

    def are_unused(self, nodes: Sequence[str]) -> bool:
        """Whether nothing else runs on these nodes."""
        return self._free_slots.are_unused(nodes)

    def began(self, run: CellSearch, nodes: Sequence[str], now: float, *, alone: bool) -> int:
        """A gang of the cell starts, and nothing else on its nodes where it is to be alone. Returns the ticket to give back when it has ended."""
        self._num_starts += 1
        self._since[run.id] = self._num_starts
        self._free_slots.take(
            self._num_starts,
            run.shape,
            nodes,
            ends_at=now + run.expected_seconds,
            exclusive=alone or self._is_exclusive(run),
        )
        return self._num_starts

    def ended(self, ticket: int) -> None:
        self._free_slots.give_back(ticket)

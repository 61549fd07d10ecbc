"""Decides which waiting cell starts a gang, and on which nodes.

It knows who holds what until when, as predicted (core/machines/packing.py). It starts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orchestrator.cluster.contract import Slots
from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape, WaitingGang
from orchestrator.core.sweepfile.search_section import Search
from orchestrator.sweep import sharing
from orchestrator.sweep.attempts import Attempt
from orchestrator.sweep.cell_search import CellSearch


def most_at_once(settings: Search, slots: Slots) -> int:
    """Return how many attempts may run at once."""
    asked = settings.max_parallel_trials
    return asked if isinstance(asked, int) else slots.usual_at_once or slots.total


class Placement:
    """Places the gangs of one call of `run_sweep`."""

    def __init__(
        self, slots_of: Mapping[str, int], *, exclusive: bool, shares_budget: bool
    ) -> None:
        """`exclusive`: every gang gets its nodes for itself.

        `shares_budget`: cells go in the order of sharing.py, else what fills the cluster first.
        """
        self._free_slots = FreeSlots(slots_of)
        self._exclusive, self._shares_budget = exclusive, shares_budget
        self._num_starts = 0
        # Cell -> number of starts, of all cells, since when it waits.
        self._since: dict[int, int] = {}

    def see(self, slots_of: Mapping[str, int]) -> None:
        """Note that nodes may have come or gone."""
        self._free_slots.resize(slots_of)

    def is_possible(self, shape: Shape) -> bool:
        """Return whether the nodes that are left hold such a gang, once they are free."""
        return self._free_slots.holds(shape)

    def may_start(self, searches: Sequence[CellSearch]) -> bool:
        """Return whether as many slots are free as the narrowest gang has: a cheap first test."""
        free = self._free_slots.count
        return any(search.shape.num_slots <= free for search in searches)

    def next(
        self,
        searches: Sequence[CellSearch],
        now: float,
        free_on_nodes: Mapping[str, FreeOnNode],
        *,
        suspected: Collection[int] = (),
    ) -> tuple[CellSearch, tuple[str, ...]] | None:
        """Return the cell that starts a gang now, and the gang's nodes.

        None: no cell can start one without a delay of another that waited before. Cells that are
        `suspected`, by id, let others go first.
        """
        waiting = [
            WaitingGang(
                shape=search.shape,
                seconds=search.cost.expected_seconds,
                is_first=search.launched < sharing.FIRST_TRIALS,
                passed_over=self._num_starts - self._since.setdefault(search.id, self._num_starts),
                exclusive=self._is_exclusive(search) or search.has_only_suspects,
                is_suspected=search.id in suspected,
                cell_order=sharing.precedence(search) if self._shares_budget else (),
            )
            for search in searches
        ]
        start = self._free_slots.next_start(waiting, now=now, free_on_nodes=free_on_nodes)
        return None if start is None else (searches[start.index], start.nodes)

    def is_possible_without(self, shape: Shape, nodes: Collection[str]) -> bool:
        """Return whether the other nodes, once they are free, hold such a gang."""
        return self._free_slots.holds_without(shape, nodes)

    def elsewhere(
        self,
        search: CellSearch,
        without: Collection[str],
        free_on_nodes: Mapping[str, FreeOnNode],
    ) -> tuple[str, ...] | None:
        """Return free nodes for a gang of the cell, none of these among them. None: too few now."""
        exclusive = self._is_exclusive(search)
        gang = WaitingGang(
            shape=search.shape, seconds=search.cost.expected_seconds, exclusive=exclusive
        )
        return self._free_slots.place_elsewhere(gang, without, free_on_nodes=free_on_nodes)

    def are_unused(self, nodes: Sequence[str]) -> bool:
        """Return whether nothing else runs on these nodes."""
        return self._free_slots.are_unused(nodes)

    def take(self, attempt: Attempt, search: CellSearch, *, alone: bool) -> None:
        """Give an attempt its nodes; no other attempt gets them if it is to be alone."""
        self._num_starts += 1
        self._since[search.id] = self._num_starts
        self._free_slots.take(
            attempt.id,
            search.shape,
            attempt.nodes,
            ends_at=attempt.since + search.cost.expected_seconds,
            exclusive=alone or self._is_exclusive(search),
        )

    def give_back(self, attempt: Attempt) -> None:
        """Note that an attempt's nodes are free."""
        self._free_slots.give_back(attempt.id)

    def _is_exclusive(self, search: CellSearch) -> bool:
        """Return whether gangs of the cell share no node."""
        return self._exclusive or search.retries.needs_own_nodes

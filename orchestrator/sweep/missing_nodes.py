"""Waits for lost nodes, if the remaining ones cannot hold the gangs of a cell."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf

from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.placement import Placement
from orchestrator.sweep.progress import StopReason

logger = logging.getLogger(__name__)


class MissingNodes:
    """Decides how long the cells of one call of `run_sweep` wait for nodes."""

    def __init__(self, call: Call, placement: Placement, node_pool: NodePool) -> None:
        self._patience_seconds, self._clock = call.spec.measurement.wait_for_nodes, call.clock
        self._placement, self._node_pool = placement, node_pool
        # Cell -> when the remaining nodes became too few.
        self._since: dict[int, float] = {}
        # The usable nodes, with their slots.
        self._nodes: dict[str, int] = {}
        # The mapping of the last call. Its identity is compared first, since comparing thousands of
        # nodes takes time.
        self._given: Mapping[str, int] = self._nodes
        # Nodes that were lost while cells waited, or just before.
        self._gone: set[str] = set()
        # When the newest of these was lost for the first time.
        self._lost_at = -inf

    def see(self, usable: Mapping[str, int]) -> None:
        """Note which nodes can be used.

        While cells wait, their wait begins again with each node that is lost for the first time.
        """
        if usable is self._given or usable == self._nodes:
            return
        self._given = usable
        self._placement.see(usable)
        if not self._since:
            self._gone.clear()
        if gone := self._nodes.keys() - usable.keys() - self._gone:
            self._gone |= gone
            self._lost_at = self._clock()
        self._nodes = dict(usable)

    def gave_up(self, search: CellSearch) -> StopReason | None:
        """Return NODES once the nodes that a cell needs were waited for long enough."""
        if self._placement.is_possible(search.shape):
            self._since.pop(search.id, None)
            return None
        if search.id not in self._since:
            self._since[search.id] = self._clock()
            logger.warning(
                "%s: the nodes that are left cannot hold its gangs; it waits %.0f s for others"
                " (measurement.wait_for_nodes)",
                search.cell.key,
                self._patience_seconds,
            )
        waited = self._clock() - max(self._since[search.id], self._lost_at)
        is_over = waited > self._patience_seconds and not self._node_pool.awaits_answers
        return StopReason.NODES if is_over else None

    def waits(self, search: CellSearch) -> bool:
        """Return whether a cell waits for nodes: `gave_up` found too few when it was last asked."""
        return search.id in self._since

"""Makes the search of each cell, from what the store teaches about the cell's relatives."""

from __future__ import annotations

from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.search.planner import rank_space
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.search.searcher import Searcher
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import PlannedSearch
from orchestrator.sweep.prior_knowledge import Fits, PriorKnowledge, read_prior_knowledge


class CellSearches:
    """Plans the searches of one call of `run_sweep`, from what `read` has found in the store."""

    def __init__(self, call: Call, hardware: Hardware | None, knowledge: PriorKnowledge) -> None:
        """`hardware`: the device by its data sheet."""
        self._call, self._spec, self._hardware = call, call.spec, hardware
        self._knowledge = knowledge
        # Attempts of this call when the store was read.
        self._num_ended = 0

    def plan(self, cell: Cell, cell_id: int) -> PlannedSearch:
        """Begin a search over a cell's layouts that starts from what its relatives showed."""
        knowledge, spec = self._knowledge, self._spec
        gpus_per_node = self._call.gpus_per_node
        candidates = rank_space(
            spec,
            self._call.spaces.of(cell, gpus_per_node=gpus_per_node),
            hardware=knowledge.hardware,
            gpus_per_node=gpus_per_node,
            device=knowledge.device,
            calibration=knowledge.calibration(cell, with_own=False),
        )
        cost = self.trial_cost
        searcher = Searcher(
            candidates,
            cell=cell,
            search=spec.search,
            objective=spec.ranked_by,
            sequence=cell_id,
            launch_seconds=cost.launch_seconds,
            steps_per_trial=cost.num_steps,
            dominance=spec.dominance,
            sums_shards=spec.sums_shards,
            merits=spec.merits,
        )
        steps = 0.0
        if candidates.predict is not None:
            steps = float(candidates.step_seconds[candidates.order[:1]].sum())
        return PlannedSearch(searcher=searcher, predicted_seconds=cost.seconds(steps))

    @property
    def trial_cost(self) -> TrialCost:
        """Seconds for which a trial holds its slots in addition to its steps."""
        return self._knowledge.trial_cost

    def read_again(self, num_ended: int) -> bool:
        """Read the store again if attempts have ended since it was read. Return whether it was.

        `num_ended`: all attempts of this call that have ended.
        """
        if num_ended <= self._num_ended:
            return False
        self._knowledge = read(self._call, self._hardware, begin=self._knowledge.fits)
        self._num_ended = num_ended
        return True


def read(call: Call, hardware: Hardware | None, *, begin: Fits | None = None) -> PriorKnowledge:
    """Return what the store knows of the sweep's relatives. `begin`: fits to begin from."""
    slots = call.scheduler.slots
    return read_prior_knowledge(
        call.store,
        call.spec,
        hardware,
        device=slots.device,
        device_name=slots.device_name,
        gpus_per_node=call.gpus_per_node,
        nodes=slots.nodes,
        begin=begin,
    )

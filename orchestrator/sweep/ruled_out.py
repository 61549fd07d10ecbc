"""Records the layouts that out-of-memories rule out, and those that they no longer do."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from db.read.rows import TrialRow
from db.write.writes import Pruned
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.proofs import MemoryProof
from orchestrator.core.search.outcome import OutOfMemory
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import proves_out_of_memory
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.attempts import Attempt
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.trial_counts import TrialCounts
from orchestrator.sweep.verdict import AttemptVerdict, relative_excess

logger = logging.getLogger(__name__)


class RuledOut:
    """The layouts of one call of `run_sweep` that out-of-memories rule out."""

    def __init__(self, call: Call, counts: TrialCounts) -> None:
        self._call, self._store, self._counts = call, call.store, counts
        self._on_cpu = call.scheduler.slots.device is Device.CPU
        self._unwritten: list[Pruned] = []

    def num_proofs(self, search: CellSearch, trials: Sequence[TrialRow]) -> Mapping[int, int]:
        """Count, by trial that ran out of memory, the attempts that prove it."""
        if not any(trial.state is TrialState.OUT_OF_MEMORY for trial in trials):
            return {}
        failures = self._store.out_of_memories(search.id)
        return {trial_id: self._count_proofs(some) for trial_id, some in failures.items()}

    def note_out_of_memory(
        self, search: CellSearch, attempt: Attempt, verdict: AttemptVerdict, failure: Failure
    ) -> int:
        """Tell a search that a trial ran out of memory. Return how many layouts this rules out."""
        trial_id, failures = attempt.trial_id, [failure]
        if attempt.number > 1:
            failures = self._store.out_of_memories(search.id, trial_id=trial_id)[trial_id]
        excess = relative_excess(
            verdict.peak_memory_bytes, verdict.device_memory_bytes, failure.memory
        )
        outcome = OutOfMemory(excess=excess, num_proofs=self._count_proofs(failures))
        condemned = search.note_out_of_memory(trial_id, attempt.layout, outcome)
        self.condemn(search, condemned)
        return len(condemned)

    def condemn(self, search: CellSearch, layouts: Collection[Layout]) -> None:
        """Note layouts that are ruled out, to be recorded without a launch: see `write`."""
        for layout in layouts:
            proofs = [
                (search.out_of_memory[proof.layout], proof)
                for proof in search.searcher.proofs_of(layout)
            ]
            why = f"{_needs_as_much(proofs)}; search.dominance is {self._call.spec.dominance}"
            self._unwritten.append(
                Pruned(cell_id=search.id, layout=layout, why=why, condemned_by=proofs[0][0])
            )
        self._counts.remove(TrialState.QUEUED, search.note_condemned(layouts))

    def free(self, search: CellSearch) -> None:
        """Let layouts be launched again that no out-of-memory rules out any more."""
        freed = search.take_freed()
        if not freed:
            return
        # Some of the freed layouts may still be unwritten.
        self.write()
        num = self._store.free_pruned(search.id, freed, epoch=self._call.epoch)
        self._counts.move(num, TrialState.PRUNED, TrialState.QUEUED)
        search.free(freed)
        key = search.cell.key
        logger.info(
            "%s: %d layouts are no longer ruled out by memory", key, num, extra={"action": "freed"}
        )

    def write(self) -> None:
        """Record the layouts that were ruled out since the last call."""
        num = self._store.add_pruned(self._unwritten, epoch=self._call.epoch)
        self._counts.add(TrialState.PRUNED, num)
        self._unwritten.clear()

    def _count_proofs(self, failures: Collection[Failure]) -> int:
        return sum(proves_out_of_memory(one, on_cpu=self._on_cpu) for one in failures)


def _needs_as_much(proofs: Sequence[tuple[int, MemoryProof]]) -> str:
    """Say why a layout cannot run, by the trials that ran out of memory."""
    trials = [f"{trial_id} ({proof.layout.short})" for trial_id, proof in proofs]
    noun = "trials" if len(trials) > 1 else "trial"
    return f"needs at least the memory of {noun} {' and '.join(trials)}, which ran out of it"

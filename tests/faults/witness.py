"""A store and a scheduler that log launches and acknowledged ends, outside of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from db.store import Store
from db.write import sweeps
from db.write.writes import Ended, MeasuredEnd, Recorded
from orchestrator.cluster.contract import Prober, Scheduler, SchedulerEvent, Slots
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.machines.packing import FreeOnNode, Shape
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import TrialRequest
from orchestrator.core.trial.reserved_time import Leased
from tests.faults.history import Log, Seen

WITHOUT_A_NUMBER = (TrialState.FAILED, TrialState.OUT_OF_MEMORY)


class WitnessedStore(Store):
    """Writes each end into the log once the store has acknowledged it."""

    log: Log

    @classmethod
    def seen_by(cls, log: Log, database_url: str, **options: Any) -> Self:
        store = cls.open(database_url, **options)
        store.log = log
        return store

    def as_another(self) -> Self:
        """Be another orchestrator than the process that this one was forked from."""
        self._token = sweeps.new_token()
        self._database.engine.dispose(close=False)  # its connections belong to that process
        return self

    def record_ends(self, ends: Sequence[Ended], *, epoch: int) -> list[Recorded]:
        recorded = super().record_ends(ends, epoch=epoch)
        for end, came_to in zip(ends, recorded, strict=True):
            if isinstance(end.outcome, MeasuredEnd):
                if came_to.counts:
                    self.log.note(
                        Seen.MEASURED,
                        end.trial_id,
                        end.attempt,
                        end.outcome.measurement.tokens_per_second_per_gpu,
                    )
            elif came_to.state in WITHOUT_A_NUMBER:
                # Else it waits for another attempt, or a repeat failed.
                self.log.note(Seen.ENDED, end.trial_id, end.attempt)
        return recorded


class WitnessedScheduler:
    """Passes everything on, and writes each start into the log before it."""

    def __init__(self, inner: Scheduler, log: Log) -> None:
        self._inner, self._log = inner, log

    @property
    def slots(self) -> Slots:
        return self._inner.slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return self._inner.free_on_nodes()

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        self._log.note(Seen.LAUNCHED, request.trial_id, request.attempt)
        self._inner.start(request, shape, nodes)

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        return self._inner.poll(timeout_seconds)

    def cancel(self, trial_id: int) -> None:
        self._inner.cancel(trial_id)

    def leased(self) -> Leased:
        return self._inner.leased()

    def close(self) -> None:
        self._inner.close()


class WitnessedProber(WitnessedScheduler):
    """One whose nodes can be looked at."""

    def __init__(self, inner: Scheduler, prober: Prober, log: Log) -> None:
        super().__init__(inner, log)
        self._prober = prober

    def start_id(self, node: str) -> str:
        return self._prober.start_id(node)

    def begin_probes(self, nodes: Collection[str]) -> None:
        self._prober.begin_probes(nodes)

    def probed(self) -> Mapping[str, NodeFacts | str]:
        return self._prober.probed()


def witnessed(inner: Scheduler, log: Log) -> Scheduler:
    """The scheduler, with every launch in the log."""
    return (
        WitnessedProber(inner, inner, log)
        if isinstance(inner, Prober)
        else WitnessedScheduler(inner, log)
    )

"""A scheduler that runs nothing: each attempt ends as a script says.

The loop cannot tell it from Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.cluster.contract import Finished, Placed, Progressed, SchedulerEvent, Slots
from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from orchestrator.core.trial.reserved_time import Leased

# Seconds of a step, the result of every rank, or how it fails.
Script = Callable[[TrialRequest], float | RankResult | FailureKind]


MEMORY = {FailureKind.OOM_GPU: MemoryShortage(is_reported=True)}


class FakeScheduler:
    """`slots` free slots on one node, or those of `nodes`; attempts end in the order they were
    started, one per poll, held for `seconds`. The first ends once `first_among` run.
    """

    def __init__(
        self,
        script: Script,
        *,
        slots: int = 2,
        device: Device = Device.CPU,
        device_name: str | None = None,
        nodes: Mapping[str, int] | None = None,
        seconds: Callable[[TrialRequest], float] = lambda _: 1.0,
        first_among: int = 1,
    ) -> None:
        self._script, self._seconds = script, seconds
        self._first_among = first_among
        at_once = 1 if device is Device.CPU else None
        self._slots = Slots(
            device=device,
            device_name=device_name,
            nodes=nodes or {"here": slots},
            usual_at_once=at_once,
        )
        self._free_slots = FreeSlots(self._slots.nodes)
        self._running: dict[int, tuple[TrialRequest, Shape]] = {}
        self._cancelled: set[int] = set()
        # The nodes on which each trial ran last.
        self.nodes_of: dict[int, Sequence[str]] = {}
        self._reserved_gpu_seconds = 0.0
        # The idle time to report; a test may set it.
        self.idle_gpu_seconds = 0.0
        self.started: list[tuple[Layout, int]] = []
        self.most_at_once = 0
        self.closed = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def slots(self) -> Slots:
        return self._slots

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        return {}

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        assert request.trial_id not in self._running
        # Raises where a slot would be given twice.
        self._free_slots.take(request.trial_id, shape, nodes, ends_at=0.0)
        self.nodes_of[request.trial_id] = nodes
        self._running[request.trial_id] = (request, shape)
        self.started.append((request.layout, request.attempt))
        self.most_at_once = max(self.most_at_once, len(self._running))

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        if not self._running or self.most_at_once < self._first_among:
            return []
        trial_id, (request, shape) = next(iter(self._running.items()))
        del self._running[trial_id]
        self._free_slots.give_back(trial_id)
        reserved = self._seconds(request) * shape.num_slots
        self._reserved_gpu_seconds += reserved
        node = self.nodes_of[trial_id][0]
        events: list[SchedulerEvent] = [Placed(trial_id=trial_id, nodes=self.nodes_of[trial_id])]
        ending = FailureKind.CANCELLED if trial_id in self._cancelled else self._script(request)
        self._cancelled.discard(trial_id)
        if isinstance(ending, FailureKind):
            failure = Failure(
                kind=ending,
                message=f"scripted {ending}",
                node=node,
                memory=MEMORY.get(ending),
            )
            report = NodeReport(
                node=node, ranks=[RankOutcome(rank=0, exit_code=1)], failure=failure
            )
            return [
                *events,
                Finished(
                    trial_id=trial_id,
                    reports=[report],
                    failure=report.failure,
                    gpu_seconds=reserved,
                ),
            ]
        ranks = [
            RankOutcome(
                rank=rank,
                exit_code=0,
                result=ending
                if isinstance(ending, RankResult)
                else RankResult(
                    step_seconds=[ending] * 6,
                    phase_seconds={Phase.START: 0.1, Phase.STEADY: 6 * ending},
                    peak_memory_allocated_bytes=1000 + rank,
                    stack=Stack(torch="2.13.0"),
                ),
            )
            for rank in range(request.layout.world_size)
        ]
        return [
            *events,
            Progressed(trial_id=trial_id, phase=Phase.STEADY, step=3),
            Finished(
                trial_id=trial_id,
                reports=[NodeReport(node=node, ranks=ranks)],
                failure=None,
                gpu_seconds=reserved,
            ),
        ]

    def cancel(self, trial_id: int) -> None:
        self._cancelled.add(trial_id)

    def leased(self) -> Leased:
        reserved = self._reserved_gpu_seconds + self.idle_gpu_seconds
        return Leased(reserved=reserved, idle=self.idle_gpu_seconds, capacity=reserved)

    def close(self) -> None:
        self.closed = True

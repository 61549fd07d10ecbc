"""What a scheduler is asked to run and what it says back: plain values, shared by the Ray scheduler and its scripted twin in tests.

And what follows from such values alone: the gang of each cell, how far one is, and what it died of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from orchestrator.core.errors import ResourcesInsufficient
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.machines.packing import FreeOnNode, FreeSlots, Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, Failure, FailureKind
from orchestrator.core.trial.failures import is_aftermath
from orchestrator.core.trial.protocol import Device, Heartbeat, NodeReport, Phase, TrialRequest
from orchestrator.core.trial.reserved_time import Leased


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What a cluster has, as seen last."""

    device: Device
    device_name: str | None  # as the driver calls it; None on CPU or where nobody asked
    nodes: Mapping[str, int]  # slots by the node's name, which no two share
    usual_at_once: int | None = (
        None  # trials beside each other where the sweep file says nothing; None: as many as fit
    )

    @cached_property
    def total(self) -> int:
        return sum(self.nodes.values())

    @property
    def per_node(self) -> int:
        return max(self.nodes.values(), default=0)

    @property
    def by_size(self) -> list[int]:
        """The slots of each node, the largest first."""
        return sorted(self.nodes.values(), reverse=True)

    def hold(self, shape: Shape) -> bool:
        """Whether the empty cluster can hold such a gang. Ray never says "impossible", so we ask ourselves."""
        return FreeSlots(self.nodes).holds(shape)


def shapes_of(cells: Iterable[Cell], slots: Slots, *, gpus_per_node: int) -> dict[Cell, Shape]:
    """The gang of each cell. Raises ResourcesInsufficient when the empty cluster cannot hold one: it never will."""
    unit = "GPUs" if slots.device is Device.CUDA else "cores (without GPUs a slot is a core)"
    if not slots.nodes:
        raise ResourcesInsufficient(
            "the sweep asks for GPUs, and there are none. Use device: cpu, --ray-address of a cluster that has them, or --simulate"
        )
    shapes = {}
    for cell in cells:
        try:
            shape = Shape.of(cell.num_gpus, gpus_per_node=gpus_per_node)
        except ValueError as exc:
            raise ResourcesInsufficient(f"gpus: {cell.num_gpus}: {exc}") from exc
        if not slots.hold(shape):
            raise ResourcesInsufficient(
                f"gpus: {cell.num_gpus} needs {shape.num_nodes} node(s) with {shape.slots_per_node} {unit} each; here are"
                f" {slots.by_size}. Lower gpus, or give --ray-address of a cluster that has them"
            )
        shapes[cell] = shape
    return shapes


def least_advanced(heartbeats: Sequence[Heartbeat | None]) -> Heartbeat | None:
    """What every node has reached; None while one of them has not said yet how far it is."""
    known = [heartbeat for heartbeat in heartbeats if heartbeat is not None]
    if len(known) < len(heartbeats):
        return None
    return min(
        known,
        key=lambda heartbeat: (tuple(Phase).index(heartbeat.phase), heartbeat.step),
        default=None,
    )


def first_failure(reports: Sequence[NodeReport]) -> Failure | None:
    """The gang's: what one node died of, not what others then suffered. An out-of-memory explains the rest, whenever it was seen."""
    bad = [
        (report.failure, report.failed_at_unix_seconds or 0.0)
        for report in reports
        if report.failure is not None
    ]

    def order(of: tuple[Failure, float]) -> tuple[bool, bool, bool, float]:
        failure, at = of
        return (
            failure.kind is FailureKind.CANCELLED,
            failure.kind not in OUT_OF_MEMORY_KINDS,
            is_aftermath(failure),
            at,
        )

    return min(bad, key=order, default=(None, 0.0))[0]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The gang of an attempt has its nodes; its ranks are being started."""

    trial_id: int
    nodes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """A running attempt reached a phase and step: those of its least advanced rank, which the others wait for, on whatever node."""

    trial_id: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An attempt is over, and none of its processes is left. `failure` is the first bad rank's, over all nodes."""

    trial_id: int
    reports: Sequence[NodeReport]
    failure: Failure | None
    gpu_seconds: float  # held for it, from the moment its gang stood and was its own to clean-up
    shared_nodes: bool | None = (
        None  # another gang of this scheduler ran on one of its nodes meanwhile; None: it was never placed
    )


SchedulerEvent = Placed | Progressed | Finished


class Scheduler(Protocol):
    """Starts gangs and reports how they ended. One attempt of a trial at a time."""

    @property
    def slots(self) -> Slots:
        """May change from poll to poll: nodes come and go."""
        ...

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        """What one gang can have of nodes where slots are leased: on others an agent has to start first, and all that is free is one room."""
        ...

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        """Begin an attempt on these nodes, in rank order, whose slots are free; its events come from `poll`."""
        ...

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        """Wait until something happened, or the time is over."""
        ...

    def cancel(self, trial_id: int) -> None:
        """End an attempt; its `Finished` with failure kind cancelled still comes."""
        ...

    def leased(self) -> Leased:
        """What its gangs have held so far, also after it was closed."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Prober(Protocol):
    """A scheduler whose nodes are real machines, and can be looked at while trials run on others of them."""

    def life_of(self, node: str) -> str:
        """Changes when a node has gone and come back under its name: what it said of itself may be true no more."""
        ...

    def begin_looks(self, nodes: Collection[str]) -> None:
        """Begin to look at nodes on which nothing of ours runs. One that is well has answered within seconds; nobody waits for it here."""
        ...

    def looks(self) -> Mapping[str, NodeFacts | str]:
        """What nodes have said of themselves since this was asked last, by `poll`; a text for one that does not answer."""
        ...

"""The contract of schedulers: orders to run and reports, for real, simulated and scripted ones.

Also computes what follows from them alone: the gang of each cell, its progress and its failure.
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
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.failures import cause_order
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, Heartbeat, Phase, RankResult, TrialRequest
from orchestrator.core.trial.reserved_time import Leased


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of a cluster at the last request."""

    device: Device
    # The driver's, else Ray's (core/problem/device_name.py); None: unknown, as on CPUs.
    device_name: str | None
    nodes: Mapping[str, int]  # unique name -> slots
    # Trials at a time if the sweep file says nothing; None: as many as fit.
    usual_at_once: int | None = None
    # How to get more of them, as the end of a message.
    how_to_get_more: str = "give --ray-address of a cluster that has them"

    @cached_property
    def total(self) -> int:
        return sum(self.nodes.values())

    @property
    def per_node(self) -> int:
        return max(self.nodes.values(), default=0)

    @property
    def by_size(self) -> list[int]:
        """Slots of the nodes, in descending order."""
        return sorted(self.nodes.values(), reverse=True)

    def hold(self, shape: Shape) -> bool:
        """Return whether the empty cluster can hold such a gang; Ray would wait forever."""
        return FreeSlots(self.nodes).holds(shape)


def shapes_of(
    cells: Iterable[Cell], slots: Slots, *, gpus_per_node: int, device: str
) -> dict[Cell, Shape]:
    """Return the gang of each cell. Raises ResourcesInsufficient if no empty cluster holds one.

    `device` is that of the sweep file.
    """
    is_cuda = slots.device is Device.CUDA
    unit, meaning = ("GPU", "") if is_cuda else ("core", " (without GPUs a slot is a core)")
    if not slots.nodes:
        raise ResourcesInsufficient(
            f"device: {device} asks for GPUs, and there are none."
            " Use device: cpu, --ray-address of a cluster that has them, or --simulate"
        )
    shapes = {}
    for cell in cells:
        try:
            shape = Shape.of(cell.num_gpus, gpus_per_node=gpus_per_node)
        except ValueError as exc:
            raise ResourcesInsufficient(f"gpus: {cell.num_gpus}: {exc}") from exc
        if not slots.hold(shape):
            raise ResourcesInsufficient(
                f"gpus: {cell.num_gpus} needs {_nodes_with(shape, unit)}{meaning};"
                f" here {_found(slots.by_size, unit)}."
                f" Lower gpus, or {slots.how_to_get_more}"
            )
        shapes[cell] = shape
    return shapes


def _nodes_with(shape: Shape, unit: str) -> str:
    """`32 nodes with 2 cores each`, `1 node with 8 GPUs`."""
    each = " each" if shape.num_nodes > 1 else ""
    return f"{_some(shape.num_nodes, 'node')} with {_some(shape.slots_per_node, unit)}{each}"


def _found(sizes: Sequence[int], unit: str) -> str:
    """`is 1 node with 2 cores`, `are 3 nodes with 8 GPUs or fewer`."""
    verb, most = "is" if len(sizes) == 1 else "are", max(sizes)
    spread = " or fewer" if min(sizes) < most else "" if len(sizes) == 1 else " each"
    return f"{verb} {_some(len(sizes), 'node')} with {_some(most, unit)}{spread}"


def _some(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def least_advanced(heartbeats: Sequence[Heartbeat | None]) -> Heartbeat | None:
    """Return the least progress of all nodes; None until each of them has a heartbeat."""
    known = [heartbeat for heartbeat in heartbeats if heartbeat is not None]
    if len(known) < len(heartbeats):
        return None
    phases = tuple(Phase)
    return min(known, key=lambda each: (phases.index(each.phase), each.step), default=None)


def first_failure(reports: Sequence[NodeReport]) -> Failure | None:
    """Return the gang's failure: the one that caused the others.

    None if a node has the gang's numbers: the others failed because it ended.
    """
    if any(report.has_enough for report in reports):
        return None
    failed = [
        (report.failure, report.failed_at_unix_seconds or 0.0)
        for report in reports
        if report.failure is not None
    ]
    return min(failed, key=lambda one: cause_order(*one))[0] if failed else None


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The gang of an attempt has its nodes, and its ranks are starting."""

    trial_id: int
    nodes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """All ranks of a running attempt have reached a phase and step."""

    trial_id: int
    phase: Phase
    step: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An attempt is over, and no process of it is left. `failure` is the first bad rank's."""

    trial_id: int
    reports: Sequence[NodeReport]
    failure: Failure | None
    gpu_seconds: float  # reserved for it alone, clean-up included
    # True if another gang of this scheduler ran on one of its nodes meanwhile; None: not placed.
    shared_nodes: bool | None = None

    @cached_property
    def results(self) -> Sequence[RankResult]:
        """The results that its ranks left."""
        return [
            outcome.result
            for report in self.reports
            for outcome in report.ranks
            if outcome.result is not None
        ]


SchedulerEvent = Placed | Progressed | Finished


class Scheduler(Protocol):
    """Starts gangs and reports how they ended. A trial has one attempt at a time."""

    @property
    def slots(self) -> Slots:
        """May change with each `poll`: nodes come and go."""
        ...

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        """Return the slots that one gang can have on nodes with leases.

        On other nodes an agent has to start first, and one gang can have all free slots.
        """
        ...

    def start(self, request: TrialRequest, shape: Shape, nodes: Sequence[str]) -> None:
        """Begin an attempt on free slots of these nodes, in rank order."""
        ...

    def poll(self, timeout_seconds: float) -> list[SchedulerEvent]:
        """Wait until there are events, or the time is over."""
        ...

    def cancel(self, trial_id: int) -> None:
        """End an attempt; its `Finished` with failure kind cancelled still comes."""
        ...

    def leased(self) -> Leased:
        """Return the slot-seconds that gangs have reserved so far, also after `close`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Prober(Protocol):
    """A scheduler whose nodes are real machines, which can be probed while trials run on others."""

    def start_id(self, node: str) -> str:
        """Return an id that changes when the node restarts: earlier facts may no longer hold."""
        ...

    def begin_probes(self, nodes: Collection[str]) -> None:
        """Begin to probe nodes on which no attempt runs. A healthy node takes seconds."""
        ...

    def probed(self) -> Mapping[str, NodeFacts | str]:
        """Return the results that `poll` received; a text for a node that does not answer."""
        ...

"""Leases: slots of a node that Ray has reserved for us, with an agent in them, kept from one attempt to the next.

A lease is of one node, and a gang has a part of one on each of its nodes, whichever attempts were there before: several narrow gangs run
beside one agent. A lease that is lost is thrown away, for Ray re-homes placement groups silently, and those of other nodes stay.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray.agent import CLOSE_SECONDS, NodeAgent
from orchestrator.cluster.ray.bounded_calls import first_line, within
from orchestrator.cluster.ray.cluster import ClusterNodes, Head, bundle
from orchestrator.core.errors import ClusterUnavailable, ResourcesInsufficient
from orchestrator.core.machines.packing import FreeOnNode
from orchestrator.core.trial.communication import passed
from orchestrator.core.trial.protocol import Device

logger = logging.getLogger(__name__)

REMOVE_SECONDS = 10.0  # for the head to remove placement groups: milliseconds where it is well
NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
CALLS_BESIDE = 3  # kill and progress, beside one run for each slot at most
SETTLE_SECONDS = 5.0  # slots just given back take up to one heartbeat of the head to show


@dataclass(eq=False, kw_only=True)
class Lease:
    """Slots of one node, and the agent in them."""

    node: str
    node_id: str  # Ray's: the node may go and come back
    num_slots: int
    group: PlacementGroup
    agent: Any
    asked_at: float  # monotonic
    reserved_at: float | None = None  # monotonic; None until that is known
    address: str | None = None  # where other nodes reach its node; None until the agent answers
    parts: list[Part] = field(default_factory=list)  # that attempts have
    used_at: float = 0.0  # monotonic; when the last attempt on it ended
    num_served: int = 0  # attempts that it served at once when it was given back, or lost

    @property
    def is_shared(self) -> bool:
        """Whether it serves several attempts at once, or did when it was lost: which of them its agent died of, nobody knows."""
        return max(len(self.parts), self.num_served) > 1

    @property
    def is_idle(self) -> bool:
        return not self.parts

    @property
    def free_slots(self) -> list[int]:
        """Counted from 0, as the agent counts them."""
        taken = {slot for part in self.parts for slot in part.slots}
        return [slot for slot in range(self.num_slots) if slot not in taken]


@dataclass(eq=False, kw_only=True)
class Part:
    """What one attempt has of a lease: some of its slots, and the agent's launcher for the first of them."""

    lease: Lease
    slots: tuple[int, ...]
    taken_at: float  # monotonic
    has_begun: bool = False  # the attempt holds it: Ray has reserved its slots
    gpu_seconds: float = 0.0  # that the attempt held; known once it is over, or the lease lost

    @property
    def node(self) -> str:
        return self.lease.node

    @property
    def agent(self) -> Any:
        return self.lease.agent


class Leases:
    """All that one scheduler holds of a cluster."""

    def __init__(self, nodes: ClusterNodes, head: Head, meter: LeaseMeter, *, root: str) -> None:
        self._nodes, self._head, self._meter, self._root = nodes, head, meter, root
        self._agent_class = ray.remote(NodeAgent)
        self._on: dict[str, list[Lease]] = {}  # by node; none without a lease

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        """What a gang can have of the nodes on which there are leases."""
        free_on_nodes = {}
        for node, here in self._on.items():
            standing = max(len(lease.free_slots) for lease in here)
            unleased = self._nodes.slots.nodes.get(node, 0) - sum(
                lease.num_slots for lease in here if not lease.is_idle
            )
            free_on_nodes[node] = FreeOnNode(standing=standing, widest=max(standing, unleased))
        return free_on_nodes

    def take(self, num_slots: int, nodes: Sequence[str], *, program: str) -> list[Part]:
        """So many slots on each of the nodes, in their order: of leases that stand there, and of new ones in the room of idle others.

        Raises ResourcesInsufficient where attempts hold the slots.
        """
        found = {
            node: lease for node in nodes if (lease := self._with_room(num_slots, node)) is not None
        }
        missing = [node for node in nodes if node not in found]
        self._make_room(num_slots, missing)
        for node in missing:
            found[node] = self._form(num_slots, node, program)
        return [self._part(found[node], num_slots) for node in nodes]

    def stand(self, parts: Sequence[Part]) -> None:
        """The attempt's gang is complete, or given up: it has held what was formed for it from the moment that Ray had reserved the slots."""
        for part in parts:
            lease = part.lease
            if (
                lease.reserved_at is None
                and self._has(lease)
                and (reserved_at := self._reserved_at(lease)) is not None
            ):
                lease.reserved_at = min(reserved_at, time.monotonic())
                self._meter.stands(lease, num_slots=lease.num_slots, at=lease.reserved_at)
            self._begin(part)

    def put_back(self, parts: Sequence[Part]) -> float:
        """The attempt is over, and they wait for another. The GPU-seconds that it held."""
        for part in parts:
            self._end(part, time.monotonic())
        return sum(part.gpu_seconds for part in parts)

    def discard(self, parts: Sequence[Part]) -> float:
        """Their agents are gone, or cannot be trusted any more: end them at once, whatever else they serve. The GPU-seconds that the attempt held."""
        gpu_seconds = self.put_back(parts)
        self._remove(
            [lease for lease in dict.fromkeys(part.lease for part in parts) if self._has(lease)]
        )
        return gpu_seconds

    def vacate(self, nodes: Collection[str]) -> None:
        """Give back what stands idle on these nodes."""
        self._remove([lease for node in nodes for lease in self._on.get(node, ()) if lease.is_idle])

    def discard_lost(self) -> None:
        """What stood idle on nodes that are no more."""
        self._remove(
            [
                lease
                for lease in self._all
                if lease.is_idle and not self._nodes.is_alive(lease.node_id)
            ]
        )

    def close(self) -> None:
        """End all agents and their ranks. Placement groups go with their driver."""
        if not self._head.is_gone:
            self._close_agents(self._all)
        for lease in self._all:
            self._returned(lease)
        self._on.clear()

    @property
    def _all(self) -> list[Lease]:
        return [lease for here in self._on.values() for lease in here]

    def _has(self, lease: Lease) -> bool:
        return lease in self._on.get(lease.node, ())

    @property
    def _unit(self) -> str:
        return "GPUs" if self._nodes.device is Device.CUDA else "cores"

    def _with_room(self, num_slots: int, node: str) -> Lease | None:
        """The lease there that so many slots leave the fewest of."""
        roomy = (lease for lease in self._on.get(node, ()) if len(lease.free_slots) >= num_slots)
        return min(roomy, key=lambda lease: (len(lease.free_slots), -lease.used_at), default=None)

    def _part(self, lease: Lease, num_slots: int) -> Part:
        part = Part(
            lease=lease, slots=tuple(lease.free_slots[:num_slots]), taken_at=time.monotonic()
        )
        lease.parts.append(part)
        self._begin(part)
        return part

    def _begin(self, part: Part) -> None:
        """Nothing happens before the slots are reserved, nor where the lease was lost before."""
        if not part.has_begun and part.lease.reserved_at is not None and part in part.lease.parts:
            part.has_begun = True
            self._meter.begins(
                part, num_slots=len(part.slots), at=max(part.taken_at, part.lease.reserved_at)
            )

    def _end(self, part: Part, now: float) -> None:
        """The attempt has it no longer; nothing happens where the lease was lost before."""
        if part in part.lease.parts:
            part.lease.parts.remove(part)
            part.lease.used_at, part.gpu_seconds = now, self._meter.ends(part, now)

    def _returned(self, lease: Lease) -> None:
        """Its slots are no longer ours, nor those of the attempts on it."""
        now, lease.num_served = time.monotonic(), len(lease.parts)
        for part in list(lease.parts):
            self._begin(part)
            self._end(part, now)
        self._meter.returned(lease, now)

    def _make_room(self, num_slots: int, nodes: Sequence[str]) -> None:
        """Give idle leases back, least recently used first, until each of these nodes has the slots free."""
        leaving: list[Lease] = []
        for node in nodes:
            here, has = self._on.get(node, ()), self._nodes.slots.nodes.get(node, 0)
            idle = sorted(
                (lease for lease in here if lease.is_idle), key=lambda lease: lease.used_at
            )
            held = sum(lease.num_slots for lease in here)
            while held + num_slots > has and idle:
                leaving.append(idle.pop(0))
                held -= leaving[-1].num_slots
            if held + num_slots > has:
                taken = sum(len(part.slots) for lease in here for part in lease.parts)
                raise ResourcesInsufficient(
                    f"a trial needs {num_slots} {self._unit} on {node}, which has {has}, {taken} of them taken;"
                    f" the cluster's nodes have {self._nodes.slots.by_size}"
                )
        if leaving:
            self._close_agents(leaving)
            self._remove(leaving)
            self._await_free(sum(lease.num_slots for lease in leaving))

    def _form(self, num_slots: int, node: str, program: str) -> Lease:
        reserved = bundle(num_slots, self._nodes.device)
        node_id = self._nodes.id_of(node)
        selector = [{NODE_ID: node_id}]
        group = self._head.ask(
            lambda: placement_group(
                [reserved], strategy="STRICT_PACK", bundle_label_selector=selector
            )
        )
        agent = self._head.ask(
            lambda: self._agent_class.options(
                num_cpus=reserved["CPU"],
                num_gpus=reserved.get("GPU", 0.0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=num_slots + CALLS_BESIDE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=0
                ),
            ).remote(self._root, program, node, passed(os.environ))
        )
        lease = Lease(
            node=node,
            node_id=node_id,
            num_slots=num_slots,
            group=group,
            agent=agent,
            asked_at=time.monotonic(),
        )
        self._keep(lease)
        return lease

    def _keep(self, lease: Lease) -> None:
        self._on.setdefault(lease.node, []).append(lease)

    def _forget(self, lease: Lease) -> None:
        self._on[lease.node].remove(lease)
        if not self._on[lease.node]:
            del self._on[lease.node]

    def _remove(self, leases: Sequence[Lease]) -> None:
        """End the agents, whatever they do, and give the slots back."""
        for lease in leases:
            try:
                self._head.ask(partial(ray.kill, lease.agent))
            except RayError as exc:
                logger.debug("Agent already gone: %s", first_line(exc))
            self._forget(lease)
            self._returned(lease)

        def remove() -> None:
            for lease in leases:
                remove_placement_group(lease.group)

        if leases and not within(REMOVE_SECONDS, remove, is_vain=lambda: self._head.is_gone):
            self._head.lost()
            raise ClusterUnavailable(
                "Ray does not give slots back: it is gone, or going. Nothing acknowledged is lost; the same command goes on"
            )

    def _close_agents(self, leases: Sequence[Lease]) -> None:
        try:
            ray.get([lease.agent.close.remote() for lease in leases], timeout=CLOSE_SECONDS)
        except RayError as exc:
            logger.warning("An agent did not close by itself: %s", first_line(exc))

    def _await_free(self, num_slots: int) -> None:
        """Wait until the head sees so many slots free: a group asked for earlier waits a whole second in Ray's back-off."""
        resource = "GPU" if self._nodes.device is Device.CUDA else "CPU"
        held = sum(lease.num_slots for lease in self._all)
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            available = self._head.ask(ray.available_resources)
            if available.get(resource, 0.0) >= min(num_slots, self._nodes.slots.total - held):
                return
            time.sleep(0.01)

    def _reserved_at(self, lease: Lease) -> float | None:
        """When Ray had reserved its slots, by its own account of how long that took; None: it has not, or is gone with its account."""
        if self._head.is_gone:
            return None
        try:
            told = self._head.ask(lambda: placement_group_table(lease.group))
        except (RayError, ClusterUnavailable):
            return None
        if told.get("state") != "CREATED":
            return None
        return float(lease.asked_at + told["stats"]["end_to_end_creation_latency_ms"] / 1e3)

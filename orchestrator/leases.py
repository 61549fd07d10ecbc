"""Leases: slots of a node that Ray has reserved for us, with an agent in them, kept from one attempt to the next.

A lease is of one node, and a gang is one lease on each of its nodes, whichever attempts they served before: a gang of another size finds
the agents of its nodes standing. One that is lost is thrown away, for Ray re-homes placement groups silently, and the others stay.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.core.communication import passed
from orchestrator.core.errors import ClusterUnavailable, ResourcesInsufficient
from orchestrator.core.protocol import Device
from orchestrator.lease_meter import LeaseMeter
from orchestrator.node_agent import CLOSE_SECONDS, NodeAgent
from orchestrator.ray_cluster import ClusterNodes, Head, bundle, first_line, within

logger = logging.getLogger(__name__)

REMOVE_SECONDS = 10.0  # for the head to remove placement groups: milliseconds where it is well
NODE_ID = "ray.io/node-id"  # the label that Ray gives every node
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
    address: str | None = None  # where other nodes reach its node; None until the agent answers
    is_taken: bool = True  # by an attempt
    used_at: float = 0.0  # monotonic; when the last attempt on it ended


class Leases:
    """All that one scheduler holds of a cluster."""

    def __init__(self, nodes: ClusterNodes, head: Head, meter: LeaseMeter, *, root: str) -> None:
        self._nodes, self._head, self._meter, self._root = nodes, head, meter, root
        self._agent_class = ray.remote(NodeAgent)
        self._held: list[Lease] = []

    def standing(self) -> Mapping[int, Sequence[str]]:
        """The nodes on which an agent waits idle, by the slots that it has."""
        found: dict[int, list[str]] = {}
        for lease in self._idle():
            found.setdefault(lease.num_slots, []).append(lease.node)
        return found

    def take(self, num_slots: int, nodes: Sequence[str], *, program: str) -> list[Lease]:
        """A lease on each of the nodes, in their order: those that stand there, and new ones in the room of idle others.

        Raises ResourcesInsufficient where attempts hold the slots.
        """
        found = {lease.node: lease for lease in self._idle() if lease.num_slots == num_slots and lease.node in nodes}
        missing = [node for node in nodes if node not in found]
        self._make_room(num_slots, missing, keep=set(found.values()))
        for lease in found.values():
            lease.is_taken = True
            if self._meter.knows(lease):
                self._meter.begins(lease, time.monotonic())
        for node in missing:
            found[node] = self._form(num_slots, node, program)
        return [found[node] for node in nodes]

    def stand(self, leases: Sequence[Lease]) -> None:
        """The attempt's gang is complete, or given up: it has held the leases formed for it from the moment that Ray had reserved their slots."""
        for lease in leases:
            if self._meter.knows(lease):
                continue
            reserved_at = self._reserved_at(lease)
            if reserved_at is not None:
                at = min(reserved_at, time.monotonic())
                self._meter.stands(lease, num_slots=lease.num_slots, at=at)
                self._meter.begins(lease, at)

    def put_back(self, leases: Sequence[Lease]) -> float:
        """The attempt is over, and they wait for another. The GPU-seconds that it held."""
        now, gpu_seconds = time.monotonic(), 0.0
        for lease in leases:
            gpu_seconds += self._meter.ends(lease, now)
            lease.is_taken, lease.used_at = False, now
        return gpu_seconds

    def discard(self, leases: Sequence[Lease]) -> float:
        """Their agents are gone, or cannot be trusted any more: end them at once. The GPU-seconds that an attempt held."""
        gpu_seconds = self.put_back(leases)
        self._remove(leases)
        return gpu_seconds

    def vacate(self, nodes: Collection[str]) -> None:
        """Give back what stands idle on these nodes."""
        self.discard([lease for lease in self._idle() if lease.node in nodes])

    def discard_lost(self) -> None:
        """What stood idle on nodes that are no more."""
        self.discard([lease for lease in self._idle() if not self._nodes.is_alive(lease.node_id)])

    def close(self) -> None:
        """End all agents and their ranks. Placement groups go with their driver."""
        if not self._head.is_gone:
            self._close_agents(self._held)
        for lease in self._held:
            self._meter.returned(lease, time.monotonic())
        self._held.clear()

    @property
    def _unit(self) -> str:
        return "GPUs" if self._nodes.device is Device.CUDA else "cores"

    def _idle(self) -> list[Lease]:
        """Least recently used first."""
        return sorted((lease for lease in self._held if not lease.is_taken), key=lambda lease: lease.used_at)

    def _make_room(self, num_slots: int, nodes: Sequence[str], *, keep: set[Lease]) -> None:
        """Give idle leases back, least recently used first, until each of these nodes has the slots free."""
        leaving: list[Lease] = []
        for node in nodes:
            here, has = [lease for lease in self._held if lease.node == node], self._nodes.slots.nodes.get(node, 0)
            idle = sorted((lease for lease in here if not lease.is_taken and lease not in keep), key=lambda lease: lease.used_at)
            held = sum(lease.num_slots for lease in here)
            while held + num_slots > has and idle:
                leaving.append(idle.pop(0))
                held -= leaving[-1].num_slots
            if held + num_slots > has:
                raise ResourcesInsufficient(
                    f"a trial needs {num_slots} {self._unit} on {node}, which has {has}, {held} of them taken;"
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
        group = self._head.ask(lambda: placement_group([reserved], strategy="STRICT_PACK", bundle_label_selector=selector))
        agent = self._head.ask(
            lambda: self._agent_class.options(
                num_cpus=reserved["CPU"],
                num_gpus=reserved.get("GPU", 0.0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,  # run, beside kill and progress
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0),
            ).remote(self._root, program, node, passed(os.environ))
        )
        self._held.append(Lease(node=node, node_id=node_id, num_slots=num_slots, group=group, agent=agent, asked_at=time.monotonic()))
        return self._held[-1]

    def _remove(self, leases: Sequence[Lease]) -> None:
        """End the agents, whatever they do, and give the slots back."""
        for lease in leases:
            try:
                self._head.ask(partial(ray.kill, lease.agent))
            except RayError as exc:
                logger.debug("Agent already gone: %s", first_line(exc))
            self._held.remove(lease)
            self._meter.returned(lease, time.monotonic())

        def remove() -> None:
            for lease in leases:
                remove_placement_group(lease.group)

        if leases and not within(REMOVE_SECONDS, remove):
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
        held = sum(lease.num_slots for lease in self._held)
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

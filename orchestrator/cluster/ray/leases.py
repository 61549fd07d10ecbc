"""Leases: slots of a node that Ray has reserved for us, with an agent in them.

A lease is kept from one attempt to the next. It is on one node, and a gang has a part of one on
each of its nodes, so several narrow gangs run in one lease. A lost lease is discarded alone, since
Ray silently moves placement groups to other nodes.
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
from orchestrator.cluster.ray.cluster import ClusterNodes, RayHead, bundle
from orchestrator.core.errors import ClusterUnavailable, ResourcesInsufficient
from orchestrator.core.machines.packing import FreeOnNode
from orchestrator.core.trial.communication import passed
from orchestrator.core.trial.protocol import Device

logger = logging.getLogger(__name__)

REMOVE_SECONDS = 10.0  # to remove groups, usually milliseconds
NODE_ID = "ray.io/node-id"  # Ray's label of every node
# Kill and progress, in addition to runs.
OTHER_CALLS = 3
SETTLE_SECONDS = 5.0  # until the head sees returned slots


@dataclass(eq=False, kw_only=True)
class Lease:
    """Slots of one node, and the agent in them."""

    node: str
    node_id: str  # Ray's; new at each start
    num_slots: int
    group: PlacementGroup
    agent: Any
    asked_at: float  # monotonic
    reserved_at: float | None = None  # monotonic; None until known
    address: str | None = None  # of its node; the agent's answer
    parts: list[LeasePart] = field(default_factory=list)  # that attempts have
    used_at: float = 0.0  # monotonic; end of the last attempt
    num_served: int = 0  # attempts on it at its end

    @property
    def is_shared(self) -> bool:
        """True if it serves several attempts, or did when it was lost.

        Then it is unknown which of them ended its agent.
        """
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
class LeasePart:
    """Some slots of a lease, which one attempt has, and the agent's launcher for the first one."""

    lease: Lease
    slots: tuple[int, ...]
    taken_at: float  # monotonic
    has_begun: bool = False  # its slots are reserved
    # Time that the attempt had it; known once the attempt or the lease has ended.
    gpu_seconds: float = 0.0

    @property
    def node(self) -> str:
        return self.lease.node

    @property
    def agent(self) -> Any:
        return self.lease.agent


class Leases:
    """The leases of one scheduler."""

    def __init__(self, nodes: ClusterNodes, head: RayHead, meter: LeaseMeter, *, root: str) -> None:
        self._nodes, self._head, self._meter, self._root = nodes, head, meter, root
        self._agent_class = ray.remote(NodeAgent)
        self._on: dict[str, list[Lease]] = {}  # by node, if there are any

    def free_on_nodes(self) -> Mapping[str, FreeOnNode]:
        """Return what a gang can have of the nodes that have leases."""
        free_on_nodes = {}
        for node, here in self._on.items():
            standing = max(len(lease.free_slots) for lease in here)
            used = sum(lease.num_slots for lease in here if not lease.is_idle)
            unleased = self._nodes.slots.nodes.get(node, 0) - used
            free_on_nodes[node] = FreeOnNode(standing=standing, widest=max(standing, unleased))
        return free_on_nodes

    def take(self, num_slots: int, nodes: Sequence[str], *, program: str) -> list[LeasePart]:
        """Return a part with `num_slots` slots on each node, in order.

        Uses free slots of leases, and otherwise new leases, which replace idle ones if needed.
        Raises ResourcesInsufficient if attempts have the slots.
        """
        found = {
            node: lease for node in nodes if (lease := self._fitting(num_slots, node)) is not None
        }
        missing = [node for node in nodes if node not in found]
        self._return_idle(num_slots, missing)
        for node in missing:
            found[node] = self._form(num_slots, node, program)
        return [self._part(found[node], num_slots) for node in nodes]

    def begin(self, parts: Sequence[LeasePart]) -> None:
        """Meter what an attempt reserves, since its gang is complete or given up.

        A new lease counts from the moment that Ray had reserved its slots.
        """
        for part in parts:
            lease = part.lease
            if lease.reserved_at is None and self._has(lease):
                reserved_at = self._reserved_at(lease)
                if reserved_at is not None:
                    lease.reserved_at = min(reserved_at, time.monotonic())
                    self._meter.reserved(lease, num_slots=lease.num_slots, at=lease.reserved_at)
            self._begin(part)

    def put_back(self, parts: Sequence[LeasePart]) -> float:
        """Keep the leases of an attempt that is over. Returns its GPU-seconds."""
        for part in parts:
            self._end(part, time.monotonic())
        return sum(part.gpu_seconds for part in parts)

    def discard(self, parts: Sequence[LeasePart]) -> float:
        """End the agents of these parts at once, with all attempts on them.

        Returns the GPU-seconds of the attempt of these parts.
        """
        gpu_seconds = self.put_back(parts)
        leases = dict.fromkeys(part.lease for part in parts)
        self._remove([lease for lease in leases if self._has(lease)])
        return gpu_seconds

    def vacate(self, nodes: Collection[str]) -> None:
        """Return the idle leases of these nodes."""
        self._remove([lease for node in nodes for lease in self._on.get(node, ()) if lease.is_idle])

    def discard_lost(self) -> None:
        """Forget the idle leases of lost nodes."""
        idle = (lease for lease in self._all if lease.is_idle)
        self._remove([lease for lease in idle if not self._nodes.is_alive(lease.node_id)])

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

    def _fitting(self, num_slots: int, node: str) -> Lease | None:
        """Return the lease with the fewest free slots among those that have enough."""
        fitting = (lease for lease in self._on.get(node, ()) if len(lease.free_slots) >= num_slots)
        return min(fitting, key=lambda lease: (len(lease.free_slots), -lease.used_at), default=None)

    def _part(self, lease: Lease, num_slots: int) -> LeasePart:
        part = LeasePart(
            lease=lease, slots=tuple(lease.free_slots[:num_slots]), taken_at=time.monotonic()
        )
        lease.parts.append(part)
        self._begin(part)
        return part

    def _begin(self, part: LeasePart) -> None:
        """Do nothing before the slots are reserved, or if the lease was lost."""
        if not part.has_begun and part.lease.reserved_at is not None and part in part.lease.parts:
            part.has_begun = True
            self._meter.begins(
                part, num_slots=len(part.slots), at=max(part.taken_at, part.lease.reserved_at)
            )

    def _end(self, part: LeasePart, now: float) -> None:
        """The attempt no longer has the part; do nothing if the lease was lost before."""
        if part in part.lease.parts:
            part.lease.parts.remove(part)
            part.lease.used_at, part.gpu_seconds = now, self._meter.ends(part, now)

    def _returned(self, lease: Lease) -> None:
        """The slots are no longer ours, nor of the attempts on them."""
        now, lease.num_served = time.monotonic(), len(lease.parts)
        for part in list(lease.parts):
            self._begin(part)
            self._end(part, now)
        self._meter.returned(lease, now)

    def _return_idle(self, num_slots: int, nodes: Sequence[str]) -> None:
        """Return idle leases, least recently used first, until each node has the slots free."""
        returned: list[Lease] = []
        for node in nodes:
            here, has = self._on.get(node, ()), self._nodes.slots.nodes.get(node, 0)
            idle = sorted((each for each in here if each.is_idle), key=lambda each: each.used_at)
            leased = sum(lease.num_slots for lease in here)
            while leased + num_slots > has and idle:
                returned.append(idle.pop(0))
                leased -= returned[-1].num_slots
            if leased + num_slots > has:
                taken = sum(len(part.slots) for lease in here for part in lease.parts)
                raise ResourcesInsufficient(
                    f"a trial needs {num_slots} {self._unit} on {node}, which has {has},"
                    f" {taken} of them taken; the cluster's nodes have {self._nodes.slots.by_size}"
                )
        if returned:
            self._close_agents(returned)
            self._remove(returned)
            self._await_free(sum(lease.num_slots for lease in returned))

    def _form(self, num_slots: int, node: str, program: str) -> Lease:
        reserved, node_id = bundle(num_slots, self._nodes.device), self._nodes.id_of(node)
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
                max_concurrency=num_slots + OTHER_CALLS,
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
        """End the agents, whatever they do, and return the slots."""
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

        if leases and not within(REMOVE_SECONDS, remove, should_give_up=lambda: self._head.is_gone):
            self._head.lost()
            raise ClusterUnavailable(
                "Ray did not release slots: it has stopped, or is stopping."
                " Nothing acknowledged is lost; the same command continues"
            )

    def _close_agents(self, leases: Sequence[Lease]) -> None:
        try:
            ray.get([lease.agent.close.remote() for lease in leases], timeout=CLOSE_SECONDS)
        except RayError as exc:
            logger.warning(
                "An agent of Ray did not end by itself within %.0f s, and is ended: %s",
                CLOSE_SECONDS,
                first_line(exc),
            )

    def _await_free(self, num_slots: int) -> None:
        """Wait until the head sees `num_slots` slots free.

        A placement group that is requested earlier waits a second in Ray's back-off.
        """
        resource = "GPU" if self._nodes.device is Device.CUDA else "CPU"
        reserved = sum(lease.num_slots for lease in self._all)
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            available = self._head.ask(ray.available_resources)
            if available.get(resource, 0.0) >= min(num_slots, self._nodes.slots.total - reserved):
                return
            time.sleep(0.01)

    def _reserved_at(self, lease: Lease) -> float | None:
        """Return when Ray had reserved the slots, by its own measurement; None if unknown."""
        if self._head.is_gone:
            return None
        try:
            told = self._head.ask(lambda: placement_group_table(lease.group))
        except (RayError, ClusterUnavailable):
            return None
        if told.get("state") != "CREATED":
            return None
        return float(lease.asked_at + told["stats"]["end_to_end_creation_latency_ms"] / 1e3)

"""Looks at nodes of a Ray cluster: an actor on each, alone with the node's GPUs where that is wanted, ended once it has answered.

It waits for nobody: who polls says what is ready, and a node that never answers holds up no other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray.bounded_calls import first_line
from orchestrator.cluster.ray.cluster import ClusterNodes, Head
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.trial.protocol import Device
from orchestrator.node.probe import NodeProbe, ProbePlan, with_clock
from orchestrator.node.processes import age_seconds

LOOK_SECONDS = (
    150.0  # for a node to say how it is: torch from a cold disk, and two seconds of matrix products
)
LOOKS_AT_ONCE = 64  # an actor takes 0.1 GB and a second to start; simulated nodes share one machine
TIMES_ASKED_AGAIN = 3  # where a connection broke under a question: a node is not unfit for that, and the same answer does
CLOCK_ANSWER_SECONDS = (
    2.0  # a round trip takes milliseconds; the only time that anybody waits for a node
)


class RayProbe(NodeProbe):
    """Looks at the GPUs that Ray gave it alone, where it was given any: on others somebody else may be at work."""

    def age(self) -> float:
        """Seconds since Ray had its GPUs, and started this process for them."""
        return age_seconds(os.getpid())

    def gather(self, plan: ProbePlan, *, nvml: Any = None) -> NodeFacts:
        own = tuple(str(device) for device in ray.get_gpu_ids())
        return super().gather(replace(plan, devices=own) if own else plan, nvml=nvml)


@dataclass(eq=False, kw_only=True)
class _ProbeUnderWay:
    """One that is under way."""

    actor: Any
    num_gpus: int  # that it holds, once it answers at all
    age: Any  # the ref of how long it has held them
    facts: Any  # the ref of what it gathers
    began: float  # monotonic


class Probes:
    """Looks at nodes for one scheduler. What the probes hold of nodes is metered like a lease on which no attempt is."""

    def __init__(self, nodes: ClusterNodes, head: Head, meter: LeaseMeter) -> None:
        self._nodes, self._head, self._meter = nodes, head, meter
        self._actor_class = ray.remote(RayProbe)
        self._waiting: dict[
            str, tuple[ProbePlan, bool]
        ] = {}  # node -> what is asked of it, and whether with its GPUs
        self._under_way: dict[str, _ProbeUnderWay] = {}
        self._said: dict[str, NodeFacts | str] = {}

    def begin(self, plans: Collection[ProbePlan], *, reserve: bool) -> None:
        """Look at nodes, anew where a look is under way. `reserve`: with a node's GPUs, once they are free."""
        for plan in plans:
            self._said.pop(plan.node, None)
            self._end(plan.node)
            self._waiting[plan.node] = (plan, reserve)
        self._begin_next()

    def tell(self, facts: NodeFacts) -> None:
        """What is known of a node without an actor on it."""
        self._said[facts.node] = facts

    @property
    def refs(self) -> list[Any]:
        """What there is to wait for."""
        return [
            ref
            for look in self._under_way.values()
            for ref in (look.age, look.facts)
            if ref is not None
        ]

    def hear(self, ready: Collection[Any]) -> None:
        """Take in what is ready of `refs`, and give up who is late."""
        now, refs = time.monotonic(), set(ready)
        for node, look in list(self._under_way.items()):
            if look.age in refs:
                self._meter_from(look)
            if look.facts in refs:
                self._said[node] = self._answer(look)
            elif now - look.began > LOOK_SECONDS:
                self._said[node] = f"no answer within {LOOK_SECONDS:.0f} s"
            else:
                continue
            self._end(node)
        self._begin_next()

    def said(self) -> dict[str, NodeFacts | str]:
        """By node, what came since this was asked last."""
        said, self._said = self._said, {}
        return said

    def close(self) -> None:
        self._waiting.clear()
        for node in list(self._under_way):
            self._end(node)

    def _begin_next(self) -> None:
        while self._waiting and len(self._under_way) < LOOKS_AT_ONCE:
            node = next(iter(self._waiting))
            plan, reserve = self._waiting.pop(node)
            has_gpus = reserve and self._nodes.device is Device.CUDA
            num_gpus = self._nodes.slots.nodes.get(node, 0) if has_gpus else 0
            began = time.monotonic()
            actor = self._head.ask(partial(self._actor, node, num_gpus=num_gpus))
            look = _ProbeUnderWay(
                actor=actor,
                num_gpus=num_gpus,
                age=actor.age.remote(),
                facts=actor.gather.remote(plan),
                began=began,
            )
            self._under_way[node] = look

    def _actor(self, node: str, *, num_gpus: int) -> Any:
        return self._actor_class.options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=TIMES_ASKED_AGAIN,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._nodes.id_of(node), soft=False),
        ).remote()

    def _meter_from(self, look: _ProbeUnderWay) -> None:
        """It has its GPUs: since its process was started, unless that process had waited for work."""
        ref, look.age = look.age, None
        try:
            since = max(time.monotonic() - ray.get(ref), look.began)
        except RayError:
            return  # what it gathers says the same
        if look.num_gpus:
            self._meter.stands(look, num_slots=look.num_gpus, at=since)

    def _answer(self, look: _ProbeUnderWay) -> NodeFacts | str:
        try:
            facts: NodeFacts = ray.get(look.facts)
            return with_clock(facts, partial(_clock_of, look.actor))
        except GetTimeoutError:
            return facts  # how its clock goes is not known
        except RayError as exc:
            return f"it cannot be looked at: {first_line(exc)}"

    def _end(self, node: str) -> None:
        look = self._under_way.pop(node, None)
        if look is None:
            return
        if not self._head.is_gone:
            self._head.ask(partial(ray.kill, look.actor))
        self._meter.returned(look, time.monotonic())


def _clock_of(actor: Any) -> float:
    return float(ray.get(actor.clock.remote(), timeout=CLOCK_ANSWER_SECONDS))

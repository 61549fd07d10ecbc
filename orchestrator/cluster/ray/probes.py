"""Probes nodes of a Ray cluster: an actor on each, alone with the node's GPUs if that is wanted.

It waits for no node: each poll passes in the results that are ready, and a silent node delays
no other.
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

from layout_sweep.start import claim_imports
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray.bounded_calls import first_line
from orchestrator.cluster.ray.cluster import ClusterNodes, RayHead
from orchestrator.core.machines.node_health import NodeFacts
from orchestrator.core.trial.protocol import Device
from orchestrator.node.probe import NodeProbe, ProbePlan, with_clock
from orchestrator.node.processes import age_seconds

# To import torch and multiply for 2 s.
PROBE_SECONDS = 150.0
# An actor takes 0.1 GB and a second to start; simulated nodes share a machine.
PROBES_AT_ONCE = 64
RETRIES = 3  # if the connection breaks
# For a round trip, which takes milliseconds.
CLOCK_SECONDS = 2.0


class RayProbe(NodeProbe):
    """Probes the GPUs that Ray gave it, if any: on others somebody else may be at work."""

    def age(self) -> float:
        """Return the seconds since Ray had the GPUs, and started this process for them."""
        return age_seconds(os.getpid())

    def gather(self, plan: ProbePlan, *, nvml: Any = None) -> NodeFacts:
        claim_imports()
        own = tuple(str(device) for device in ray.get_gpu_ids())
        return super().gather(replace(plan, devices=own) if own else plan, nvml=nvml)


@dataclass(eq=False, kw_only=True)
class _ProbeUnderWay:
    actor: Any
    num_gpus: int  # reserved once the actor has started
    age: Any  # a ref; None once known
    facts: Any  # a ref
    began: float  # monotonic


class Probes:
    """The probes of one scheduler. Their slots are metered like those of an idle lease."""

    def __init__(self, nodes: ClusterNodes, head: RayHead, meter: LeaseMeter) -> None:
        self._nodes, self._head, self._meter = nodes, head, meter
        self._actor_class = ray.remote(RayProbe)
        self._waiting: dict[str, tuple[ProbePlan, bool]] = {}  # node -> plan, with its GPUs
        self._under_way: dict[str, _ProbeUnderWay] = {}
        self._results: dict[str, NodeFacts | str] = {}

    def begin(self, plans: Collection[ProbePlan], *, reserve: bool) -> None:
        """Probe nodes, and replace probes under way. `reserve`: with GPUs, once they are free."""
        for plan in plans:
            self._results.pop(plan.node, None)
            self._end(plan.node)
            self._waiting[plan.node] = (plan, reserve)
        self._begin_next()

    def add_facts(self, facts: NodeFacts) -> None:
        """Add the facts about a node that needs no actor."""
        self._results[facts.node] = facts

    @property
    def refs(self) -> list[Any]:
        """The outstanding refs."""
        probes = self._under_way.values()
        return [ref for probe in probes for ref in (probe.age, probe.facts) if ref is not None]

    def take_answers(self, ready: Collection[Any]) -> None:
        """Take those of `refs` that are ready, and give up probes that are late."""
        now, refs = time.monotonic(), set(ready)
        for node, probe in list(self._under_way.items()):
            if probe.age in refs:
                self._meter_from(probe)
            if probe.facts in refs:
                self._results[node] = self._answer(probe)
            elif now - probe.began > PROBE_SECONDS:
                self._results[node] = f"no answer within {PROBE_SECONDS:.0f} s"
            else:
                continue
            self._end(node)
        self._begin_next()

    def take_results(self) -> dict[str, NodeFacts | str]:
        """Return the results since the last call, by node."""
        results, self._results = self._results, {}
        return results

    def close(self) -> None:
        self._waiting.clear()
        for node in list(self._under_way):
            self._end(node)

    def _begin_next(self) -> None:
        while self._waiting and len(self._under_way) < PROBES_AT_ONCE:
            node = next(iter(self._waiting))
            plan, reserve = self._waiting.pop(node)
            has_gpus = reserve and self._nodes.device is Device.CUDA
            num_gpus = self._nodes.slots.nodes.get(node, 0) if has_gpus else 0
            began = time.monotonic()
            actor = self._head.ask(partial(self._actor, node, num_gpus=num_gpus))
            self._under_way[node] = _ProbeUnderWay(
                actor=actor,
                num_gpus=num_gpus,
                age=actor.age.remote(),
                facts=actor.gather.remote(plan),
                began=began,
            )

    def _actor(self, node: str, *, num_gpus: int) -> Any:
        return self._actor_class.options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=RETRIES,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._nodes.id_of(node), soft=False),
        ).remote()

    def _meter_from(self, probe: _ProbeUnderWay) -> None:
        """Meter the GPUs since the actor's process started, unless an idle process became it."""
        ref, probe.age = probe.age, None
        try:
            since = max(time.monotonic() - ray.get(ref), probe.began)
        except RayError:
            return  # `facts` raises the same
        if probe.num_gpus:
            self._meter.reserved(probe, num_slots=probe.num_gpus, at=since)

    def _answer(self, probe: _ProbeUnderWay) -> NodeFacts | str:
        try:
            facts: NodeFacts = ray.get(probe.facts)
            return with_clock(facts, partial(_clock_of, probe.actor))
        except GetTimeoutError:
            return facts  # without its clock
        except RayError as exc:
            return f"it cannot be looked at: {first_line(exc)}"

    def _end(self, node: str) -> None:
        probe = self._under_way.pop(node, None)
        if probe is None:
            return
        if not self._head.is_gone:
            self._head.ask(partial(ray.kill, probe.actor))
        self._meter.returned(probe, time.monotonic())


def _clock_of(actor: Any) -> float:
    return float(ray.get(actor.clock.remote(), timeout=CLOCK_SECONDS))

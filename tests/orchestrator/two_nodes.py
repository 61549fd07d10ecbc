"""What gangs do on a Ray cluster of two simulated nodes with two slots each; printed as one JSON line, for test_scheduler_nodes.

Run as a program, since a process joins one cluster at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from orchestrator.core.protocol import Device, Phase
from orchestrator.gang import Finished, Placed, Progressed, SchedulerEvent, Shape
from orchestrator.scheduler import NodeAgent, RayScheduler
from tests.orchestrator.test_scheduler import finished, request, until_finished

WHOLE, HALF = Shape(num_nodes=2, slots_per_node=2), Shape(num_nodes=2, slots_per_node=1)
FLIPPED = str.maketrans("0123456789abcdef", "fedcba9876543210")


class NumberedAgent(NodeAgent):
    """Calls its node by Ray's id of it, and asks to be numbered by that id, or by one that sorts the other way round."""

    def __init__(self, root: str, program: str, node_environment: Mapping[str, str]) -> None:
        super().__init__(root, program, node_environment)
        self._node = self._launcher._node = ray.get_runtime_context().get_node_id()

    def describe(self) -> tuple[str, str, str]:
        node_id, name, address = super().describe()
        return (node_id.translate(FLIPPED) if os.environ["NCCL_TEST_FLIPPED"] == "1" else node_id), name, address


def main() -> None:
    head = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)  # type: ignore[no-untyped-call]
    second = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)  # type: ignore[no-untyped-call]
    cluster.wait_for_nodes()
    scheduler = RayScheduler(address=cluster.address, device=Device.CPU, root=Path(sys.argv[1]))
    out: dict[str, Any] = {"slots": list(scheduler.slots.slots_by_node)}
    out |= _meets(scheduler) | _numbers_by_node(scheduler) | _hangs_on_the_second_node(scheduler) | _fails_on_the_second_node(scheduler)
    out |= _loses_a_node(scheduler, lambda: cluster.remove_node(second, allow_graceful=False))
    scheduler.close()
    cluster.shutdown()  # type: ignore[no-untyped-call]
    print("OUT " + json.dumps(out))


def _meets(scheduler: RayScheduler) -> dict[str, Any]:
    before = scheduler.standing(WHOLE)
    scheduler.start(request(4), WHOLE)
    during = scheduler.standing(WHOLE)
    events = until_finished(scheduler)
    (end,) = finished(events)
    return {
        "ranks": [outcome.rank for report in end.reports for outcome in report.ranks],
        "first": end.failure.kind if end.failure else None,
        "standing": [before, during, scheduler.standing(WHOLE)],
        "placed": next(list(event.nodes) for event in events if isinstance(event, Placed)),
    }


def _numbers_by_node(scheduler: RayScheduler) -> dict[str, Any]:
    agent_class, scheduler._agent_class = scheduler._agent_class, ray.remote(NumberedAgent)
    order = {}
    for name, flipped, shape in (("as_it_is", "0", HALF), ("flipped", "1", WHOLE)):
        os.environ["NCCL_TEST_FLIPPED"] = flipped  # passed on to agents by its first letters
        scheduler.start(request(shape.num_slots), shape)
        (end,) = finished(until_finished(scheduler))
        order[name] = [report.node for report in end.reports for _ in report.ranks]
    scheduler._agent_class = agent_class
    for gang in list(scheduler._gangs):
        scheduler._release(gang)
    return order


def _hangs_on_the_second_node(scheduler: RayScheduler) -> dict[str, Any]:
    asked = request(4, faults=[{"fault": "hang", "at": "step_3", "rank": 3}, {"fault": "hang", "at": "step_5"}])
    scheduler.start(asked, WHOLE)
    reached: list[tuple[str, int]] = []
    deadline = time.monotonic() + 20
    while not reached or reached[-1][0] is not Phase.STEADY:
        assert time.monotonic() < deadline, reached
        reached += _progress(scheduler.poll(0.2))
    for _ in range(5):  # the first node's ranks have gone on to where they hang themselves
        reached += _progress(scheduler.poll(0.5))
    scheduler.cancel(asked.trial_id)
    until_finished(scheduler)
    return {"reached": reached[-1]}


def _progress(events: list[SchedulerEvent]) -> list[tuple[str, int]]:
    return [(event.phase, event.step) for event in events if isinstance(event, Progressed)]


def _fails_on_the_second_node(scheduler: RayScheduler) -> dict[str, Any]:
    began = time.monotonic()
    faults = [{"fault": "crash", "at": "step_2", "rank": 3}, {"fault": "hang_ignoring_signals", "at": "step_3"}]
    scheduler.start(request(4, faults=faults), WHOLE)
    (end,) = finished(until_finished(scheduler))
    assert end.failure is not None
    return {
        "crash": [end.failure.kind, end.failure.rank],
        "crash_seconds": time.monotonic() - began,
        "ended_by_themselves": [outcome.rank for report in end.reports for outcome in report.ranks if outcome.exit_code is not None],
    }


def _loses_a_node(scheduler: RayScheduler, lose: Any) -> dict[str, Any]:
    scheduler.start(request(4, sleep=True), WHOLE)
    while not any(isinstance(event, Placed) for event in scheduler.poll(0.2)):
        pass
    time.sleep(1.0)
    began = time.monotonic()
    lose()
    end: Finished
    (end,) = finished(until_finished(scheduler, seconds=30))
    return {"lost": end.failure.kind if end.failure else None, "lost_seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()

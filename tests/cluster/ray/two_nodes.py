"""Runs gangs on a Ray cluster of two simulated nodes with two slots each.

Prints one JSON line, for test_scheduler_nodes.

Run as a program, since a process joins one cluster at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.contract import Finished, Placed, Progressed, SchedulerEvent
from orchestrator.cluster.lease_meter import LeaseMeter
from orchestrator.cluster.ray import probes
from orchestrator.cluster.ray import scheduler as schedulers
from orchestrator.cluster.ray.agent import NodeAgent
from orchestrator.cluster.ray.cluster import ClusterNodes
from orchestrator.cluster.ray.leases import Leases
from orchestrator.cluster.ray.local import lean_ray
from orchestrator.cluster.ray.scheduler import NODES_SECONDS, RayScheduler
from orchestrator.core.machines.node_health import NodeFacts, judge_nodes, unfit
from orchestrator.core.machines.packing import Shape
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, Phase, TrialRequest
from orchestrator.node.probe import ProbePlan
from orchestrator.node.processes import descendants, start_time
from tests.cluster.ray.test_scheduler import finished, request, until_finished

WHOLE, HALF, PART = (
    Shape(num_nodes=2, slots_per_node=2),
    Shape(num_nodes=1, slots_per_node=2),
    Shape(num_nodes=1, slots_per_node=1),
)


class AgentOfItsNode(NodeAgent):
    """Says which node it really is on, by Ray's id of it."""

    def __init__(
        self, root: str, program: str, node: str, node_environment: Mapping[str, str]
    ) -> None:
        super().__init__(root, program, ray.get_runtime_context().get_node_id(), node_environment)


class SlowProbe(probes.RayProbe):
    """Answers for one node once a file is there, for any other at once."""

    slow, file = "", Path()

    def gather(self, plan: ProbePlan, *, nvml: Any = None) -> NodeFacts:
        while plan.node == self.slow and not self.file.exists():
            time.sleep(0.05)
        return super().gather(plan, nvml=nvml)


# Read by all processes of Ray. The first two calls of this process to a probe are lost.
FIRST_CALLS_ARE_LOST = {
    "CoreWorkerService.grpc_client.PushTask": {"num_failures": 2, "req_failure_prob": 100}
}


def main() -> None:
    os.environ |= {"RAY_testing_rpc_failure": json.dumps(FIRST_CALLS_ARE_LOST)}
    head = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)  # type: ignore[no-untyped-call]
    second = cluster.add_node(  # type: ignore[no-untyped-call]
        num_cpus=2, num_gpus=2, object_store_memory=80_000_000
    )
    cluster.wait_for_nodes()
    scheduler = RayScheduler(address=cluster.address, device=Device.CPU, root=Path(sys.argv[1]))
    out: dict[str, Any] = {"slots": list(scheduler.slots.nodes.values())}
    out |= (
        _probes(scheduler)
        | _works_during_a_probe(scheduler, Path(sys.argv[1]) / "answer")
        | _holds_gpus_during_a_probe(scheduler)
        | _meets(scheduler)
        | _splits(scheduler)
        | _is_cancelled_where_it_meets(scheduler)
        | _gives_back_what_it_had(scheduler)
        | _hands_gpus_out(scheduler)
        | _lands_where_it_is_asked(scheduler)
        | _hangs_on_the_second_node(scheduler)
        | _fails_on_the_second_node(scheduler)
        | _has_enough_on_the_first_node(scheduler)
    )
    out |= _loses_a_node(scheduler, lambda: cluster.remove_node(second, allow_graceful=False))
    third = cluster.add_node(  # type: ignore[no-untyped-call]
        num_cpus=2, object_store_memory=80_000_000
    )
    cluster.wait_for_nodes()
    out |= _gets_it_back(scheduler, out["lost_on"])
    out |= _loses_a_node_on_the_way(
        scheduler, lambda: cluster.remove_node(third, allow_graceful=False)
    )
    scheduler.close()
    cluster.shutdown()  # type: ignore[no-untyped-call]
    print("OUT " + json.dumps(out))


def _probes(scheduler: RayScheduler) -> dict[str, Any]:
    began = time.monotonic()
    scheduler.begin_probes(list(scheduler.slots.nodes))
    began_seconds = time.monotonic() - began
    said: dict[str, NodeFacts | str] = {}
    while len(said) < 2:
        assert time.monotonic() - began < 60, said
        scheduler.poll(1.0)
        said |= scheduler.probed()
    facts = [found for found in said.values() if isinstance(found, NodeFacts)]
    return {
        "probed": {
            found.node: [found.host, found.clock_offset_seconds, found.cpu_matmul_flops]
            for found in facts
        },
        "unfit": [why for some in judge_nodes(facts).values() if (why := unfit(some)) is not None],
        "began_seconds": began_seconds,
    }


def _works_during_a_probe(scheduler: RayScheduler, file: Path) -> dict[str, Any]:
    """A node answers a probe after an attempt on the other one, and the next probe never."""
    well, SlowProbe.slow = scheduler.slots.nodes
    SlowProbe.file = file
    of_the_product, scheduler._probes._actor_class = (
        scheduler._probes._actor_class,
        ray.remote(SlowProbe),
    )
    scheduler.begin_probes([SlowProbe.slow, well])
    scheduler.start(request(1), PART, [well])
    order: list[str] = []
    deadline = time.monotonic() + 60
    while len(order) < 3 and time.monotonic() < deadline:
        if finished(scheduler.poll(0.2)):
            order.append("attempt")
            file.touch()
        order += ["slow" if name == SlowProbe.slow else "well" for name in scheduler.probed()]
    file.unlink()
    usual_seconds, probes.PROBE_SECONDS = probes.PROBE_SECONDS, 1.0
    scheduler.begin_probes([SlowProbe.slow])
    while not (said := scheduler.probed()) and time.monotonic() < deadline:
        scheduler.poll(0.2)
    probes.PROBE_SECONDS, scheduler._probes._actor_class = usual_seconds, of_the_product
    scheduler._leases.vacate([well])
    while left := _running("SlowProbe"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {"order": order, "silent": list(said.values()), "probes_left": len(left)}


def _holds_gpus_during_a_probe(scheduler: RayScheduler) -> dict[str, Any]:
    """The second node declares two GPUs; a probe holds both, a second longer than needed."""
    nodes, meter = ClusterNodes.of(Device.CUDA, None), LeaseMeter(time.monotonic())
    probing = probes.Probes(nodes, scheduler._head, meter)
    (SlowProbe.slow,) = nodes.slots.nodes
    probing._actor_class = ray.remote(SlowProbe)
    began = time.monotonic()
    probing.begin([ProbePlan(node=SlowProbe.slow, home=sys.argv[1])], reserve=True)
    while meter.leased(time.monotonic(), total_slots=2).reserved == 0.0:
        _listen(probing)
    time.sleep(1.0)
    SlowProbe.file.touch()
    while not probing.take_results():
        _listen(probing)
    seconds = time.monotonic() - began
    leased = meter.leased(time.monotonic(), total_slots=2)
    later = meter.leased(time.monotonic() + 100.0, total_slots=2)
    return {
        "probe_seconds": seconds,
        "probe_held": leased.reserved,
        "probe_idle": leased.idle,
        "held_after_probe": later.reserved - leased.reserved,
    }


def _listen(probing: probes.Probes) -> None:
    probing.take_answers(ray.wait(probing.refs, timeout=30.0)[0])


def _begin(scheduler: RayScheduler, asked: TrialRequest, nodes: Sequence[str] = ()) -> None:
    scheduler.start(asked, WHOLE, nodes or sorted(scheduler.slots.nodes))


def _meets(scheduler: RayScheduler) -> dict[str, Any]:
    before = _standing(scheduler)
    _begin(scheduler, request(4))
    during = _standing(scheduler)
    events = until_finished(scheduler)
    (end,) = finished(events)
    return {
        "names": sorted(scheduler.slots.nodes),
        "ranks": [outcome.rank for report in end.reports for outcome in report.ranks],
        "first": end.failure.kind if end.failure else None,
        "standing": [before, during, _standing(scheduler)],
        "placed": next(list(event.nodes) for event in events if isinstance(event, Placed)),
    }


def _standing(scheduler: RayScheduler) -> dict[str, int]:
    return {node: room.standing for node, room in sorted(scheduler.free_on_nodes().items())}


def _splits(scheduler: RayScheduler) -> dict[str, Any]:
    """After a gang of two nodes run gangs of one, of half a node, and of two again.

    All use the agents of the first one.
    """
    before = _agents()
    for name in scheduler.slots.nodes:
        scheduler.start(request(2), HALF, [name])
    ends = finished(until_finished(scheduler, 2))
    for name in (*scheduler.slots.nodes, *scheduler.slots.nodes):
        scheduler.start(request(1, sleep=True), PART, [name])
    full = _standing(scheduler)
    ends += finished(until_finished(scheduler, 4))
    _begin(scheduler, request(4))
    ends += finished(until_finished(scheduler))
    return {
        "split": [end.failure.kind if end.failure else None for end in ends],
        "full": full,
        "same_agents": len(before) == 2 and _agents() == before,
    }


def _is_cancelled_where_it_meets(scheduler: RayScheduler) -> dict[str, Any]:
    """Before its agents have agreed on a port: they may serve others, and stay."""
    before, asked = _agents(), request(4)
    _begin(scheduler, asked)
    scheduler.cancel(asked.trial_id)
    (end,) = finished(until_finished(scheduler))
    _begin(scheduler, request(4))
    (after,) = finished(until_finished(scheduler))
    return {
        "cancelled": [end.failure.kind if end.failure else None, len(end.reports)],
        "after_cancelled": after.failure.kind if after.failure else None,
        "kept_when_cancelled": _agents() == before,
    }


@ray.remote
class OfAnotherJob:
    def answer(self) -> None:
        """Return once the actor is placed."""


def _gives_back_what_it_had(scheduler: RayScheduler) -> dict[str, Any]:
    """Another job holds one of two nodes, and may wait for the other."""
    scheduler._leases.vacate(scheduler.slots.nodes)
    reserved = sorted(scheduler.slots.nodes)[1]
    affinity = NodeAffinitySchedulingStrategy(scheduler.start_id(reserved), soft=False)
    options = {"num_cpus": 2, "scheduling_strategy": affinity}
    other = OfAnotherJob.options(**options).remote()  # type: ignore[attr-defined]
    ray.get(other.answer.remote(), timeout=180)
    usual = schedulers.PLACEMENT_SECONDS, schedulers.PLACEMENT_JITTER_SECONDS
    schedulers.PLACEMENT_SECONDS, schedulers.PLACEMENT_JITTER_SECONDS = 3.0, 0.0
    _begin(scheduler, request(4))
    (end,) = finished(until_finished(scheduler))
    schedulers.PLACEMENT_SECONDS, schedulers.PLACEMENT_JITTER_SECONDS = usual
    standing = _standing(scheduler)
    ray.kill(other)
    return {
        "given_up": [
            end.failure.kind if end.failure else None,
            end.failure is not None and reserved in end.failure.message,
        ],
        "standing_when_given_up": standing,
    }


class AgentThatTells(NodeAgent):
    """Reports the GPUs that an attempt was given, and runs nothing."""

    def _launcher(self, slot: int) -> Any:
        return _Teller()


class _Teller:
    def prepare(self, program: str) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing ran."""

    def run(self, order: LaunchOrder) -> NodeReport:
        return NodeReport(
            node="",
            ranks=(),
            failure=None,
            seconds=0.0,
            environment={"devices": ",".join(order.devices)},
        )


def _hands_gpus_out(scheduler: RayScheduler) -> dict[str, Any]:
    """The second node declares two GPUs."""
    nodes, meter = ClusterNodes.of(Device.CUDA, None), LeaseMeter(time.monotonic())
    leases = Leases(nodes, scheduler._head, meter, root=sys.argv[1])
    leases._agent_class = ray.remote(AgentThatTells)
    scheduler._leases.vacate(scheduler.slots.nodes)
    (name,) = nodes.slots.nodes
    (whole,) = leases.take(2, [name], program="")
    ray.get(whole.agent.address.remote(), timeout=180)
    leases.put_back([whole])
    parts = [leases.take(1, [name], program="")[0] for _ in range(2)]
    order = LaunchOrder(
        request=request(1).model_copy(update={"device": Device.CUDA}),
        program="",
        local_world_size=1,
    )
    reports = ray.get([part.agent.run.remote(part.slots, order) for part in parts], timeout=180)
    leases.discard(parts)
    return {
        "gpus": sorted(report.environment["devices"] for report in reports),
        "one_agent": parts[0].lease is parts[1].lease,
    }


# Ranks write steps for ever, and those of the second node fail once the first node ends its own.
ENDLESS = """
import json, os, sys, time
others = os.path.join(sys.argv[1], os.environ["MASTER_PORT"])
while os.environ["RANK"] > "1" and not os.path.exists(others): time.sleep(0.01)
while os.environ["RANK"] < "2":
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        file.write(json.dumps({"step_seconds": 0.5}) + "\\n")
    time.sleep(0.02)
    if os.path.exists(os.environ["SWEEP_STOP_FILE"]): open(others, "w")
sys.exit("RuntimeError: Connection closed by peer")
"""


def _has_enough_on_the_first_node(scheduler: RayScheduler) -> dict[str, Any]:
    argv = [sys.executable, "-c", ENDLESS.replace("{", "{{").replace("}", "}}"), sys.argv[1]]
    more = {"workload": "command", "options": {"argv": argv}}
    _begin(scheduler, request(4).model_copy(update=more))
    (end,) = finished(until_finished(scheduler))
    return {
        "enough": end.failure.message if end.failure is not None else None,
        "enough_of": [report.has_enough for report in end.reports],
        "failed_meanwhile": end.reports[1].failure is not None,
    }


def _agents() -> dict[int, int | None]:
    return _running("NodeAgent")


def _running(actor_class: str) -> dict[int, int | None]:
    """Process ids and start times."""
    return {
        pid: start_time(pid) for pid in descendants(os.getpid()) if actor_class in _command(pid)
    }


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _lands_where_it_is_asked(scheduler: RayScheduler) -> dict[str, Any]:
    leases = scheduler._leases
    leases.vacate(scheduler.slots.nodes)
    agent_class, leases._agent_class = leases._agent_class, ray.remote(AgentOfItsNode)
    names = sorted(scheduler.slots.nodes)
    landed = []
    for name in names:
        scheduler.start(request(1), PART, [name])
        (end,) = finished(until_finished(scheduler))
        landed.append(end.reports[0].node == scheduler._nodes.id_of(name))
    _begin(scheduler, request(4), names[::-1])
    (end,) = finished(until_finished(scheduler))
    order = [report.node for report in end.reports for _ in report.ranks]
    leases._agent_class = agent_class
    leases.vacate(scheduler.slots.nodes)
    return {
        "landed": landed,
        "numbered": order
        == [scheduler._nodes.id_of(name) for name in names[::-1] for _ in range(2)],
    }


def _hangs_on_the_second_node(scheduler: RayScheduler) -> dict[str, Any]:
    asked = request(
        4, faults=[{"fault": "hang", "at": "step_3", "rank": 3}, {"fault": "hang", "at": "step_5"}]
    )
    _begin(scheduler, asked)
    reached: list[tuple[str, int]] = []
    deadline = time.monotonic() + 90
    while not reached or reached[-1][0] is not Phase.STEADY:
        assert time.monotonic() < deadline, reached
        reached += _progress(scheduler.poll(0.2))
    for _ in range(5):  # ranks now hang by themselves
        reached += _progress(scheduler.poll(0.5))
    scheduler.cancel(asked.trial_id)
    until_finished(scheduler)
    return {"reached": reached[-1]}


def _progress(events: list[SchedulerEvent]) -> list[tuple[str, int]]:
    return [(event.phase, event.step) for event in events if isinstance(event, Progressed)]


def _fails_on_the_second_node(scheduler: RayScheduler) -> dict[str, Any]:
    began = time.monotonic()
    faults = [
        {"fault": "crash", "at": "step_2", "rank": 3},
        {"fault": "hang_ignoring_signals", "at": "step_3"},
    ]
    _begin(scheduler, request(4, faults=faults))
    (end,) = finished(until_finished(scheduler))
    assert end.failure is not None
    return {
        "crash": [end.failure.kind, end.failure.rank],
        "crash_seconds": time.monotonic() - began,
        "ended_by_themselves": [
            outcome.rank
            for report in end.reports
            for outcome in report.ranks
            if outcome.exit_code is not None
        ],
    }


def _loses_a_node(scheduler: RayScheduler, lose: Any) -> dict[str, Any]:
    _begin(scheduler, request(4, sleep=True))
    while not any(isinstance(event, Placed) for event in scheduler.poll(0.2)):
        pass
    time.sleep(1.0)
    agents = _agents()
    began = time.monotonic()
    lose()
    end: Finished
    (end,) = finished(until_finished(scheduler, seconds=30))
    lost_seconds = time.monotonic() - began
    scheduler.poll(NODES_SECONDS + 1)
    (left,) = scheduler.slots.nodes
    kept = _agents()
    scheduler.start(request(2), HALF, [left])
    (after,) = finished(until_finished(scheduler))
    return {
        "lost": end.failure.kind if end.failure else None,
        "lost_on": end.failure.node if end.failure else None,
        "lost_seconds": lost_seconds,
        "left": left,
        "standing_after_loss": _standing(scheduler),
        "kept_agents": [len(agents), len(kept), kept.items() <= agents.items(), _agents() == kept],
        "after_loss": after.failure.kind if after.failure else None,
    }


def _gets_it_back(scheduler: RayScheduler, lost: str) -> dict[str, Any]:
    """A node of its host is there again, of which nobody has told the scheduler yet."""
    before, deadline = scheduler.start_id(lost), time.monotonic() + 60
    while lost not in scheduler.slots.nodes and time.monotonic() < deadline:
        scheduler.poll(0.5)
    scheduler.start(request(2), HALF, [lost])
    (end,) = finished(until_finished(scheduler))
    scheduler._leases.vacate([lost])
    while len(_agents()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return {
        "names_after_return": sorted(scheduler.slots.nodes),
        "has_another_start": scheduler.start_id(lost) != before,
        "after_return": end.failure.kind if end.failure else None,
    }


def _loses_a_node_on_the_way(scheduler: RayScheduler, lose: Any) -> dict[str, Any]:
    """A gang is to form on a node that is dead, and that Ray still counts among its own."""
    deadline = time.monotonic() + 90
    while len(scheduler.slots.nodes) < 2:
        assert time.monotonic() < deadline
        scheduler.poll(NODES_SECONDS + 1)
    agents = _agents()
    lose()
    _begin(scheduler, request(4))
    began = time.monotonic()
    (end,) = finished(until_finished(scheduler, seconds=60))
    return {
        "unformed": [end.failure.kind if end.failure else None, end.shared_nodes],
        "unformed_seconds": time.monotonic() - began,
        "kept_when_unformed": _agents() == agents,
    }


if __name__ == "__main__":
    with lean_ray():
        main()

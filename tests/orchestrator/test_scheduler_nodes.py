"""Gangs that span nodes: simulated nodes of a real Ray cluster on this machine, each with declared slots of its own.

In a process of its own, since a process joins one cluster at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

PROGRAM = """
import json, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from orchestrator.core.protocol import Device
from orchestrator.gang import Finished, Placed, Shape
from orchestrator.scheduler import RayScheduler
from tests.orchestrator.test_scheduler import request, until_finished, finished

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False})
second = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
cluster.wait_for_nodes()
scheduler = RayScheduler(address=cluster.address, device=Device.CPU, root=Path(sys.argv[1]))
shape = Shape(num_nodes=2, slots_per_node=2)
out = {"slots": list(scheduler.slots.slots_by_node)}

scheduler.start(request(4), shape)
(end,) = finished(until_finished(scheduler))
out["ranks"] = [o.rank for r in end.reports for o in r.ranks]
out["first"] = end.failure.kind if end.failure else None

scheduler.start(request(4, faults=[{"fault": "crash", "at": "step_2", "rank": 3}]), shape)
(end,) = finished(until_finished(scheduler))
out["crash"] = [end.failure.kind, end.failure.rank]

scheduler.start(request(4, sleep=True), shape)
while not any(isinstance(e, Placed) for e in scheduler.poll(0.2)):
    pass
time.sleep(1.0)
began = time.monotonic()
cluster.remove_node(second, allow_graceful=False)
(end,) = finished(until_finished(scheduler, seconds=30))
out["lost"] = end.failure.kind
out["lost_seconds"] = time.monotonic() - began
scheduler.close()
cluster.shutdown()
print("OUT " + json.dumps(out))
"""


def test_a_gang_over_two_nodes_meets_fails_as_one_and_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert "OUT " in done.stdout, done.stderr[-4000:]
    out = json.loads(done.stdout.split("OUT ", 1)[1])
    assert out["slots"] == [2, 2]
    assert out["ranks"] == [0, 1, 2, 3]
    assert out["first"] is None
    assert out["crash"] == ["user_error", 3]
    assert out["lost"] == "node_lost"
    assert out["lost_seconds"] < 30

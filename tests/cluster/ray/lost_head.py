"""A sweep that waits for nodes while the head dies. Prints one JSON line, for test_cluster.

Run as a program, since a process joins one cluster at a time.
"""

from __future__ import annotations

import json
import os
import threading
import time

from ray.cluster_utils import Cluster

from orchestrator.cluster.ray.cluster import HEAD_SECONDS, await_nodes
from orchestrator.cluster.ray.local import lean_ray
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.core.machines.packing import Shape
from orchestrator.core.trial.protocol import Device

# A thread that is there after so long listens.
BEGINNING_SECONDS = 5.0


def main() -> None:
    head = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)  # type: ignore[no-untyped-call]
    killed_at: list[float] = []
    # Threads before the driver gives up its head, which ends all threads of Ray.
    listening: list[str] = []

    def listeners() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "listen" in thread.name]

    def look() -> bool:
        if not killed_at:
            # A thread that has not begun to listen would wait for the head's first answer.
            by = time.monotonic() + BEGINNING_SECONDS
            while listeners() and time.monotonic() < by:
                time.sleep(0.05)
            cluster.head_node.kill_gcs_server(check_alive=False)
            killed_at.append(time.monotonic())
            threading.Timer(HEAD_SECONDS / 2, lambda: listening.extend(listeners())).start()
        return False

    said = "it went on"
    try:
        await_nodes(
            cluster.address,
            Shape(num_nodes=4, slots_per_node=1),
            Device.CPU,
            patience_seconds=120.0,
            give_up=look,
        )
    except ClusterUnavailable as exc:
        said = str(exc)
    out = {"said": said, "seconds": time.monotonic() - killed_at[0], "still_listening": listening}
    cluster.head_node.kill_all_processes(check_alive=False)
    print("OUT " + json.dumps(out), flush=True)
    os._exit(0)  # exit handlers of Ray would wait


if __name__ == "__main__":
    with lean_ray():
        main()

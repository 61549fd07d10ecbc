"""With `--wait-for-nodes` Ray's autoscaler starts the nodes of the largest gang.

The nodes come from the provider with which Ray tests its autoscaler, as processes on one host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.command import CommandHere, write_sweep
from tests.multi_host.hosts import Host, Network
from tests.multi_host.ray_hosts import BIN, RAY, SWEEP

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(900)]

WORKER = {
    "resources": {"CPU": 2, "object_store_memory": 80_000_000},
    "node_config": {},
    "min_workers": 0,
    "max_workers": 2,
}
HEAD = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}


@pytest.fixture(scope="module")
def head(namespaces: None) -> Iterator[Host]:
    with Network(["head"]) as network:
        (host,) = network.hosts
        _write_cluster(host.folder / "cluster.json")
        host.environment |= {
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(host.base),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "PATH": f"{BIN}:{host.environment['PATH']}",  # the autoscaler starts `ray`
        }
        small = ["--num-cpus=0", "--object-store-memory=80000000", "--include-dashboard=false"]
        host.ok(RAY, "start", "--head", *small, "--autoscaling-config=cluster.json", timeout=90)
        write_sweep(
            host.folder,
            "grown",
            gpus=[4],
            gpus_per_node=2,
            axes={"micro_batch_size": [2], "recompute": ["none"], "zero_stage": [0]},
        )
        yield host


def test_nodes_that_are_waited_for_are_ordered_and_used(head: Host) -> None:
    measured = head.run(
        SWEEP, "run", "grown.yaml", "--ray-address", "auto", "--wait-for-nodes", "4min", timeout=280
    )
    assert measured.returncode == 0, measured.stdout
    here = CommandHere(head.folder, f"sqlite:///{head.folder}/.sweep/sweep.sqlite")
    (attempt,) = here.json("show", "1")["attempts"]
    assert attempt["state"] == "measured"
    assert len(attempt["nodes"]) == 2


def test_more_nodes_than_the_cluster_may_have_are_waited_for_in_vain_and_no_longer_than_asked(
    head: Host,
) -> None:
    gave_up = head.run(
        SWEEP, "run", "grown.yaml", "gpus=[8]", "--ray-address", "auto", "--wait-for-nodes", "3s"
    )
    assert gave_up.returncode == 75, gave_up.stdout
    assert "4 x 2 are needed. Is the autoscaler's upper limit high enough?" in gave_up.stdout


def _write_cluster(path: Path) -> None:
    lists = (
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
        "worker_setup_commands",
        "rsync_exclude",
        "rsync_filter",
    )
    commands = ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    config = {
        "cluster_name": "fake",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "available_node_types": {"ray.head.default": HEAD, "worker": WORKER},
        "head_node_type": "ray.head.default",
        **{name: [] for name in (*lists, *commands)},
    }
    path.write_text(json.dumps(config))  # JSON is YAML

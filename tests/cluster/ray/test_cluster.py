"""The cluster as its driver sees it: the name of its devices, and a head that dies."""

from __future__ import annotations

import pytest

from orchestrator.cluster.ray import cluster
from orchestrator.cluster.ray.cluster import HEAD_SECONDS, ClusterNodes
from orchestrator.core.trial.protocol import Device
from tests.programs import told


@pytest.mark.parametrize(("device", "name"), [(Device.CPU, None), (Device.CUDA, "Tesla T4")])
def test_cores_have_no_name_of_a_gpu_that_ray_names(
    monkeypatch: pytest.MonkeyPatch, device: Device, name: str | None
) -> None:
    node = {
        "Alive": True,
        "NodeID": "1",
        "NodeManagerHostname": "n1",
        "Resources": {"CPU": 4.0, "GPU": 1.0, "accelerator_type:T4": 1.0},
    }
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [node])
    monkeypatch.setattr(cluster, "device_name", lambda: "Tesla T4")
    slots = ClusterNodes.of(device, gpus_per_node=None).slots
    assert (slots.device, slots.device_name) == (device, name)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_who_waits_for_nodes_of_a_cluster_whose_head_dies_is_told_so() -> None:
    out = told("tests.cluster.ray.lost_head", seconds=170)
    assert f"the head of the Ray cluster has not answered for {HEAD_SECONDS:.0f} s" in out["said"]
    assert out["seconds"] < 60.0, "after a minute without a head Ray ends the process itself"
    assert out["still_listening"] == [], "without a head Ray's thread would ask without a pause"

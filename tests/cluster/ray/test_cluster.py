"""The cluster as its driver sees it: the name of its GPUs, and a head that dies during a call."""

from __future__ import annotations

import pytest

from orchestrator.cluster.ray.cluster import HEAD_SECONDS, driver_name_of
from tests.programs import told


@pytest.mark.parametrize(
    ("of_ray", "here", "expected"),
    [
        ("H200", "NVIDIA H200", "NVIDIA H200"),
        ("T4", "Tesla T4", "Tesla T4"),
        ("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Server", "NVIDIA RTX PRO 6000 Server"),
        ("", "Some GPU", "Some GPU"),
        # The machine that starts the sweep has other GPUs than the cluster, or none.
        ("H100", "Tesla T4", "H100"),
        ("H100", None, "H100"),
        ("", None, None),
    ],
)
def test_gpus_have_the_name_that_their_driver_gives_them(
    of_ray: str, here: str | None, expected: str | None
) -> None:
    assert driver_name_of(of_ray, here=here) == expected


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_who_waits_for_nodes_of_a_cluster_whose_head_dies_is_told_so() -> None:
    out = told("tests.cluster.ray.lost_head", seconds=170)
    assert f"the head of the Ray cluster has not answered for {HEAD_SECONDS:.0f} s" in out["said"]
    assert out["seconds"] < 60.0, "after a minute without a head Ray ends the process itself"
    assert out["still_listening"] == [], "without a head Ray's thread would ask without a pause"

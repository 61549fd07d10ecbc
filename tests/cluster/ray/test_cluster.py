"""The cluster as its driver sees it, when the head dies during a call."""

from __future__ import annotations

import pytest

from orchestrator.cluster.ray.cluster import HEAD_SECONDS
from tests.programs import told

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_who_waits_for_nodes_of_a_cluster_whose_head_dies_is_told_so() -> None:
    out = told("tests.cluster.ray.lost_head", seconds=170)
    assert f"the head of the Ray cluster has not answered for {HEAD_SECONDS:.0f} s" in out["said"]
    assert out["seconds"] < 60.0, "after a minute without a head Ray ends the process itself"
    assert out["still_listening"] == [], "without a head Ray's thread would ask without a pause"

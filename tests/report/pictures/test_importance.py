"""Importance of axes: all, and none."""

from __future__ import annotations

import pytest

from orchestrator.report.pictures import (
    importance,
)
from orchestrator.report.sweep_rows import SweepRows


def test_an_axis_that_decides_everything_has_all_of_the_importance(scaling: SweepRows) -> None:
    found = {one.axis: one.share for one in importance.importances([scaling])}
    # Micro-batch and accumulation follow from each other here.
    assert found == {"mbs": pytest.approx(1.0), "ga": pytest.approx(1.0)}


def test_chance_alone_has_no_importance() -> None:
    groups = [[0.1, -0.1], [0.1, -0.1], [-0.1, 0.1]]
    assert importance.between(groups, 0.06) == 0.0

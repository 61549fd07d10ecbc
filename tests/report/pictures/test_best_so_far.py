"""The best so far rises, and pays for every attempt."""

from __future__ import annotations

from itertools import pairwise

import pytest

from orchestrator.report.pictures import (
    best_so_far,
)
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_the_best_so_far_rises_and_pays_for_every_attempt(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = best_so_far.histories([tiny, scaling])
    for history in found:
        for before, after in pairwise(history.steps):
            assert before.gpu_hours <= after.gpu_hours
            assert (before.best or 0) <= (after.best or 0)
    [(hours, attempts)] = query(
        "SELECT sum(gpu_seconds) / 3600, count(*) FROM attempt WHERE ended_at IS NOT NULL"
    )
    assert sum(one.steps[-1].gpu_hours for one in found) == pytest.approx(hours)
    assert sum(len(one.steps) for one in found) == attempts

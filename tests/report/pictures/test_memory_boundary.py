"""The boundary of memory, and its counts, against SQL."""

from __future__ import annotations

import pytest

from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.pictures import (
    memory_boundary,
)
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_the_caption_of_the_boundary_counts_as_sql_does(
    scaling: SweepRows, tiny: SweepRows, query: Query
) -> None:
    points = memory_boundary.points([scaling, tiny])
    found = memory_boundary.foretold(points)
    assert sum(one.is_wrong for one in points) == found.missed + found.wrongly_too_large
    [(fits, wrong)] = query(
        "SELECT sum(predicted_memory_bytes <= device_memory_bytes),"
        " sum(predicted_memory_bytes > device_memory_bytes) FROM v_trial WHERE state = 'measured'"
    )
    assert (found.fits, found.wrongly_too_large) == (fits, wrong)
    [(missed, caught)] = query(
        "SELECT sum(predicted_memory_bytes <= failure_device_memory_bytes),"
        " sum(predicted_memory_bytes > failure_device_memory_bytes) FROM v_oom"
        " WHERE state = 'out_of_memory'"
    )
    assert (found.missed, found.caught) == (missed or 0, caught or 0)
    drawn = query(
        "SELECT count(*) FROM v_trial WHERE state IN ('measured', 'out_of_memory', 'pruned')"
    )
    assert [(len(points),)] == drawn


def test_the_limit_of_a_row_lies_where_predicted_memory_reaches_the_device_s() -> None:
    def point(rest: str, size: int, share: float | None) -> memory_boundary.BoundaryPoint:
        return memory_boundary.BoundaryPoint(
            trial_id=size,
            rest=rest,
            micro_batch_size=size,
            state=TrialState.MEASURED,
            predicted_share=share,
        )

    found = memory_boundary.crossings(
        [
            # In no order; 1 lies at three quarters of the way from 0.7 to 1.1.
            point("tp1", 8, 1.1),
            point("tp1", 2, 0.4),
            point("tp1", 4, 0.7),
            # Exactly the device's memory fits.
            point("tp2", 4, 1.0),
            point("tp2", 8, 1.5),
            point("fits", 4, 0.5),
            point("fits", 8, 0.9),
            point("never", 4, 1.5),
            point("alone", 4, 0.5),
            point("alone", 8, None),
        ]
    )
    assert found == {"tp1": pytest.approx(7.0), "tp2": 4.0}


def test_limits_are_drawn_and_explained(scaling: SweepRows) -> None:
    drawn = memory_boundary.picture([scaling])
    assert drawn.figure is not None and "A vertical line marks" in drawn.caption
    [marks] = [trace for trace in drawn.figure["data"] if trace["name"] == "predicted limit"]
    # Micro-batch 2 takes 50 of 80 GiB, micro-batch 4 takes 90, in both cells.
    assert marks["x"] == [3.5, 3.5] and len(set(marks["y"])) == 2

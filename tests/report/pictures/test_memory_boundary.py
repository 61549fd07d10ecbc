"""The boundary of memory, and its counts, against SQL."""

from __future__ import annotations

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
    assert sum(one.is_wrong for one in points) == found.missed + found.false_alarms
    [(fits, alarms)] = query(
        "SELECT sum(predicted_memory_bytes <= device_memory_bytes),"
        " sum(predicted_memory_bytes > device_memory_bytes) FROM v_trial WHERE state = 'measured'"
    )
    assert (found.fits, found.false_alarms) == (fits, alarms)
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

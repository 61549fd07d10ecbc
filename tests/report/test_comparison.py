"""Two speeds differ, or their intervals overlap."""

from __future__ import annotations

import pytest

from orchestrator.report.comparison import LayoutDifference, SpeedDifference, speed_of


@pytest.mark.parametrize(
    ("after", "change"),
    [
        (1000.0, SpeedDifference.NOISE),
        (1070.0, SpeedDifference.NOISE),
        (1090.0, SpeedDifference.FASTER),
        (900.0, SpeedDifference.SLOWER),
    ],
)
def test_a_difference_within_the_intervals_is_noise(after: float, change: SpeedDifference) -> None:
    # Two single runs of 2 % each: their intervals of 95 % touch at 1.96 * 2 * 2 % = 8 %.
    one = LayoutDifference(
        cell="c",
        layout="l",
        before=speed_of(1, [(1000.0, None)]),
        after=speed_of(2, [(after, 0.01)]),
    )
    assert one.change is change
    assert one.ratio == pytest.approx(after / 1000)

"""Two sweeps, or two versions of the software, as a picture."""

from __future__ import annotations

from orchestrator.report.comparison import SpeedDifference
from orchestrator.report.pictures import (
    compared,
)
from orchestrator.report.sweep_rows import SweepRows


def test_two_sweeps_are_compared_by_the_layouts_of_both(
    scaling: SweepRows, tiny: SweepRows
) -> None:
    found = compared.comparison([scaling, scaling])
    assert found is not None
    assert len(found.layouts) == 6
    assert {one.change for one in found.layouts} == {SpeedDifference.NOISE}
    assert "6 noise" in compared.picture([scaling, scaling]).caption
    of_one = compared.comparison([tiny])
    assert of_one is not None
    assert of_one.changed == "torch 2.9.0 -> 2.13.0"

"""Profiled steps add up, and the peak of memory is named."""

from __future__ import annotations

import pytest

from orchestrator.report.pictures import (
    profiles,
)
from orchestrator.report.sweep_rows import SweepRows


def test_the_parts_of_a_step_add_up_to_it(scaling: SweepRows) -> None:
    [split] = profiles.splits([scaling])
    assert split.rank == 1  # the slowest
    assert sum(split.seconds.values()) == pytest.approx(1e-3)
    figure = profiles.step_split([scaling]).figure
    assert figure is not None
    assert sum(trace["x"][0] for trace in figure["data"]) == pytest.approx(1.0)


def test_the_peak_of_the_memory_timeline_is_named(scaling: SweepRows) -> None:
    found = profiles.memory_timeline([scaling])
    assert "the peak of 5.0 GiB is in backward of step 2" in found.caption
    assert found.num_marks == 4

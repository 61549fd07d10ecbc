"""Profiled steps add up, and the peak of memory is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.report import quantities as show
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


def test_the_memory_timeline_of_several_ranks_says_that_it_shows_one(scaling: SweepRows) -> None:
    found = profiles.memory_profile([scaling])
    assert found is not None
    one, profile = found
    assert one.cell.cell.num_gpus > 1
    worst = show.memory(one.trial.peak_memory_allocated_bytes)
    said = f"Only rank 0 is recorded, and others may take more; the worst rank allocated {worst}"
    assert said in profiles.timeline_of(one, profile).caption
    alone = replace(one, cell=replace(one.cell, cell=replace(one.cell.cell, num_gpus=1)))
    assert "rank 0" not in profiles.timeline_of(alone, profile).caption


@pytest.mark.parametrize("workload", ["synthetic", "replay"])
def test_where_nothing_was_trained_no_command_profiles_it(
    scaling: SweepRows, workload: str
) -> None:
    row = replace(scaling.sweep, conditions={"workload": workload})
    trials = [replace(one, profiles=()) for one in scaling.trials]
    untrained = replace(scaling, sweep=row, trials=trials)
    for picture in (profiles.step_split([untrained]), profiles.memory_timeline([untrained])):
        assert picture.why_empty.startswith("Nothing was trained here")
    trained = replace(untrained, sweep=replace(row, conditions={"workload": "llama"}))
    first = next(iter(scaling.rankings.values())).leading[0].id
    assert f"`sweep profile {first} --memory`" in profiles.step_split([trained]).why_empty

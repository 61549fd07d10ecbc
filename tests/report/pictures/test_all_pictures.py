"""Every picture is plain values, or says what would fill it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.report.pictures.all_pictures import PICTURES, pictures
from orchestrator.report.sweep_rows import SweepRows


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_plain_values_or_says_why_it_is_empty(
    name: str, tiny: SweepRows, scaling: SweepRows, empty: SweepRows
) -> None:
    for sweeps in ([tiny], [scaling], [tiny, scaling], [empty], []):
        found = PICTURES[name](sweeps)
        assert found.name == name
        if found.figure is None:
            assert found.why_empty.endswith((".", "show."))
            assert not found.num_marks
        else:
            json.dumps(found.figure, allow_nan=False)
            assert found.num_marks
            assert found.caption and not found.why_empty


def test_without_trials_every_picture_says_what_would_fill_it(empty: SweepRows) -> None:
    assert all(one.figure is None and one.why_empty for one in pictures([empty]))


def test_the_trials_of_a_picture_are_those_of_its_marks_once_each(
    tiny: SweepRows, scaling: SweepRows
) -> None:
    known = {one.trial.id for sweep in (tiny, scaling) for one in sweep.trials}
    found = {one.name: one.trial_ids for one in pictures([tiny, scaling])}
    assert all(len(ids) == len(set(ids)) and set(ids) <= known for ids in found.values())
    measured = {
        one.trial.id
        for sweep in (tiny, scaling)
        for one in sweep.trials
        if one.trial.tokens_per_second_per_gpu
    }
    assert measured <= set(found["scaling"]) and not found["importance"]
    # A heat map has rows of them.
    assert found["best-layouts"] and found["gantt"]


@pytest.mark.parametrize("name", ["slices", "parallel", "importance"])
def test_pictures_of_measured_speeds_say_so_where_the_machine_drifted(
    name: str, scaling: SweepRows
) -> None:
    assert "as they were measured" not in PICTURES[name]([scaling]).caption
    rankings = {
        key: replace(one, drift="The machine drifted") for key, one in scaling.rankings.items()
    }
    drifted = PICTURES[name]([replace(scaling, rankings=rankings)])
    assert drifted.caption.endswith("the machine drifted, which the tables above correct.")

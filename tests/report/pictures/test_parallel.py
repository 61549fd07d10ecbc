"""Parallel coordinates have a line for each layout."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.report.pictures import (
    parallel,
)
from orchestrator.report.sweep_rows import SweepRows


def test_parallel_coordinates_have_a_line_for_each_layout(scaling: SweepRows) -> None:
    figure = parallel.picture([scaling]).figure
    assert figure is not None
    ends = [trace["x"].count(None) for trace in figure["data"]]
    assert sum(ends) == 6


def test_values_of_options_are_text_also_if_they_look_like_markup(scaling: SweepRows) -> None:
    values = ["<b>bold</b>", "plain"]
    trials = []
    for place, one in enumerate(scaling.trials):
        layout = replace(one.trial.layout, options=(("note", values[place % 2]),))
        trials.append(replace(one, trial=replace(one.trial, layout=layout)))
    figure = parallel.picture([replace(scaling, trials=trials)]).figure
    assert figure is not None
    texts = {label["text"] for label in figure["layout"]["annotations"]}
    assert {"&lt;b&gt;bold&lt;/b&gt;", "plain"} <= texts
    # The page makes the choices of its filter from these, as text.
    assert figure["layout"]["meta"]["axes"]["note"] == values

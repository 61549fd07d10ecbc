"""The heat map of the best layouts against the view v_best."""

from __future__ import annotations

from collections import Counter

from orchestrator.report.pictures import (
    heat_map,
)
from orchestrator.report.pictures.heat_map import Found
from orchestrator.report.sweep_rows import SweepRows
from tests.report.conftest import Query


def test_the_heat_map_has_the_best_of_each_cell_and_tells_empty_cells_apart(
    tiny: SweepRows, scaling: SweepRows, query: Query
) -> None:
    found = heat_map.heat_cells([tiny, scaling])
    best = query(
        "SELECT trial_id, num_gpus, mfu, tokens_per_second_per_gpu FROM v_best"
        " WHERE is_current ORDER BY cell_id"
    )
    shown = [it for it in found if it.found is Found.BEST]
    assert [
        (it.trial_id, it.num_gpus, it.mfu, it.tokens_per_second_per_gpu) for it in shown
    ] == best
    assert Counter(it.found for it in found) == {Found.BEST: 3, Found.NOTHING_FITS: 1}
    figure = heat_map.picture([tiny, scaling]).figure
    assert figure is not None
    texts = [label["text"] for label in figure["layout"]["annotations"]]
    assert sum("nothing fits" in text for text in texts) == 1
    # Three problems, two of them on 2 GPUs alone.
    assert sum("not asked for" in text for text in texts) == 2

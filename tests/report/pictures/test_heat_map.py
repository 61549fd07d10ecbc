"""The heat map of the best layouts against the view v_best."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace

import pytest

from orchestrator import cli
from orchestrator.report import quantities as show
from orchestrator.report.pictures import heat_map
from orchestrator.report.pictures.heat_map import Found
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_line import short
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


def test_the_heat_map_is_what_the_exported_csv_says_cell_by_cell(
    tiny: SweepRows, scaling: SweepRows, report_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "csv", "--all", "--db", report_url]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    figure = heat_map.picture([tiny, scaling]).figure
    assert figure is not None
    (trace,) = figure["data"]
    expected: dict[tuple[str, int], dict[str, str]] = {}
    asked: set[tuple[str, int]] = set()
    for row in rows:
        problem = (
            f"{row['model']}, sequence {int(row['sequence_length']):,},"
            f" batch {int(row['global_batch_size']):,}"
            # So that no spreadsheet takes it for a formula.
        ).removeprefix("'")
        # A problem that both sweeps have.
        if (in_several := f"{problem} ({row['sweep']})") in trace["y"]:
            problem = in_several
        key = problem, int(row["num_gpus"])
        asked.add(key)
        is_ranked = (
            row["state"] == "measured"
            and row["is_current_fingerprint"] in ("1", "true")
            and not row["implausible"]
            and not row["step_seconds_bound"]
        )
        best = expected.get(key)
        if is_ranked and (best is None or _speed(row) > _speed(best)):
            expected[key] = row
    texts = {(label["y"], label["x"]): label["text"] for label in figure["layout"]["annotations"]}
    assert len(texts) == len(trace["x"]) * len(trace["y"]) > len(expected) > 0
    for y, problem in enumerate(trace["y"]):
        for x, gpus in enumerate(trace["x"]):
            key = problem, int(gpus.split()[0])
            best, text = expected.get(key), texts[problem, gpus].replace("<br>", " ")
            if best is None:
                assert trace["z"][y][x] is None and trace["customdata"][y][x] is None
                assert ("not asked for" in text) == (key not in asked)
                continue
            assert trace["customdata"][y][x] == int(best["trial_id"])
            assert trace["z"][y][x] == pytest.approx(float(best["mfu"]))
            assert f"MFU {show.percent(float(best['mfu']))}" in text
            assert short(best["layout"]) in text


def test_the_caption_counts_a_cell_with_tied_layouts_once(tiny: SweepRows) -> None:
    (status, *_) = tiny.cells
    ranking = tiny.rankings[status.cell.id]
    ids = [trial.id for trial in ranking.leading]

    def caption(num_tied: int) -> str:
        tied = replace(ranking, tied=(ids * 3)[:num_tied])
        one = replace(tiny, cells=[status], rankings={status.cell.id: tied})
        return heat_map.picture([one]).caption

    assert caption(1) == "1 cell: 1 best."
    assert caption(3) == "1 cell: 1 with 3 tied layouts, the fastest of them shown."


def _speed(row: dict[str, str]) -> float:
    return float(row["tokens_per_second_per_gpu"])

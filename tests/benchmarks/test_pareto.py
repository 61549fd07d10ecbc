"""The benchmark of fronts on a small table of our own."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks import pareto
from tests.benchmarks.test_search_efficiency import rows


def test_every_method_finds_the_front_of_a_small_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "tables", tmp_path / "out.json"
    folder.mkdir()
    table = rows("ours_8g")
    with (folder / "ours.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    arguments = ["pareto", "--tables", str(folder), "--seeds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    pareto.main()
    result = json.loads(out.read_text())
    (size,) = result["sizes"].values()
    assert size["rows"] == 16
    assert set(result["summary"]) == set(pareto.METHODS)
    launches = {
        method: [found[f"launches_to_{share}"]["median"] for share in ("5%", "1%")]
        for method, found in result["summary"].items()
    }
    for to_95, to_99 in launches.values():
        assert 1 <= to_95 <= to_99 <= 16
    assert launches["auto"] == min(launches.values())

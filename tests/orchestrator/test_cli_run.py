"""The commands that read a sweep file, called in this process; `sweep run` itself is in tests/acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.core.hardware import DEVICES

SPEC = {
    "name": "priced",
    "model": "llama-3.1-8b",
    "gpus": 8,
    "gpus_per_node": 8,
    "device": "h200",
    "sequence_length": 4096,
    "global_batch_size": 64,
    "axes": {"micro_batch_size": [1, 2], "recompute": ["full"]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "priced.yaml"
    path.write_text(json.dumps(SPEC))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def cost(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(planned(capsys, *arguments, "--json"))["cost"]
    return found


def test_a_plan_says_what_its_dollars_rest_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = cost(capsys, file)
    assert listed["price_per_gpu_hour"] == DEVICES["h200"].price_per_hour
    assert listed["dollars"] == pytest.approx(listed["gpu_hours"] * listed["price_per_gpu_hour"])
    assert "typical list price of h200" in planned(capsys, file)


def test_the_price_in_the_sweep_file_goes_before_the_list(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = cost(capsys, file, "price_per_gpu_hour=2.5")
    assert own["dollars"] == pytest.approx(own["gpu_hours"] * 2.5)
    assert "$2.50 a GPU-hour: price_per_gpu_hour of the sweep file" in planned(capsys, file, "price_per_gpu_hour=2.5")


def test_what_is_not_predicted_has_no_price(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost(capsys, file, "device=cpu", "price_per_gpu_hour=2.5")["dollars"] is None
    assert "$" not in planned(capsys, file, "device=cpu")


@pytest.mark.parametrize("price", ["0", "-1", "free", ".nan"])
def test_a_price_is_a_positive_number(file: Path, price: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(file), f"price_per_gpu_hour={price}"]) == 2
    assert "price_per_gpu_hour" in capsys.readouterr().err


def test_where_no_layout_is_legal_that_is_said_before_anything_is_started(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/none.sqlite")
    assert cli.main(["run", str(file), "device=cpu", "axes.zero_stage=3"]) == 2
    said = capsys.readouterr().err
    assert "no layout is legal in any cell" in said
    assert "zero_stage is none that workload llama can do" in said
    assert not (tmp_path / "none.sqlite").exists()


def test_a_bound_is_refused_where_the_strategy_expects_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(file), "search.bound=0.01", "search.strategy=random"]) == 2
    assert "search.bound: strategy random expects nothing of a layout" in capsys.readouterr().err

"""The commands that read a sweep file, called in this process; `sweep run` itself is in tests/acceptance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator import cli
from orchestrator.core.hardware import DEVICES
from tests.db.builders import Bench

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


def test_a_plan_says_what_the_tightest_budget_leaves(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = cost(capsys, file, "price_per_gpu_hour=2.5")
    assert (whole["budget_limit"], whole["budget_gpu_hours_left"], whole["num_trials_within_budget"]) == (None, None, whole["num_trials"])
    half = whole["gpu_hours"] / 2
    limits = ["price_per_gpu_hour=2.5", f"search.max_cost={half * 2.5}", f"search.max_gpu_hours={half * 3}"]
    found = cost(capsys, file, *limits)
    assert (found["budget_limit"], found["budget_gpu_hours_left"]) == ("max_cost", pytest.approx(half))
    assert (found["gpu_hours"], found["dollars"]) == (pytest.approx(half), pytest.approx(half * 2.5))
    assert found["num_trials_within_budget"] == whole["num_trials"] // 2
    text = planned(capsys, file, *limits, "search.max_wall_time=2h")
    assert "search.max_cost leaves" in text
    assert f"about {whole['num_trials'] // 2} of {whole['num_trials']} trials" in text
    assert "search.max_wall_time ends each call after 2 h 00 min" in text


def test_what_the_sweep_has_held_already_is_not_left_of_its_budget(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.sqlite"
    with Store.open(url) as store:
        Bench.on(store, "priced").measure()  # 4 GPU-seconds
    found = cost(capsys, file, "search.max_gpu_hours=0.5", "--db", url)
    assert found["held_gpu_hours"] == pytest.approx(4 / 3600)
    assert found["budget_gpu_hours_left"] == pytest.approx(0.5 - 4 / 3600)
    assert "beside 0.00111 held already" in planned(capsys, file, "search.max_gpu_hours=0.5", "--db", url)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_limit_of_money_without_a_price_is_refused_at_the_door(file: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert cli.main([command, str(file), "device=h800", "search.max_cost=5"]) == 2
    assert "search.max_cost: device h800 has no list price; give price_per_gpu_hour" in capsys.readouterr().err
    assert cli.main([command, str(file), "device=auto", "search.max_cost=5"]) == 2  # there is no GPU here that would tell
    assert "no price is known of what device auto means here" in capsys.readouterr().err


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
    assert re.search(r": of [\d,]+ layouts?, zero_stage is none that workload llama can do", said)
    assert not (tmp_path / "none.sqlite").exists()


def test_a_bound_is_refused_where_the_strategy_expects_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(file), "search.bound=0.01", "search.strategy=random"]) == 2
    assert "search.bound: strategy random expects nothing of a layout" in capsys.readouterr().err


def test_a_cell_that_a_budget_did_not_reach_is_said_and_is_exit_code_4(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/sweep.db")
    short = ["run", str(file), "--simulate", "--quiet", "sequence_length=[2048,4096]"]
    assert cli.main([*short, "search.max_wall_time=20"]) == 4
    said = capsys.readouterr().err
    assert "Nothing was measured for llama-3.1-8b_8gpu_s4096_gb64: max_wall_time reached before its first trial." in said
    assert cli.main([*short, "search.max_wall_time=20"]) == 0  # the next call begins with it

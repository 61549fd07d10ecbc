"""`sweep best --pareto`: the front of a sweep, over cells that train the same."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.trial.protocol import ProgramSeen, RankResult, TrialRequest
from tests.cli.conftest import Sweep
from tests.sweep.test_front_search import asked, trained
from tests.sweep.test_loop import run

TIMES = ["step_seconds", "dollars_per_billion_tokens"]


def fronts(sweep: Sweep) -> list[dict[str, Any]]:
    out, _ = sweep("best", "--pareto", "--json")
    found: list[dict[str, Any]] = json.loads(out)["fronts"]
    return found


def test_each_point_of_the_front_is_shown_with_its_interval(store: Store, sweep: Sweep) -> None:
    run(store, trained, spec=asked())
    (front,) = fronts(sweep)
    assert front["objectives"] == ["tokens_per_second_per_gpu", "memory_headroom"]
    on = [point for point in front["points"] if point["is_on_front"]]
    assert [round(point["memory_headroom_value"], 2) for point in on] == [0.2, 0.6, 0.8, 0.9]
    for point in on:
        value = point["tokens_per_second_per_gpu_value"]
        low, high = (point[f"tokens_per_second_per_gpu_{end}"] for end in ("low", "high"))
        # One run: as published repeats vary, by 2 %.
        assert (low / value, high / value) == pytest.approx((0.962, 1.040), abs=0.002)
        assert value == pytest.approx(point["tokens_per_second_per_gpu"])
    out, _ = sweep("best", "--pareto")
    assert "memory free" in out
    assert "±3.9%" in out
    assert "Front of 6 measured layouts: trials" in out
    assert "measured once" in out
    out, _ = sweep("best")
    assert out.startswith("The fastest layouts. The front of the objectives: sweep best t --pareto")


def test_cells_that_differ_in_gpus_alone_have_one_front(store: Store, sweep: Sweep) -> None:
    # Two GPUs take 0.6 of the time of one: faster, and dearer.
    def script(request: Any) -> Any:
        result = trained(request)
        factor = 0.6 if request.layout.world_size == 2 else 1.0
        seconds = [factor * one for one in result.step_seconds]
        return result.model_copy(update={"step_seconds": seconds})

    spec = asked(gpus=[1, 2], objective=TIMES, price_per_gpu_hour=3.6)
    run(store, script, spec=spec)
    (front,) = fronts(sweep)
    assert len(front["cells"]) == 2
    on = [point for point in front["points"] if point["is_on_front"]]
    assert [point["num_gpus"] for point in on] == [2, 1]
    for point in on:
        # A GPU-second costs a thousandth of a dollar, and a step has 512 tokens.
        cost = point["num_gpus"] * point["step_seconds_value"] / 1000 / 512 * 1e9
        assert point["dollars_per_billion_tokens_value"] == pytest.approx(cost)
    out, _ = sweep("best", "--pareto")
    assert "GPUs" in out
    assert "$/1e9 tokens" in out


def test_a_sweep_with_one_objective_has_a_front_too(store: Store, sweep: Sweep) -> None:
    run(store, trained, spec=asked(objective="tokens_per_second_per_gpu"))
    (front,) = fronts(sweep)
    assert front["objectives"] == ["tokens_per_second_per_gpu", "memory_headroom"]
    assert sum(point["is_on_front"] for point in front["points"]) == 4
    out, _ = sweep("best")
    assert "--pareto" not in out


def test_times_that_were_not_checked_are_said_below_the_front(store: Store, sweep: Sweep) -> None:
    def told_at_the_end(request: TrialRequest) -> RankResult:
        return trained(request).model_copy(update={"seen": ProgramSeen(seconds=600.0)})

    run(store, told_at_the_end, spec=asked())
    out, _ = sweep("best", "--pareto")
    assert "are not fully checked: all steps arrived at once" in out


def test_layouts_without_one_of_the_objectives_are_left_out_by_name(
    store: Store, sweep: Sweep
) -> None:
    def script(request: Any) -> Any:
        result = trained(request)
        if request.layout.micro_batch_size > 1:
            return result
        peaks = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes")
        return result.model_copy(update=dict.fromkeys(peaks))

    run(store, script, spec=asked())
    (front,) = fronts(sweep)
    assert len(front["left_out"]) == 2
    first, second = front["left_out"]
    said = f"; memory_headroom was not read of trials {first}"
    assert f"{said} and {second}" in front["text"]


def test_a_front_comes_as_csv_and_markdown(store: Store, sweep: Sweep) -> None:
    run(store, trained, spec=asked())
    out, _ = sweep("best", "--pareto", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["memory_headroom_value"] for row in rows if row["is_on_front"] == "true"] == [
        "0.19999999999999996",
        "0.6",
        "0.8",
        "0.9",
    ]
    out, _ = sweep("best", "--pareto", "--format", "md")
    # A head, a rule and the four on the front.
    assert out.count("\n|") + out.startswith("|") == 6

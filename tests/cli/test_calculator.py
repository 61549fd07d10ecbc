"""The calculator and `sweep plan` say the same of a layout, with and without a store of trials."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.cli.sweep_file import Planning, load, planning, store_if_any
from orchestrator.core.physics.memory import MemoryPrediction
from orchestrator.core.problem.layout import parse_key
from orchestrator.core.search.calculator import texts_of
from orchestrator.core.trial.measurement import StepTime
from orchestrator.report import explanation_text as say
from tests.cli.conftest import Sweep
from tests.db.builders import begin_trial, fingerprint, measurement, record_measurement

FILES = Path(__file__).parents[2] / "sweeps"
SLOWDOWN = 1.4


@pytest.fixture
def store_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a store that is not there yet, which commands use."""
    found = f"sqlite:///{tmp_path}/sweep.sqlite"
    monkeypatch.setenv("SWEEP_DB", found)
    return found


def known(file: str, url: str, *overrides: str) -> Planning:
    with store_if_any(url) as store:
        return planning(load(FILES / file, list(overrides)), store)


def measure(url: str, file: str) -> int:
    """Fill a store with runs that all took longer than is predicted; return how many."""
    plain = known(file, url)
    spec, cell = plain.spec, plain.spec.cells()[0]
    candidates = plain.plan(cell).candidates
    rows = candidates.order[: len(candidates) // 2 : 20]
    with Store.open(url) as store:
        sweep_id = store.ensure_sweep(spec.name, spec.model_dump_json(), spec.conditions())
        epoch = store.acquire(sweep_id, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=600)
        cell_id = store.ensure_cell(sweep_id, cell, epoch)
        for row in rows:
            layout = candidates.table.layout(int(row))
            trial_id, attempt = begin_trial(store, cell_id, layout, epoch=epoch, nodes=["node-a"])
            seconds = SLOWDOWN * float(candidates.step_seconds[row])
            peak = int(1.1 * candidates.memory_bytes[row])
            took = StepTime(median=seconds, iqr=0.01, num_steps=5, relative_confidence=0.01)
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=epoch,
                measurement=replace(
                    measurement(),
                    step_time=took,
                    step_seconds=(seconds,) * 5,
                    peak_memory_allocated_bytes=peak,
                    peak_memory_reserved_bytes=peak,
                ),
                fingerprint=fingerprint(),
                gpu_seconds=8.0,
            )
    return len(rows)


def assert_alike(found: Planning, plan: dict[str, Any]) -> int:
    """Compare each layout that a plan shows with the calculator; return how many there are."""
    num = 0
    cells = {cell.key: cell for cell in found.spec.cells()}
    assert plan["calibration"]["says"] == found.based_on
    for shown in plan["cells"]:
        calculator = found.calculator(cells[shown["cell"]])
        for best in shown["best"]:
            layout = calculator.layout(texts_of(parse_key(best["layout"])).items())
            explained = calculator.explain(layout)
            assert explained.layout.key == best["layout"]
            assert explained.illegal is None
            assert explained.memory_limit_bytes == shown["memory_limit_bytes"]
            assert explained.fits == best["fits"]
            assert explained.memory_bytes == pytest.approx(best["predicted_memory_bytes"])
            parts = best["memory_bytes_by_part"]
            assert dict(explained.memory_by_part) == pytest.approx(parts)
            for name, value in {
                "predicted_step_seconds": explained.step_seconds,
                "predicted_tokens_per_second_per_gpu": explained.tokens_per_second_per_gpu,
                "step_seconds_band": say.step_band(explained),
                "memory_bytes_band": say.memory_band(explained),
                "probability_of_fitting": explained.probability_of_fitting,
            }.items():
                told = best[name]
                assert value == (None if told is None else pytest.approx(told))
            num += 1
    return num


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("8b.yaml", ()),
        ("playbook.yaml", ("gpus=[8,64]",)),
        # No device, so no times; and a limit that the file names.
        ("quickstart.yaml", ()),
        ("quickstart.yaml", ("device_memory_gib=0.03",)),
        ("recipes/torchtitan.yaml", ()),
        ("recipes/megatron.yaml", ()),
    ],
)
def test_the_calculator_says_what_the_plan_says(
    file: str, overrides: tuple[str, ...], store_url: str, sweep: Sweep
) -> None:
    text, _ = sweep("plan", str(FILES / file), *overrides, "--top", "4", "--json")
    assert assert_alike(known(file, store_url, *overrides), json.loads(text)) >= 4


def test_trials_in_the_store_change_the_calculator_as_they_change_the_plan(
    store_url: str, sweep: Sweep
) -> None:
    before = known("8b.yaml", store_url)
    num = measure(store_url, "8b.yaml")
    after = known("8b.yaml", store_url)
    assert after.based_on == f"calibrated by {num} trials of 8b ({num})"
    text, _ = sweep("plan", str(FILES / "8b.yaml"), "--top", "6", "--json")
    assert assert_alike(after, json.loads(text)) == 4 * 6
    cell = before.spec.cells()[0]
    plain, calibrated = before.calculator(cell), after.calculator(cell)
    # Also of a layout that the file does not name.
    layout = plain.layout({**texts_of(plain.start), "recompute": "full:8"}.items())
    cold, warm = plain.explain(layout), calibrated.explain(layout)
    assert cold.step_seconds is not None
    assert warm.step_seconds is not None
    assert warm.step_seconds / cold.step_seconds == pytest.approx(SLOWDOWN, rel=0.05)
    assert warm.memory_bytes > 1.05 * cold.memory_bytes
    cold_band, warm_band = cold.step_band, warm.step_band
    assert cold_band is not None
    assert warm_band is not None
    assert warm_band[1] - warm_band[0] < cold_band[1] - cold_band[0]


def test_what_the_calculator_predicts_beyond_the_file_a_plan_with_that_value_predicts(
    store_url: str, sweep: Sweep
) -> None:
    measure(store_url, "8b.yaml")
    found = known("8b.yaml", store_url)
    override = "axes.micro_batch_size=[16]"
    text, _ = sweep("plan", str(FILES / "8b.yaml"), override, "--top", "5", "--json")
    plan = json.loads(text)
    assert all("_mbs16_" in best["layout"] for cell in plan["cells"] for best in cell["best"])
    assert assert_alike(found, plan) == 4 * 5


def test_the_parts_are_those_of_the_plan() -> None:
    from orchestrator.cli.plan import MEMORY_PARTS
    from orchestrator.core.search import explanation

    assert explanation.MEMORY_PARTS == MEMORY_PARTS
    assert set(MEMORY_PARTS) == set(MemoryPrediction.__dataclass_fields__)

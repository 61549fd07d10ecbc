"""What is advised where several layouts could be the fastest."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.problem.layout import Layout, Recompute
from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.report import tie_advice
from tests.cli.conftest import Sweep
from tests.db.builders import Bench, fingerprint, measurement, record_measurement


def tied_in(
    *, repeats: int = 2, contenders: int = 3, num: int = 2, workload: str = "llama", name: str = "a"
) -> str:
    """What is advised of so many tied trials; the last has the simplest layout."""
    confirm = {"repeats": repeats, "contenders": contenders}
    simulated = name.endswith("-simulated")
    sweep: Any = SimpleNamespace(
        spec_json=json.dumps({"search": {"confirm": confirm}}),
        conditions={"workload": workload},
        is_simulated=simulated,
    )
    layouts = [Layout(grad_accum_steps=2, recompute=Recompute.parse("full"))] * (num - 1)
    rows: Any = [
        SimpleNamespace(id=place, layout=layout)
        for place, layout in enumerate([*layouts, Layout(micro_batch_size=2)], 1)
    ]
    return tie_advice.tie_advice(sweep, rows)


def test_of_tied_layouts_it_is_said_what_decides_and_which_is_the_simplest() -> None:
    advice = tied_in()
    assert "sweep run FILE search.confirm.repeats=4)" in advice
    assert "quieter machine" in advice
    assert advice.endswith("; or take trial 2, the simplest of them")


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ({"repeats": 0}, "FILE search.confirm.repeats=2)"),
        ({"repeats": 20}, "FILE search.confirm.repeats=32)"),
        ({"num": 5}, "FILE search.confirm.repeats=4 search.confirm.contenders=5)"),
        ({"repeats": 32, "num": 5}, "FILE search.confirm.contenders=5)"),
        ({"name": "a-simulated"}, "FILE --simulate search.confirm.repeats=4)"),
    ],
)
def test_the_keys_to_set_follow_from_those_of_the_file(file: dict[str, Any], keys: str) -> None:
    advice = tied_in(**file)
    assert keys in advice
    assert ("quieter" in advice) is ("name" not in file)


def test_no_more_repeats_are_advised_than_there_can_be() -> None:
    assert "sweep run" not in tied_in(repeats=32, contenders=64)
    assert "sweep run" not in tied_in(workload="replay")
    Confirm(repeats=tie_advice.MOST_REPEATS, contenders=tie_advice.MOST_CONTENDERS)
    for name, most in (
        ("repeats", tie_advice.MOST_REPEATS),
        ("contenders", tie_advice.MOST_CONTENDERS),
    ):
        with pytest.raises(ValueError, match="less than or equal"):
            Confirm.model_validate({name: most + 1})


def test_best_shows_it_below_the_tie(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    for micro_batch_size in (1, 2):
        trial_id, attempt = bench.start(micro_batch_size)
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(1000.0),
            fingerprint=fingerprint(),
        )
    lines = sweep("best")[0].splitlines()
    place = next(n for n, line in enumerate(lines) if "No single winner" in line)
    assert "take trial 1, the simplest of them" in lines[place + 1]

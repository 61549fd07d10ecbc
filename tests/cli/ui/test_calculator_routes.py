"""The calculator of `sweep ui`: its page, its answers, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from db.store import Store
from orchestrator.cli.sweep_file import Planning
from orchestrator.report.pages.calculator_document import calculation
from tests.cli.test_calculator import known, measure
from tests.cli.ui.served import Visitor, served

CELL = "llama-3.1-8b_16gpu_s4096_gb1024"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('calculator')}/sweep.sqlite"
    measure(found, "8b.yaml")
    with Store.open(found) as store:
        store.ensure_sweep("old", '{"name": "old", "axis": {}}', {})
    return found


@pytest.fixture(scope="module")
def planned(url: str) -> Planning:
    return known("8b.yaml", url)


@pytest.fixture(scope="module")
def visitor(url: str) -> Iterator[Visitor]:
    with served(url, "8b") as found:
        yield found


def result(visitor: Visitor, **asked: str) -> dict[str, Any]:
    answer = visitor.get(f"/calculator/result?{urlencode(asked)}")
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = json.loads(answer.text)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"cell": CELL, "micro_batch_size": "16", "recompute": "full:8"},
        {"mbs": "8", "recompute": "none", "zero_stage": "0"},
        {"cell": CELL, "tensor_parallel_size": "16"},
        {"precision": "fp8", "accumulate": "last"},
    ],
)
def test_an_answer_is_the_calculator_of_the_store(
    visitor: Visitor, planned: Planning, asked: dict[str, str]
) -> None:
    cells = planned.spec.cells()
    cell = next((one for one in cells if one.key == asked.get("cell")), cells[0])
    calculator = planned.calculator(cell)
    fields = {name: text for name, text in asked.items() if name != "cell"}
    found = calculator.explain(calculator.layout(fields.items()))
    expected = calculation(found, why_no_times=planned.why_no_times)
    assert result(visitor, **asked) == json.loads(json.dumps(expected))


def test_the_page_has_a_control_for_each_axis_and_no_script_of_its_own(
    visitor: Visitor, planned: Planning
) -> None:
    answer = visitor.get(f"/calculator?cell={CELL}&micro_batch_size=3")
    assert answer.status == 200
    calculator = planned.calculator(planned.spec.cells()[1])
    for choice in calculator.choices:
        assert f'<label for="axis-{choice.name}">' in answer.text
        kind = "input" if choice.is_number else "select"
        assert re.search(rf'<{kind}[^>]* id="axis-{choice.name}"', answer.text)
    assert 'data-values="1 2 3 4' in answer.text
    assert answer.text.count("<option value=") >= len(planned.spec.cells())
    assert f'<option value="{CELL}" selected>' in answer.text
    assert planned.based_on in answer.text
    assert re.findall(r"<script(?![^>]* src=)|style=|\son\w+=", answer.text) == []
    for asset in re.findall(r'(?:src|href)="(assets/[a-z.]+)"', answer.text):
        assert visitor.get(f"/{asset}").status == 200


@pytest.mark.parametrize("page", ["/calculator", "/calculator/result"])
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("micro_batchsize=2", "'micro_batchsize' is no field of a layout; did you mean"),
        ("cell=nothing", "sweep 8b has no cell 'nothing'."),
        ("micro_batch_size=zero", "expected a whole number, at least 1"),
        ("micro_batch_size=-1", "expected a whole number, at least 1"),
        ("micro_batch_size=1&mbs=2", "micro_batch_size is both 1 and 2"),
        ("micro_batch_size=1&micro_batch_size=1", "is given twice"),
        ("recompute=ful", "did you mean full?"),
        ("accumulate=never", "expected one of scatter, last"),
        ("x" * 61 + "=1", "has more than 60 characters"),
        ("recompute=%00", "control characters"),
        ("recompute=%zz", "percent sign"),
        ("recompute=%ff", "not UTF-8"),
        ("=1", "is no field of a layout"),
        ("%3Cscript%3E=1", "'<script>' is no field of a layout"),
    ],
)
def test_a_bad_address_is_refused_with_one_sentence(
    visitor: Visitor, page: str, query: str, says: str
) -> None:
    answer = visitor.get(f"{page}?{query}")
    assert answer.status == 400
    assert says in answer.text
    assert answer.text.count("\n") == 1
    assert len(answer.text) < 700
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_long_value_is_refused(visitor: Visitor) -> None:
    assert visitor.get(f"/calculator/result?recompute={'x' * 300}").status == 413


def test_a_sweep_of_another_version_says_so(url: str) -> None:
    with served(url, "old") as visitor:
        answer = visitor.get("/calculator")
    assert answer.status == 400
    assert "by another version" in answer.text

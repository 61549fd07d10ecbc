"""The program that calculates: a line of JSON for each question, also for a bad one."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from orchestrator.cli.ui.calculating import MOST_SENTENCE_CHARACTERS, answer, serve
from orchestrator.cli.ui.calculators import Calculators
from orchestrator.core.errors import StoreUnavailable
from tests.cli.test_calculator import measure


@pytest.fixture(scope="module")
def calculators(tmp_path_factory: pytest.TempPathFactory) -> Calculators:
    url = f"sqlite:///{tmp_path_factory.mktemp('calculating')}/sweep.sqlite"
    measure(url, "8b.yaml")
    return Calculators(db=url, sweep="8b")


def test_each_line_is_answered_by_a_line(calculators: Calculators) -> None:
    questions = [
        {"wants": "page", "cell": None, "fields": {}},
        {"wants": "result", "cell": None, "fields": {"micro_batch_size": "4"}},
        {"wants": "result", "cell": None, "fields": {"micro_batch": "4"}},
        {"wants": "result", "cell": "none", "fields": {}},
    ]
    answers = StringIO()
    serve(calculators, StringIO("".join(json.dumps(one) + "\n" for one in questions)), answers)
    page, result, wrong_name, wrong_cell = map(json.loads, answers.getvalue().splitlines())
    assert page == {"status": 200, "value": calculators.page(None, {})}
    assert result["value"]["fields"]["micro_batch_size"] == "4"
    assert wrong_name["status"] == wrong_cell["status"] == 400
    assert "did you mean micro_batch_size" in wrong_name["text"]
    assert wrong_cell["text"] == "sweep 8b has no cell 'none'."


def test_a_refusal_quotes_only_a_part_of_a_long_text(calculators: Calculators) -> None:
    found = answer(calculators, {"wants": "result", "cell": "c" * 5000, "fields": {}})
    assert len(found["text"]) == MOST_SENTENCE_CHARACTERS + 1


def test_a_store_that_does_not_answer_is_no_mistake_of_the_visitor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(Calculators, "page", away)
    question = {"wants": "page", "cell": None, "fields": {}}
    found = answer(Calculators(db=f"sqlite:///{tmp_path}/none.sqlite", sweep="8b"), question)
    assert found == {"status": 503, "text": "the store is away."}

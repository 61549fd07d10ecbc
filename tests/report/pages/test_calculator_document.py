"""What the page of the calculator shows: its controls, and one layout's bars, tables and words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.search.calculator import Calculator
from orchestrator.core.search.explanation import STEP_PARTS
from orchestrator.report import explanation_text as say
from orchestrator.report import quantities as show
from orchestrator.report.pages.calculator_document import FOLLOWS, calculation, choice_rows
from tests.core.search.test_calculator import calculator_of, fields


@pytest.fixture(scope="module")
def calculator() -> Calculator:
    return calculator_of("8b.yaml", 0)


def test_every_axis_has_a_control_at_the_value_of_the_layout(calculator: Calculator) -> None:
    rows = {row["name"]: row for row in choice_rows(calculator, calculator.start)}
    assert set(rows) == {one.name for one in calculator.choices}
    for name, row in rows.items():
        value = row["values"][row["place"]]
        if name in ("data_parallel_size", "grad_accum_steps"):
            assert value == FOLLOWS
        else:
            assert [(name, value)] == [one for one in fields(calculator.start) if one[0] == name]
    micro = rows["micro_batch_size"]
    assert micro["words"] == "micro batch size (mbs)"
    assert micro["in_file"] == ["1", "2", "4", "8"]
    assert "1024" in micro["values"]
    assert micro["is_number"]
    assert not rows["recompute"]["is_number"]


def test_a_value_that_is_no_choice_becomes_one(calculator: Calculator) -> None:
    layout = calculator.layout([("micro_batch_size", "3"), ("recompute", "full:5")])
    rows = {row["name"]: row for row in choice_rows(calculator, layout)}
    assert rows["micro_batch_size"]["values"][:4] == ["1", "2", "3", "4"]
    assert rows["micro_batch_size"]["place"] == 2
    recompute = rows["recompute"]
    assert recompute["values"][recompute["place"]] == "full:5"
    assert "full:5" not in recompute["in_file"]


def test_replicas_that_do_not_follow_are_chosen(calculator: Calculator) -> None:
    layout = calculator.layout([("data_parallel_size", "1"), ("tensor_parallel_size", "2")])
    rows = {row["name"]: row for row in choice_rows(calculator, layout)}
    replicas = rows["data_parallel_size"]
    assert replicas["values"][replicas["place"]] == "1"


def test_the_parts_are_those_of_the_prediction_and_add_up(calculator: Calculator) -> None:
    found = calculator.explain(calculator.start)
    shown = calculation(found, why_no_times="")
    memory, step = shown["memory"], shown["step"]
    for part in memory["parts"]:
        assert part["value"] == found.memory_by_part[part["name"].replace(" ", "_")]
    assert sum(part["value"] for part in memory["parts"]) == pytest.approx(memory["total"])
    assert sum(part["value"] for part in step["parts"]) == pytest.approx(step["total"])
    assert memory["limit"] == found.memory_limit_bytes
    assert memory["band"] == say.memory_band(found)
    for parts in (memory["parts"], step["parts"]):
        assert len({part["color"] for part in parts}) == len(parts)
    assert shown["sentences"] == [
        f"{say.memory_sentence(found)}.",
        f"{say.step_sentence(found, why_no_times='')}.",
    ]


def test_a_step_with_all_its_parts_has_a_colour_for_each(calculator: Calculator) -> None:
    found = replace(
        calculator.explain(calculator.start), seconds_by_part=dict.fromkeys(STEP_PARTS, 1.0)
    )
    colors = [part["color"] for part in calculation(found, why_no_times="")["step"]["parts"]]
    assert len(set(colors)) == len(STEP_PARTS)


def test_the_numbers_are_texts_of_the_prediction(calculator: Calculator) -> None:
    found = calculator.explain(calculator.start)
    rate = found.tokens_per_second_per_gpu
    assert rate is not None
    assert found.step_band is not None
    rows = {row[0]: row[1:] for row in calculation(found, why_no_times="")["numbers"]}
    assert rows["tokens/s/GPU"][0] == show.tokens_rate(rate)
    slowest = show.tokens_rate(rate / found.step_band[1])
    assert rows["tokens/s/GPU"][1].startswith(f"{slowest} to ")
    assert rows["tokens/s on 8 GPUs"][0] == show.tokens_rate(8 * rate)
    assert rows["MFU"][0] == show.percent(found.mfu)
    assert rows["peak memory"][0] == show.memory(found.memory_bytes)


def test_a_refusal_has_no_bars_and_names_what_is_legal(calculator: Calculator) -> None:
    found = calculator.explain(
        calculator.layout(fields(calculator.start, tensor_parallel_size="64"))
    )
    shown = calculation(found, why_no_times="")
    assert shown["refusal"] == found.illegal
    assert shown["sentences"] == [f"Not legal: {found.illegal}."]
    assert (shown["memory"], shown["step"], shown["numbers"]) == (None, None, [])
    (nearest,) = shown["changes"]
    assert len(nearest["layouts"]) == len(found.nearest) > 0
    for change, of in zip(nearest["layouts"], found.nearest, strict=True):
        assert calculator.layout(change["fields"].items()) == of.layout
        assert say.differences(of) in change["text"]


def test_what_does_not_fit_is_said_with_the_change_that_fits(calculator: Calculator) -> None:
    too_large = fields(calculator.start, zero_stage="0", recompute="none", tensor_parallel_size="1")
    found = calculator.explain(calculator.layout(too_large))
    assert found.illegal is None
    assert found.to_fit is not None
    shown = calculation(found, why_no_times="")
    assert shown["memory"]["fits"] is False
    assert "too much" in shown["sentences"][0]
    assert shown["changes"][0]["layouts"][0]["text"] == say.fitting_sentence(found, found.to_fit)


def test_without_times_the_step_says_why(calculator: Calculator) -> None:
    found = replace(calculator.explain(calculator.start), seconds_by_part=None, step_band=None)
    shown = calculation(found, why_no_times="nobody knows")
    assert shown["step"] is None
    assert shown["sentences"][1] == "Step: no time is predicted: nobody knows."
    assert {row[0]: row[1] for row in shown["numbers"]}["tokens/s/GPU"] == show.UNKNOWN

"""One pass names the mistakes of every kind: YAML, keys and values, rules over several of them."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.sweepfile.spec_yaml import load

BASE = "name: a\nmodel: llama-tiny\ngpus: 1\nsequence_length: 64\nglobal_batch_size: 8\n"
COMMAND = "workload: {name: command, options: {argv: [train, '{mbss}'], %s}}\n"


def mistakes(text: str, *overrides: str) -> list[str]:
    """The places and keys of all mistakes, and the first words of what is wrong."""
    with pytest.raises(SpecInvalid) as refused:
        load(text, source="s", overrides=overrides)
    return [line[:60] for line in str(refused.value).splitlines()]


def begin(lines: list[str], *starts: str) -> bool:
    assert len(lines) == len(starts), lines
    return all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_a_wrong_value_hides_no_rule_of_the_file() -> None:
    text = BASE.replace("gpus: 1", "gpus: 12") + (
        "gpus_per_node: 8\n"
        "device: h800\n"
        "search: {bound: 0.1, strategy: tpe, max_cost: 3, max_trials: 0}\n"
        "measurement: {min_steps: 60, warmup_steps: 1}\n"
    )
    assert begin(
        mistakes(text),
        "s:3:7: gpus: gpus 12 are not whole nodes of 8",
        "s:8:17: search.bound: strategy tpe predicts no gain",
        "s:8:47: search.max_cost: device h800 has no list price",
        "s:8:62: search.max_trials: 0 is less than 1",
        "s:9:26: measurement.min_steps: min_steps 60 is more than",
        "s:9:44: measurement.warmup_steps: 1 is less than 2",
    )


def test_rules_of_the_whole_file_are_told_together() -> None:
    text = BASE + "search: {bound: 0.1, strategy: tpe, max_cost: 3}\ndevice: h800\n"
    assert begin(
        mistakes(text), "s:6:17: search.bound: strategy tpe", "s:6:47: search.max_cost: device h800"
    )


def test_a_rule_over_a_value_that_is_wrong_itself_is_not_judged() -> None:
    # max_steps would be 50 if it were left out, and no price and no batch would be given.
    text = BASE.replace("global_batch_size: 8", "global_batch_tokens: many") + (
        "measurement: {min_steps: 60, max_steps: many}\n"
        "device: h800\nprice_per_gpu_hour: much\nsearch: {max_cost: 3}\n"
    )
    assert begin(
        mistakes(text),
        "s:5:22: global_batch_tokens: 'many' is no number of tokens",
        "s:6:41: measurement.max_steps: expected a whole number",
        "s:8:21: price_per_gpu_hour: expected a number",
    )


def test_options_of_a_workload_that_is_not_known_are_no_mistakes() -> None:
    axes = "axes: {options: {lr: [1, 2]}}\nconstraints: lr < 2\n"
    assert begin(
        mistakes(BASE + "workload: {name: comand, options: {argv: [a]}}\n" + axes),
        "s:6:18: workload.name: 'comand' is not one of",
    )
    assert begin(
        mistakes(BASE + "workload: {name: command, options: {cwd: /}}\nsearch: 3\n" + axes),
        "s:6:36: workload.options.argv: is required",
        "s:7:9: search: expected a mapping",
    )
    # If only a command's working folder is wrong, its templates are still checked.
    assert begin(
        mistakes(BASE + COMMAND % "cwd: here" + axes),
        "s:6:51: workload.options.argv[1]: '{mbss}' in '{mbss}' is",
        "s:6:67: workload.options.cwd: 'here' is relative",
    )


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ("search: {confirm: {repeats: 3}", "7:1: not YAML: did not find expected ','"),
        ("search:\n\tconfirm: 3", "7:1: not YAML: a tab at the start of the line"),
        ("objective: 'tokens", "10:1: not YAML: found unexpected end of stream"),
        ("constraints: [a, b: c: d]", "6:22: not YAML: "),
    ],
)
def test_a_section_that_is_not_yaml_hides_no_mistake_of_the_others(broken: str, place: str) -> None:
    num = broken.count("\n")
    rest = "measurement: {warmup_steps: 1}\nsearch_: 3\ndevice: h800\n"
    lines = mistakes(BASE + f"{broken}\n{rest}")
    assert any(line.startswith(f"s:{place}"[:40]) for line in lines), lines
    (of_value,) = [line for line in lines if "measurement.warmup_steps: 1 is less" in line]
    assert of_value.startswith(f"s:{7 + num}:29: ")
    (of_key,) = [line for line in lines if "search_: unknown key" in line]
    assert of_key.startswith(f"s:{8 + num}:1: ")
    assert len(lines) == 3


def test_two_sections_that_are_not_yaml_are_both_told() -> None:
    lines = mistakes(BASE + "axes: {a: [1}\nsearch: {b: [2}\ndevice: h9\n")
    assert begin(lines, "s:6:13: not YAML", "s:7:15: not YAML", "s:8:9: device: 'h9' is not one")


def test_a_key_whose_section_cannot_be_read_is_not_missing() -> None:
    assert begin(
        mistakes("name: a\nmodel: [llama-tiny\ngpus: 0\n"),
        "s:1:1: sequence_length: is required",
        "s:1:1: the global batch is required",
        "s:3:5: not YAML",
        "s:3:7: gpus: 0 is less than 1",
    )


def test_hostile_text_is_not_read_again() -> None:
    lines = mistakes(BASE + "axes: " + "[" * 60 + "]" * 60 + "\nsearch_: 3\n")
    assert len(lines) == 1

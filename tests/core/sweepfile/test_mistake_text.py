"""The hint of an unknown key, in every section of a sweep file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.core.errors import SpecInvalid
from orchestrator.core.sweepfile.mistake_text import _sections, shown
from orchestrator.core.sweepfile.spec_yaml import load

BASE = {
    "name": "a",
    "model": "llama-tiny",
    "gpus": 1,
    "sequence_length": 64,
    "global_batch_size": 8,
}
# Sections that are entries of a list or of a mapping.
IN_LISTS = ("faults", "drift")
IN_MAPPINGS = ("activations", "also")


def told(path: str, key: str, workload: str) -> list[str]:
    """The lines about a file that has this key in this section, and nothing else in it."""
    section: Any = {key: 1}
    for part in reversed(path.split(".")) if path else ():
        if part in IN_LISTS:
            section = [section]
        elif part in IN_MAPPINGS:
            section = {"full": section}
        section = {part: section}
    if workload:
        section["workload"]["name"] = workload
    with pytest.raises(SpecInvalid) as refused:
        load(json.dumps({**BASE, **section}), source="s.yaml")
    return str(refused.value).splitlines()


@pytest.mark.parametrize("section", _sections(), ids=lambda section: section.path + section.of)
def test_a_mistyped_key_is_answered_with_the_one_that_is_meant(section: Any) -> None:
    for key in section.keys:
        mistyped = key[:-1] if key.endswith("s") else f"{key}s"
        lines = told(section.path, mistyped, section.of.removeprefix(" of "))
        (line,) = [line for line in lines if f"{mistyped}: unknown key" in line]
        assert f"; did you mean {key}?" in line, line


def line_about(path: str, key: str) -> str:
    """The line about an unknown key in a section."""
    (line,) = [line for line in told(path, key, "") if f"{key}: unknown key" in line]
    return line


@pytest.mark.parametrize(
    ("path", "key", "hint"),
    [
        ("search", "repeats", "; repeats belongs to search.confirm"),
        ("search", "repeat", "; did you mean search.confirm.repeats?"),
        ("measurement", "stedy", "; did you mean measurement.limits.steady?"),
        ("", "max_trials", "; max_trials belongs to search"),
        ("axes", "argv", "; argv belongs to workload.options of command"),
        ("search", "zzzzzz", "`sweep schema` lists all 13"),
        ("search.confirm", "zzzzzz", "; allowed: contenders, repeats"),
    ],
)
def test_a_key_of_another_section_is_sent_there(path: str, key: str, hint: str) -> None:
    assert line_about(path, key).endswith(hint)


@pytest.mark.parametrize(
    ("path", "key", "hint"),
    [
        # Half of its letters are those of `mirror`.
        ("", "micro", "; did you mean axes.micro_batch_size?"),
        ("axes", "micro", "; did you mean micro_batch_size?"),
        ("", "MBS", "; did you mean axes.micro_batch_size?"),
        ("", "gas", "; did you mean axes.grad_accum_steps?"),
        ("", "zero", "; did you mean axes.zero_stage?"),
        ("", "recomp", "; did you mean axes.recompute?"),
        ("search", "max", "; did you mean max_trials, max_gpu_hours or max_cost?"),
        ("search", "trial", "; did you mean max_trials or max_parallel_trials?"),
    ],
)
def test_the_hint_shares_a_part_with_the_key_or_is_the_fields_word(
    path: str, key: str, hint: str
) -> None:
    assert line_about(path, key).endswith(hint)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("confirm", "off", "got 'off'; {repeats: 0} switches it off"),
        ("confirm", "false", "got false; {repeats: 0} switches it off"),
        ("plateau", "no", "got 'no'; null switches it off"),
        ("max_trials", "off", "got 'off'; null switches it off"),
        ("early_stop", "off", "got 'off'; did you mean false?"),
        ("early_stop", "on", "got 'on'; did you mean true?"),
        ("dominance", "false", "is not one of trusted, confirmed, off; did you mean off?"),
    ],
)
def test_what_switches_a_key_off_is_named(key: str, value: str, hint: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        load(json.dumps(BASE), source="s.yaml", overrides=[f"search.{key}={value}"])
    assert str(refused.value).endswith(hint)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "nothing"),
        (True, "true"),
        (8.0, "8.0"),
        ("a" * 78, f"'{'a' * 78}'"),
        # 81 characters with its quotes.
        ("a" * 79, f"'{'a' * 76}..."),
    ],
)
def test_a_value_is_shown_in_eighty_characters(value: object, said: str) -> None:
    assert shown(value) == said
    assert len(said) <= 80


def test_two_letters_are_part_of_too_many_names() -> None:
    assert line_about("search", "ma").endswith("`sweep schema` lists all 13")
    # The second part of a name, too.
    assert line_about("search", "wal").endswith("; did you mean max_wall_time?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("search.max_trials=0", "0 is less than 1, the least allowed"),
        ("search.max_trials=many", "expected a whole number, got 'many'"),
        ("name=5", "expected a text, got 5; in quotes it is one"),
        ("gpus=[]", "the list is empty; give at least one value"),
        ("device_memory_gib=0", "0 is not more than 0"),
        ("device_memory_gib=5000", "5000 is more than 4096, the most allowed"),
    ],
)
def test_a_bound_or_a_kind_is_said_with_what_was_given(override: str, said: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        load(json.dumps(BASE), source="s.yaml", overrides=[override])
    assert said in str(refused.value)

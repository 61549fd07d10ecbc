"""Config files of a command: what is refused, and that each format reads back what was meant."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.sweepfile.config_files import (
    MAX_INTEGER,
    checked_content,
    file_name,
    rendered,
    templates,
)

VALUES = {"micro_batch_size": 4, "recompute": "full:8", "fused": True, "run_dir": "/runs/1"}
TREE = {
    "train_micro_batch_size_per_gpu": "{micro_batch_size}",
    "name": "mbs{micro_batch_size}",
    "zero_optimization": {"stage": 1, "fused": "{fused}", "words": "fused={fused}"},
    "optimizer": {"params": {"betas": [0.9, 0.95], "lr": 1e-5, "names": ["{recompute}", "{{x}}"]}},
    "tables": [{"a": 1}, {"a": 2}],
}
MEANT = {
    "train_micro_batch_size_per_gpu": 4,
    "name": "mbs4",
    "zero_optimization": {"stage": 1, "fused": True, "words": "fused=true"},
    "optimizer": {"params": {"betas": [0.9, 0.95], "lr": 1e-5, "names": ["full:8", "{x}"]}},
    "tables": [{"a": 1}, {"a": 2}],
}
READERS = {"a.json": json.loads, "a.yaml": yaml.safe_load, "a.YML": yaml.safe_load}


def read_back(name: str, content: Any) -> Any:
    text = rendered(name, checked_content(name, content), VALUES)
    if name.endswith(".toml"):
        pytest.importorskip("tomli_w", reason="`make install-dev` installs it")
        return tomllib.loads(text)
    return READERS[name](text)


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.YML", "a.toml"])
def test_a_mapping_is_written_in_the_format_of_its_name_and_a_lone_name_keeps_its_type(
    name: str,
) -> None:
    if name.endswith(".toml"):
        pytest.importorskip("tomli_w", reason="`make install-dev` installs it")
    found = read_back(name, TREE)
    assert found == MEANT
    assert type(found["train_micro_batch_size_per_gpu"]) is int
    assert found["zero_optimization"]["fused"] is True


def test_null_is_written_where_the_format_has_it_and_refused_where_it_has_not() -> None:
    assert read_back("a.json", {"a": None}) == {"a": None}
    assert read_back("a.yaml", {"a": None}) == {"a": None}
    with pytest.raises(
        ValueError, match=r"^a\.toml: a\.b\.1: TOML has no null; leave the key out$"
    ):
        checked_content("a.toml", {"a": {"b": [1, None]}})


def test_a_text_is_filled_in_as_it_is_under_any_name() -> None:
    text = "#!/bin/sh\nexec python train.py --mbs {micro_batch_size} ${{HOME}}\n"
    assert rendered("run.sh", checked_content("run.sh", text), VALUES) == (
        "#!/bin/sh\nexec python train.py --mbs 4 ${HOME}\n"
    )
    assert rendered("ds.json", "{{}}", VALUES) == "{}"


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="{}\0"), max_size=20)
    | st.sampled_from(["no", "on", "1e-3", "0x1f", "0o17", "1:30", "~", "null", "", "2024-01-01"])
)
_KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
_TREES = st.dictionaries(
    _KEYS,
    st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(_TREES)
def test_json_and_yaml_read_back_every_mapping_as_it_was(tree: dict[str, Any]) -> None:
    assert read_back("a.json", tree) == tree
    assert read_back("a.yaml", tree) == tree


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a/b.json", "no name of a file in the run folder"),
        ("../a.json", "no name of a file in the run folder"),
        ("a..b", "no name of a file in the run folder"),
        (".hidden", "no name of a file in the run folder"),
        ("-rf", "no name of a file in the run folder"),
        ("", "no name of a file in the run folder"),
        ("a" * 101, "no name of a file in the run folder"),
        ("request.json", "is a file of this program"),
        ("Result-0.json", "is a file of this program"),
        ("log-12.txt", "is a file of this program"),
        ("program-metrics.jsonl", "is a file of this program"),
        ("stop", "is a file of this program"),
    ],
)
def test_a_name_that_is_a_path_or_our_own_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        file_name(name)


@pytest.mark.parametrize("name", ["ds.json", "train.toml", "run.sh", "log.txt", "results.json"])
def test_other_names_are_taken(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.ini", {"a": 1}, r"a\.ini: a mapping needs a name that ends in \.json, \.yaml"),
        ("a.json", [1], r"a\.json: expected a mapping, or the text of the file"),
        ("a.json", {"a": {"b": ["x", "{"]}}, r"^a\.json: a\.b\.1: '\{' in '\{' is not a name"),
        ("a.json", {"a": {1: 2}}, r'^a\.json: a\.1: a key is a text .* quote it: "1"'),
        ("a.json", {"a": float("nan")}, r"^a\.json: a: nan is no number"),
        ("a.json", {"a": 1 << 64}, r"^a\.json: a: a number beyond 64 bits"),
        ("a.json", {"a": {"b": object()}}, r"^a\.json: a\.b: expected a text, number"),
    ],
)
def test_what_no_format_can_write_is_refused_with_its_path(
    name: str, content: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        checked_content(name, content)


def test_a_content_that_is_too_deep_is_refused() -> None:
    tree: Any = 1
    for _ in range(60):
        tree = {"a": tree}
    with pytest.raises(ValueError, match="more than 50 levels"):
        checked_content("a.json", tree)


def test_every_text_is_found_with_its_place() -> None:
    assert list(templates({"a": ["x", {"b": "{seed}"}], "c": 1})) == [
        (("a", 0), "x"),
        (("a", 1, "b"), "{seed}"),
    ]


def test_keys_numbers_and_levels_have_their_bounds() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    good = {"x" * 256: 1, "most": 2**63 - 1, "least": -(2**63) + 1, "deep": deep[0]}
    assert checked_content("a.json", good) == good
    for bad, said in (
        ({"x" * 257: 1}, "a key is a text of 1 to 256 characters"),
        ({"": 1}, "a key is a text of 1 to 256 characters"),
        ({"a": 2**63}, "a.json: a: a number beyond 64 bits"),
        ({"a": -(2**63)}, "a.json: a: a number beyond 64 bits"),
        ({"deep": deep}, "a.json: deep.0.0...: more than 50 levels"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            checked_content("a.json", bad)


def test_json_is_indented_by_two_and_yaml_keeps_the_order_of_its_keys() -> None:
    content = {"b": 1, "a": {"c": "{x}"}}
    assert (
        rendered("a.json", content, {"x": 3})
        == """{
  "b": 1,
  "a": {
    "c": 3
  }
}
"""
    )
    assert rendered("a.yaml", content, {"x": 3}) == "b: 1\na:\n  c: 3\n"


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_letters_beyond_ascii_are_written_as_they_are(name: str) -> None:
    assert "Ergebnisse für später" in rendered(name, {"path": "Ergebnisse für später"}, {})

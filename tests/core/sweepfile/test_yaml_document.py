from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.sweepfile.yaml_document import (
    MAX_BYTES,
    Place,
    YamlRefused,
    read,
    read_rest,
    scalar,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Where YAML 1.1 and 1.2 differ: 1.1 reads False, text, 90, 4-octal, 1000, text, a date.
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1e-3", 1e-3),
        ("1E6", 1e6),
        ("1:30", "1:30"),
        ("010", 10),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("0b101", "0b101"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0x1F", 31),
        ("-7", -7),
        ("+3", 3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-1.", -1.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1e", "1e"),
        ("0o8", "0o8"),
        ("-0x1", "-0x1"),
        ("4M", "4M"),
        ("tRue", "tRue"),
    ],
)
def test_scalars_are_read_by_the_core_schema(text: str, value: Any) -> None:
    found = scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_what_is_quoted_is_text() -> None:
    assert read(
        """{a: "1", b: '2', c: |\n  3\n, d: >\n  4\n}""".replace("|\n  3\n", "'3'").replace(
            ">\n  4\n", '"4"'
        )
    ).value == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "4",
    }
    assert read("a: |\n  5\nb: >-\n  6\n").value == {"a": "5\n", "b": "6"}


def test_places_are_of_keys_and_of_values() -> None:
    document = read("a: 1\nb:\n  - x\n  - {c: 2}\n")
    assert document.key_places[("b",)] == Place(2, 1)
    assert document.value_places[("a",)] == Place(1, 4)
    assert document.value_places[("b", 1, "c")] == Place(4, 9)
    assert document.key_places[("b", 1, "c")] == Place(4, 6)


def test_anchors_and_merges_are_expanded_and_own_keys_win() -> None:
    document = read(
        "base: &base {x: 1, y: 2}\nother: &other {y: 3, z: 4}\nboth:\n  <<: [*base,"
        " *other]\n  x: 9\ncopy: *base\n"
    )
    assert document.value["both"] == {"x": 9, "y": 2, "z": 4}
    assert document.value["copy"] == {"x": 1, "y": 2}
    assert document.value_places[("both", "y")] == Place(1, 23)  # where it was written
    assert document.value_places[("both", "x")] == Place(5, 6)
    assert document.mistakes == []


def test_a_key_twice_is_a_mistake_with_both_places() -> None:
    document = read("a: 1\nb: {c: 1, c: 2}\na: 3\n")
    assert [(m.place, m.path, m.message) for m in document.mistakes] == [
        (Place(2, 11), ("b", "c"), "key 'c' appears twice; first at 2:5"),
        (Place(3, 1), ("a",), "key 'a' appears twice; first at 1:1"),
    ]


@pytest.mark.parametrize("key", ["1", "true", "~", "1.5", "[a]", "{a: b}"])
def test_a_key_that_is_no_word_is_a_mistake(key: str) -> None:
    assert "is not a word" in read(f"? {key}\n: x\n").mistakes[0].message


@pytest.mark.parametrize(("depth", "fine"), [(50, True), (51, False)])
def test_depth_has_a_limit(depth: int, fine: bool) -> None:
    text = "[" * depth + "]" * depth
    if fine:
        read(text)
    else:
        with pytest.raises(YamlRefused, match="nested more than 50 deep"):
            read(text)


def test_the_number_of_values_has_a_limit_that_counts_aliases_at_their_size() -> None:
    assert len(read("[" + "1," * 9_998 + "1]").value) == 9_999  # and the list itself
    with pytest.raises(YamlRefused, match="more than 10,000 values"):
        read("[" + "1," * 10_000 + "1]")
    hundred = "a: &a [" + "1," * 98 + "1]\n"  # 100 values with the list
    read(hundred + "b: [" + "*a," * 98 + "]\n")
    with pytest.raises(YamlRefused, match=r"2:\d+: more than 10,000 values"):
        read(hundred + "b: [" + "*a," * 99 + "]\n")


# YAML folds line separators and has no surrogate pairs or control characters, unlike JSON.
texts = st.text(
    alphabet=st.characters(exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp")), max_size=20
)
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


@given(value=json_values)
def test_json_reads_as_json_does(value: Any) -> None:
    document = read(json.dumps(value, ensure_ascii=False))
    assert document.value == value
    assert document.mistakes == []


@given(text=st.text(max_size=100))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text)
    except YamlRefused as exc:
        assert exc.place >= Place(1, 1)  # noqa: PT017


def test_the_size_of_a_text_is_that_of_its_bytes() -> None:
    text = "a: 1 #"
    assert read(text + "a" * (MAX_BYTES - len(text))).value == {"a": 1}
    with pytest.raises(YamlRefused, match="larger than"):
        read(text + "a" * (MAX_BYTES - len(text) + 1))
    # Half as many letters as bytes.
    with pytest.raises(YamlRefused, match="larger than"):
        read(text + "é" * (MAX_BYTES // 2))


@pytest.mark.parametrize(
    ("text", "place"),
    [("\x01", Place(1, 1)), ("a: \x01", Place(1, 4)), ("a: 1\nbc: \x01", Place(2, 5))],
)
def test_a_control_character_is_refused_at_its_place(text: str, place: Place) -> None:
    with pytest.raises(YamlRefused, match="control character") as caught:
        read(text)
    assert caught.value.place == place


def test_a_text_with_many_sections_that_are_no_yaml_is_refused_for_the_first() -> None:
    for num in (1, 20):
        text = "a: 1\n" + "".join(f"b{number}: ]\n" for number in range(num)) + "c: 3\n"
        with pytest.raises(YamlRefused) as caught:
            read(text)
        found = read_rest(text, caught.value)
        if num == 1:
            assert found.document is not None
            assert found.document.value == {"a": 1, "c": 3}
            assert found.left_out == ["b0"]
        else:
            assert (found.document, found.left_out) == (None, ())
        assert found.refused == [caught.value]

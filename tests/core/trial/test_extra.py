"""Fields of a program's own: whatever they are, what is kept is small and every store takes it."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.trial.extra import MAX_BYTES, bounded_extra

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


def test_what_is_small_and_plain_is_kept_as_it_is() -> None:
    told = {"tflops": 239.8, "scaler": 1, "note": "warm", "by_layer": [1, {"a": None}], "ok": True}
    assert bounded_extra(told) == told


def test_numbers_that_json_does_not_have_become_unknown() -> None:
    assert bounded_extra({"a": math.nan, "b": [math.inf], "c": 10**400}) == {
        "a": None,
        "b": [None],
        "c": None,
    }


def test_too_many_fields_and_too_large_ones_are_counted_and_not_kept() -> None:
    many = bounded_extra({f"f{number}": number for number in range(67)})
    assert (len(many), many["dropped_fields"], many["f0"]) == (65, 3, 0)
    large = bounded_extra({"big": ["x" * 900] * 40, "small": 1})
    assert large == {"small": 1, "dropped_fields": 1}
    # Reading a result again, as each process on its way does, changes nothing.
    assert bounded_extra(large) == large


@given(st.dictionaries(st.text(max_size=120), _ANY, max_size=80))
def test_whatever_is_told_what_is_kept_can_be_stored(told: dict[str, Any]) -> None:
    kept = bounded_extra(told)
    text = json.dumps(kept, allow_nan=False)
    assert len(text.encode()) <= MAX_BYTES + 200
    assert "\\u0000" not in text
    text.encode("utf-8")
    assert bounded_extra(kept) == kept


def test_a_whole_number_of_64_bits_is_kept_and_a_larger_one_is_a_float_or_unknown() -> None:
    largest = 2**63 - 1
    kept = bounded_extra(
        {"a": largest, "b": -largest, "c": largest + 1, "d": 9 * 10**299, "e": 15 * 10**299}
    )
    assert kept == {"a": largest, "b": -largest, "c": 2.0**63, "d": 9e299, "e": None}
    assert [type(value) for value in kept.values()] == [int, int, float, float, type(None)]


def test_names_have_100_characters_and_texts_1000() -> None:
    told = {"n" * 101: "t" * 1001, "inner": {"m" * 101: 1}}
    assert bounded_extra(told) == {"n" * 100: "t" * 1000, "inner": {"m" * 100: 1}}


def test_what_is_nested_more_than_six_deep_is_text() -> None:
    value: Any = [7]
    for _ in range(6):
        value = [value]
    kept = bounded_extra({"deep": value})["deep"]
    assert kept == [[[[[["[7]"]]]]]]
    value = {"k": 7}
    for _ in range(6):
        value = {"k": value}
    kept = bounded_extra({"deep": value})["deep"]
    assert kept == {"k": {"k": {"k": {"k": {"k": {"k": "{'k': 7}"}}}}}}


def test_fields_take_16_kib_together() -> None:
    """Each of these is 1,012 bytes of JSON, and the braces are two: 16 of them fit."""
    told = {f"f{number:03}": "x" * 1000 for number in range(20)}
    kept = bounded_extra(told)
    assert len(kept) == 16 + 1
    assert kept["dropped_fields"] == 4


def test_the_last_byte_of_16_kib_is_used() -> None:
    """The braces take two of them, and a field has its own."""
    texts = ["x" * 1000] * 16
    rest = (16 << 10) - 2 - len(json.dumps({"a": [*texts, ""]}))
    fits, too_long = ({"a": [*texts, "x" * length]} for length in (rest, rest + 1))
    assert bounded_extra(fits) == fits
    assert bounded_extra(too_long) == {"dropped_fields": 1}

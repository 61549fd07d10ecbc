"""The kinds of values of a sweep file: how they are written, and how large they may be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from orchestrator.core.sweepfile.spec_values import (
    Count,
    Duration,
    Length,
    Name,
    OptionName,
    OptionValues,
    OrAuto,
    Some,
    Tokens,
    few,
    few_options,
)


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (Tokens, "512", 512),
        (Tokens, "3K", 3_072),
        (Tokens, "2 m", 2_097_152),
        (Tokens, "1024g", 1 << 40),
        (Tokens, 1, 1),
        (Length, "8K", 8_192),
        (Length, "16M", 1 << 24),
        (Duration, "1.5s", 1.5),
        (Duration, "2min", 120.0),
        (Duration, "3 m", 180.0),
        (Duration, "2h", 7_200.0),
        (Duration, "1d", 86_400.0),
        (Duration, "0.000001s", 1e-6),
        (Duration, "100000000s", 1e8),
        (Duration, 1e-9, 1e-9),
        (Count, 1, 1),
        (Count, 1 << 24, 16_777_216),
        (Name, "a", "a"),
        (Name, "x" * 63, "x" * 63),
        (Name, "a.b-c_9", "a.b-c_9"),
        (OptionName, "x" * 63, "x" * 63),
        (OptionValues, ["x" * 100, 10**15, -(10**15), True], ("x" * 100, 10**15, -(10**15), True)),
        (OptionValues, list(range(64)), tuple(range(64))),
        (Some[Count], list(range(1, 4097)), tuple(range(1, 4097))),
        (Some[Count], 7, (7,)),
        (OrAuto[Count], "auto", "auto"),
    ],
)
def test_a_value_is_read_as_it_is_meant(kind: Any, written: object, read: object) -> None:
    assert TypeAdapter(kind).validate_python(written) == read


@pytest.mark.parametrize(
    ("kind", "written", "said"),
    [
        (Tokens, 0, "greater than or equal to 1"),
        (Tokens, "1025g", "less than or equal to 1099511627776"),
        (Tokens, "1" + "0" * 18, "is no number of tokens; write a whole number, or 4M = 4 * 2**20"),
        (Tokens, "1T", "is no number of tokens"),
        (Length, "16777217", "less than or equal to 16777216"),
        (Duration, 0.0, "greater than 0"),
        (Duration, "100000001s", "less than or equal to 100000000"),
        (Duration, "1000000000000s", "is no duration"),
        (Duration, "1.0000001s", "is no duration; write seconds, or 90s, 5min, 2h, 1d"),
        (Duration, "2 hours", "2h, 1d; did you mean 2h?"),
        (Duration, "5 Minutes", "; did you mean 5min?"),
        (Duration, "10 secs.", "; did you mean 10s?"),
        (Duration, "3days", "; did you mean 3d?"),
        (Duration, "0.05 ms", "; did you mean 0.00005s or 0.05s?"),
        (Duration, "0.0001 ms", "; did you mean 0.0001s?"),
        (Duration, "1.23456789 sec", "; did you mean 1.234568s?"),
        (Count, 0, "greater than or equal to 1"),
        (Count, (1 << 24) + 1, "less than or equal to 16777216"),
        (Name, "x" * 64, "is not 1 to 63 of a-z 0-9"),
        (Name, "", "is not 1 to 63 of a-z 0-9"),
        (Name, "a..b", "is not 1 to 63 of a-z 0-9"),
        (Name, "-a", "is not 1 to 63 of a-z 0-9"),
        (OptionName, "x" * 64, "is no name of an option"),
        (OptionName, "1x", "is no name of an option"),
        (OptionValues, ["x" * 101], "is no value of an option"),
        (OptionValues, [10**15 + 1], "is no value of an option"),
        (OptionValues, [-(10**15) - 1], "is no value of an option"),
        (OptionValues, [1.5], "is no value of an option"),
        (OptionValues, ["a\nb"], "is no value of an option"),
        (OptionValues, list(range(65)), "65 values; at most 64"),
        (OptionValues, [], "at least 1 item"),
        (OptionValues, ["b", "a", "a"], "a appears twice in the list"),
        (Some[Count], list(range(1, 4098)), "4,097 values; at most 4,096"),
        (Some[Count], [2, 1, 2], "2 appears twice in the list"),
    ],
)
def test_what_a_value_may_not_be_is_said(kind: Any, written: object, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(written)
    assert said in str(caught.value)


def test_few_are_as_many_as_somebody_writes() -> None:
    assert few(list(range(64))) == list(range(64))
    with pytest.raises(ValueError, match=r"^65 values; at most 64$"):
        few(list(range(65)))
    assert len(few_options(dict.fromkeys(range(16)))) == 16
    with pytest.raises(ValueError, match=r"^17 options; at most 16$"):
        few_options(dict.fromkeys(range(17)))

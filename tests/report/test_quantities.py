"""Each quantity has one text in every table; an unknown one is a dash."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from orchestrator.report import quantities

GIB = 1 << 30


@pytest.mark.parametrize(
    "text",
    [
        quantities.tokens_rate,
        quantities.confidence,
        quantities.percent,
        quantities.step_time,
        quantities.memory,
        quantities.gpu_hours,
        quantities.duration,
        quantities.at,
        quantities.short_digest,
    ],
)
def test_an_unknown_quantity_is_a_dash(text: object) -> None:
    assert text(None) == "-"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("relative", "column", "sentence"),
    [
        (None, "-", "8,909 (95 % interval unknown)"),
        (0.013, "±1.3%", "8,909 ±1.3%"),
        (0.999, "±99.9%", "8,909 ±99.9%"),
        (3.02, "unknown", "8,909 (95 % interval unknown)"),
    ],
)
def test_an_interval_as_wide_as_its_number_says_nothing_of_it(
    relative: float | None, column: str, sentence: str
) -> None:
    assert quantities.confidence(relative) == column
    assert quantities.with_confidence("8,909", relative) == sentence


def test_a_number_agrees_with_its_noun() -> None:
    assert [quantities.counted(number, "trial") for number in (0, 1, 1234)] == [
        "0 trials",
        "1 trial",
        "1,234 trials",
    ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([7], "trial 7"),
        ([7, 8], "trials 7 and 8"),
        ([7, 8, 9], "trials 7, 8 and 9"),
        (list(range(1, 21)), "trials 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"),
    ],
)
def test_ids_are_listed_until_there_are_too_many(ids: list[int], text: str) -> None:
    assert quantities.numbered("trial", ids) == text


def test_a_speed_has_the_digits_of_a_measurement() -> None:
    assert [quantities.tokens_rate(value) for value in (12345.6, 100.0, 3.14159)] == [
        "12,346",
        "100",
        "3.14",
    ]


def test_a_step_time_is_in_the_unit_that_needs_the_fewest_zeros() -> None:
    assert [quantities.step_time(seconds) for seconds in (0.0374, 1.5, 61.27)] == [
        "37.4 ms",
        "1.500 s",
        "61.3 s",
    ]


def test_memory_is_in_the_unit_of_its_size_or_of_its_limit() -> None:
    assert [quantities.memory(size) for size in (0, 512, 3 << 20, 5 * GIB)] == [
        "0.0 MiB",
        "0.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert quantities.memory_of(61 * GIB, 79 * GIB) == "61.0 of 79.0 GiB"
    assert quantities.memory_of(GIB // 64, 79 * GIB) == "0.016 of 79.0 GiB"
    assert quantities.memory_of(3 << 20, None) == "3.0 MiB"
    assert quantities.memory_of(None, 79 * GIB) == "-"


def test_gpu_hours_keep_two_digits_that_say_something() -> None:
    assert [quantities.gpu_hours(seconds) for seconds in (0.0, 20.0, 7200.0)] == [
        "0.00",
        "0.0056",
        "2.00",
    ]


def test_shares_name_the_parts_that_are_not_zero() -> None:
    parts = {"useful": 61.0, "startup": 39.0, "out_of_memory": 0.0}
    assert quantities.shares(parts) == "useful 61.0%, start-up 39.0%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (0.44, "0.4 s"),
        (12.9, "12 s"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 05 min"),
        (76 * 3600.0, "3 d 4 h"),
    ],
)
def test_a_duration_is_in_the_two_largest_units(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text


def test_times_are_utc_with_or_without_a_zone() -> None:
    here = datetime(2026, 1, 2, 5, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    stored = datetime(2026, 1, 2, 3, 4, 5)
    assert quantities.at(here) == quantities.at(stored) == "2026-01-02 03:04:05"
    assert quantities.age_seconds(stored, datetime(2026, 1, 2, 3, 4, 7, tzinfo=UTC)) == 2.0

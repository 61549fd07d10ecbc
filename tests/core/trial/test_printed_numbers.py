"""Numbers as trainers print them, and the time of a step that each unit tells."""

from __future__ import annotations

import math

import pytest

from orchestrator.core.trial.printed_numbers import (
    BYTES_OF,
    PaceUnit,
    number_of,
    step_seconds_of,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5444.9", 5444.9),
        ("7,282", 7282.0),
        ("1,234,567.5", 1234567.5),
        ("11.5K", 11500.0),
        ("7.3k", 7300.0),
        ("1.2T", 1.2e12),
        ("75.2M", 75.2e6),
        ("85.8G", 85.8e9),
        ("3B", 3e9),
        ("9.46GiB", 9.46 * 2**30),
        (" 49.66 GiB ", 49.66 * 2**30),
        ("6406.00MB", 6406e6),
        ("6406kB", 6406e3),
        ("6406KiB", 6406 * 1024),
        ("9" * 100, 1e100),
        ("1.825991E+00", 1.825991),
        ("-.5", -0.5),
        ("3.", 3.0),
    ],
)
def test_a_number_is_read_as_people_write_it(text: str, number: float) -> None:
    assert number_of(text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "fast", "1,23", "1 2", "0x10", "5KiBs", "1.5iB", "--1", "１２", "9" * 101, "K"]
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert number_of(text) is None


def test_a_loss_that_is_not_finite_is_still_a_number() -> None:
    nan, inf = number_of("NaN"), number_of("-inf")
    assert nan is not None and math.isnan(nan)
    assert inf == -math.inf


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (0.5, "s"),
        (500.0, "ms"),
        (5e5, "us"),
        (2.0, "steps_per_second"),
        # 8 sequences of 128 tokens per step, on 4 GPUs.
        (2048.0, "tokens_per_second"),
        (512.0, "tokens_per_second_per_gpu"),
    ],
)
def test_each_unit_tells_the_same_step_of_half_a_second(number: float, unit: str) -> None:
    assert step_seconds_of(
        number, PaceUnit(unit), tokens_per_step=8 * 128, world_size=4
    ) == pytest.approx(0.5)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_no_step_takes_such_a_time(number: float) -> None:
    for unit in PaceUnit:
        assert step_seconds_of(number, unit, tokens_per_step=1, world_size=1) is None


def test_units_of_memory_are_powers_of_1000_or_of_1024() -> None:
    assert BYTES_OF == {
        "B": 1,
        "kB": 10**3,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }

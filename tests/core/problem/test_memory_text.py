"""Memory is shown in the unit that fits, next to a limit in the limit's."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.memory_text import memory_of_limit_text, memory_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 MiB"),
        (1, "0.0 KiB"),
        (512, "0.5 KiB"),
        (MIB - KIB, "1023.0 KiB"),
        (MIB, "1.0 MiB"),
        (GIB - MIB, "1023.0 MiB"),
        (GIB, "1.0 GiB"),
    ],
)
def test_memory_is_shown_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert memory_text(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "limit_bytes", "text"),
    [
        (61 * GIB, 79 * GIB, "61.0 of 79.0 GiB"),
        (GIB, GIB, "1.0 of 1.0 GiB"),
        (30 * MIB, 79 * GIB, "0.029 of 79.0 GiB"),
        (30 * MIB, GIB - MIB, "30.0 of 1023.0 MiB"),
        (512 * KIB, 40 * MIB, "0.500 of 40.0 MiB"),
    ],
)
def test_a_peak_of_a_small_share_of_its_limit_is_not_zero(
    num_bytes: int, limit_bytes: int, text: str
) -> None:
    assert memory_of_limit_text(num_bytes, limit_bytes) == text

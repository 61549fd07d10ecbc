"""What reports say together about memory that ran out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.trial.failure_kinds import MemoryShortage
from orchestrator.sweep.verdict import relative_excess

GIB = 1 << 30
REFUSED = MemoryShortage(is_reported=True, asked_bytes=6 * GIB, device_bytes=80 * GIB)
HELD = replace(REFUSED, live_bytes=78 * GIB)
UNKNOWN = MemoryShortage(is_reported=True)


@pytest.mark.parametrize(
    ("peak_bytes", "device_bytes", "memory", "excess"),
    [
        (79 * GIB, 80 * GIB, HELD, 0.05),  # 78 held and 6 tried
        (
            79 * GIB,
            80 * GIB,
            REFUSED,
            0.0625,
            # 79 and 6: its peak is all that is known of what it held.
        ),
        (None, None, HELD, 0.05),  # a program that left no note
        (90 * GIB, 80 * GIB, UNKNOWN, 0.125),
        (
            60 * GIB,
            80 * GIB,
            REFUSED,
            None,
            # 66 of 80: the rest was the allocator's, or another process's.
        ),
        (79 * GIB, 80 * GIB, None, None),
        (79 * GIB, None, UNKNOWN, None),
        (None, None, None, None),
    ],
)
def test_the_excess_is_what_was_held_and_tried_beyond_the_device(
    peak_bytes: int | None,
    device_bytes: int | None,
    memory: MemoryShortage | None,
    excess: float | None,
) -> None:
    found = relative_excess(peak_bytes, device_bytes, memory)
    assert found == (None if excess is None else pytest.approx(excess))

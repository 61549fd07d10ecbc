"""What reports say together about memory that ran out."""

from __future__ import annotations

import pytest

from orchestrator.sweep.verdict import relative_excess

GIB = 1 << 30
REFUSED = (
    "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 80.00 GiB of"
    " which 0.90 GiB is free."
)
HELD = (
    " Of the allocated memory 78.00 GiB is allocated by PyTorch, and"
    " 0.10 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("peak_bytes", "device_bytes", "said", "excess"),
    [
        (79 * GIB, 80 * GIB, REFUSED + HELD, 0.05),  # 78 held and 6 tried
        (
            79 * GIB,
            80 * GIB,
            REFUSED,
            0.0625,
        ),  # 79 and 6: its peak is all that is known of what it held
        (None, None, REFUSED + HELD, 0.05),  # a program that left no note
        (90 * GIB, 80 * GIB, "out of memory", 0.125),
        (
            60 * GIB,
            80 * GIB,
            REFUSED,
            None,
        ),  # 66 of 80: the rest was the allocator's, or another process's
        (79 * GIB, 80 * GIB, None, None),
        (79 * GIB, None, "MemoryError", None),
        (None, None, None, None),
    ],
)
def test_the_excess_is_what_was_held_and_tried_beyond_the_device(
    peak_bytes: int | None, device_bytes: int | None, said: str | None, excess: float | None
) -> None:
    found = relative_excess(peak_bytes, device_bytes, said)
    assert found == (None if excess is None else pytest.approx(excess))

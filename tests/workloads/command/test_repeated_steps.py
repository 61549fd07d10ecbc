"""Lines of several ranks, and lines that one rank writes several at a time."""

from __future__ import annotations

import pytest

from workloads.command.repeated_steps import RepeatedSteps


def seen(arrivals: list[tuple[float, int]], step: float, *, num_ranks: int = 2) -> bool:
    """Return whether two ranks seem to write each step; arrivals are times and new lines."""
    steps, total = RepeatedSteps(), 0
    for at, new in arrivals:
        total += new
        steps.note(total, step_seconds=[step] * total, at=at)
    return steps.are_written_by(num_ranks, step_seconds=[step] * total)


def test_two_lines_for_each_step_are_of_two_ranks() -> None:
    assert seen([(0.5 * n, 2) for n in range(6)], 0.5)
    # A look fell between the two lines of a step.
    assert seen([(0.5 * n + d, 1) for n in range(6) for d in (0.0, 0.05)], 0.5)
    # The first step took long.
    assert seen([(0.0, 2), *[(20 + 0.5 * n, 2) for n in range(6)]], 0.5)


@pytest.mark.parametrize(
    ("arrivals", "step"),
    [
        ([(0.5 * n, 1) for n in range(9)], 0.5),
        # Two steps at a time, by one rank.
        ([(1.0 * n, 2) for n in range(9)], 0.5),
        ([(0.0, 20)], 0.5),  # all at the end
        ([(0.05 * n, 2) for n in range(9)], 0.05),  # too short to tell apart
        ([(0.5 * n, 2) for n in range(4)], 0.5),  # too few
        ([(0.5 * n, 2 if n % 2 else 1) for n in range(9)], 0.5),
        # Not as many as there are ranks.
        ([(0.5 * n, 3) for n in range(9)], 0.5),
        ([], 0.5),
    ],
)
def test_other_arrivals_are_not(arrivals: list[tuple[float, int]], step: float) -> None:
    assert not seen(arrivals, step)


def test_one_rank_repeats_nothing() -> None:
    assert not seen([(0.5 * n, 1) for n in range(9)], 0.5, num_ranks=1)

"""The benchmark of mistakes of timing, with a few programs of each kind."""

from __future__ import annotations

import pytest

from benchmarks.timing_mistakes import MISTAKES, honest_marked, marked

# What a few trials cannot show: the time of ten long steps that come together, and a clock that
# waits only at steps that a trial hardly reaches.
HARD = ("buffered=10", "distance=20", "distance=10")
# Only the number of lines shows these, and later trials are ended early.
COUNTED_ONLY = {
    "a line for each micro-batch",
    "a numbered line for each micro-batch",
    "a line for several steps, with their sum",
}


def test_no_honest_program_is_marked() -> None:
    found = honest_marked(150, first_seed=1_000_000)["others"]
    assert found["programs"] > 100
    assert found["reasons"] == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_in_the_first_trial_of_a_cell(mistake: str) -> None:
    found = marked(mistake, seeds=1)
    missed = [what for what in found["first trial"]["missed"] if not what.endswith(HARD)]
    assert missed == []
    if mistake not in COUNTED_ONLY:
        assert found["later trial"]["marked"] > 0.7

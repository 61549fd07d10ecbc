"""The Pareto front against a comparison of all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.report.pictures import (
    pareto,
)
from orchestrator.report.sweep_rows import SweepRows


def test_the_front_is_the_one_that_comparing_all_pairs_finds(
    scaling: SweepRows, tiny: SweepRows
) -> None:
    found = pareto.candidates([scaling])

    def beats(a: pareto.Candidate, b: pareto.Candidate) -> bool:
        ours = (-a.tokens_per_second_per_gpu, a.memory_bytes, a.num_gpus)
        theirs = (-b.tokens_per_second_per_gpu, b.memory_bytes, b.num_gpus)
        return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))

    front = {one.trial_id for one in found if not any(beats(other, one) for other in found)}
    assert {one.trial_id for one in found if one.is_on_front} == front
    assert 0 < len(front) < len(found) == 6
    # Power is known there: 612 W at the measured speed.
    [joules] = {
        round(it.joules_per_token * it.tokens_per_second_per_gpu)
        for it in pareto.candidates([tiny])
        if it.joules_per_token is not None
    }
    assert joules == 612


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6), st.integers(1, 6), st.sampled_from([8, 16]), st.integers(1, 4)
        ),
        max_size=30,
    )
)
def test_the_front_of_any_layouts_is_that_of_all_pairs(
    rows: list[tuple[int, int, int, int]],
) -> None:
    some = [
        pareto.Candidate(
            trial_id=number,
            problem="one",
            tokens_per_second_per_gpu=float(speed),
            memory_bytes=memory,
            num_gpus=gpus,
            joules_per_token=float(joules),
        )
        for number, (speed, memory, gpus, joules) in enumerate(rows)
    ]

    def is_beaten(mine: tuple[int, int, int, int]) -> bool:
        return any(
            other != mine
            and other[0] >= mine[0]
            and other[1:] <= mine[1:]
            and all(a <= b for a, b in zip(other[1:], mine[1:], strict=True))
            for other in rows
        )

    front = {number for number, row in enumerate(rows) if not is_beaten(row)}
    assert {one.trial_id for one in pareto.front(some)} == front

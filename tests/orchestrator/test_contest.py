"""The contest of one cell: who leads it, however its runs come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contest import Contest
from orchestrator.core.drift import Run
from orchestrator.core.layout import Layout
from orchestrator.core.winner import median_run


def layout(trial_id: int) -> Layout:
    return Layout(data_parallel_size=1, micro_batch_size=1 + trial_id)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0])), min_size=1))
def test_the_leader_is_the_trial_with_the_fastest_median_after_every_run(runs: list[tuple[int, float]]) -> None:
    contest, all_of = Contest(), dict[int, list[Run]]()
    for trial_id, step_seconds in runs:
        run = Run(step_seconds=step_seconds, relative_confidence=None)
        contest.note(trial_id, layout(trial_id), run)
        all_of.setdefault(trial_id, []).append(run)
        seconds, fastest = min((median_run(some).step_seconds, one) for one, some in all_of.items())
        assert contest.best() == (layout(fastest), seconds)

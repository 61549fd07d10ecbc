"""What a cell's program reported: which layouts are still to be counted, which contradict."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.cell_plausibility import ToldLayout
from orchestrator.sweep.told_layouts import ToldLayouts


def told(seconds: float, **axes: int) -> ToldLayout:
    return ToldLayout(layout=Layout(**axes), seconds=seconds)


@pytest.mark.parametrize(
    ("reported", "is_implausible", "to_count"),
    [
        ({}, True, (True, True)),
        ({}, False, (False, True)),
        ({"grad_accum_steps": 2}, False, (False, False)),
        ({"grad_accum_steps": 2}, True, (True, True)),
    ],
)
def test_one_plausible_trial_ends_the_counting_for_layouts_with_as_many_micro_batches(
    reported: dict[str, int], is_implausible: bool, to_count: tuple[bool, bool]
) -> None:
    found = ToldLayouts()
    found.note(1, told(1.0, **reported), is_implausible=is_implausible)
    one, several = Layout(), Layout(grad_accum_steps=4)
    assert (found.has_to_count(one), found.has_to_count(several)) == to_count


def test_layouts_with_the_same_time_to_the_last_digit_are_named_once() -> None:
    found = ToldLayouts()
    for trial_id in (1, 2, 3):
        found.note(trial_id, told(0.123456789123, micro_batch_size=trial_id))
    reasons = found.newly_implausible()
    assert set(reasons) == {1, 2, 3} and "exactly" in reasons[1]
    found.note(1, told(0.123456789123, micro_batch_size=1), is_implausible=True)
    assert set(found.newly_implausible()) == {2, 3}

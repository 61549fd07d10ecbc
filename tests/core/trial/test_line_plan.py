"""The plan of a trial whose program writes lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.trial.line_count import next_line_patience_seconds
from orchestrator.core.trial.line_plan import LinePlan
from orchestrator.core.trial.stopping import begin
from tests.core.trial.test_stopping import GPU


def plan(*, steps_per_line: int = 1, counts_lines: bool = False) -> LinePlan:
    return LinePlan.of(GPU, steps_per_line=steps_per_line, counts_lines=counts_lines)


@pytest.mark.parametrize(
    ("steps_per_line", "least_warmup", "num_asked"), [(1, 3, 53), (2, 2, 27), (10, 1, 6)]
)
def test_lines_cover_the_steps_of_the_plan(
    steps_per_line: int, least_warmup: int, num_asked: int
) -> None:
    found = plan(steps_per_line=steps_per_line)
    assert (found.least_warmup, found.num_asked) == (least_warmup, num_asked)
    assert found.timing.warmup_steps == least_warmup
    assert found.timing.warmup_seconds == 2.0 / steps_per_line
    assert found.timing.min_seconds == 5.0 / steps_per_line


@pytest.mark.parametrize(("of_timing", "num"), [(None, 3), (2, 3), (20, 20), (40, 26)])
def test_half_of_the_lines_are_timed_in_any_case(of_timing: int | None, num: int) -> None:
    timing = replace(begin(GPU), num_warmup=of_timing)
    assert plan().num_warmup(timing) == num


def test_a_plan_without_warm_up_has_none_until_lines_show_more() -> None:
    bare = replace(plan(), least_warmup=0)
    for of_timing, num in ((None, 0), (1, 1)):
        assert bare.num_warmup(replace(begin(GPU), num_warmup=of_timing)) == num


def test_a_program_ends_early_unless_later_lines_could_show_more() -> None:
    even, uneven = [1.0] * 11, [1.0] * 10 + [9.0]
    timing = replace(begin(GPU), num_warmup=3, is_enough=True)
    assert plan().are_enough(even, timing)
    assert not plan().are_enough(even, replace(timing, is_enough=False))
    assert not plan().are_enough(uneven, timing)
    assert plan().are_enough(uneven, replace(timing, bound=1.0))
    assert not plan(counts_lines=True).are_enough(even, timing)
    assert plan(counts_lines=True).are_enough([1.0] * 53, timing)


@pytest.mark.parametrize(("step", "seconds"), [(0.0, 2.0), (4.0, 8.0), (100.0, 30.0)])
def test_one_more_line_is_awaited_for_a_step_and_some_seconds(step: float, seconds: float) -> None:
    assert next_line_patience_seconds([step] * 5) == seconds

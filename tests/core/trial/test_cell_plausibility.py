"""Layouts of a cell whose numbers contradict each other."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.cell_plausibility import ToldLayout, judge_cell


def cell(**seconds: float) -> dict[int, ToldLayout]:
    """By micro-batch size, `m4=0.5`: one replica, 16 sequences."""
    sizes = {int(name[1:]): value for name, value in seconds.items()}
    return {
        size: ToldLayout(
            layout=Layout(micro_batch_size=size, grad_accum_steps=16 // size), seconds=value
        )
        for size, value in sizes.items()
    }


def test_layouts_do_not_take_exactly_the_same_time() -> None:
    reasons = judge_cell(cell(m1=0.5123456, m2=0.5123456, m4=0.5123456, m8=0.71))
    assert set(reasons) == {1, 2, 4} and "does the program use its arguments" in reasons[1]
    assert judge_cell(cell(m1=0.5123456, m2=0.5123456, m4=0.5123457)) == {}
    assert judge_cell(cell(m1=0.52, m2=0.52, m4=0.52)) == {}  # rounded


def test_a_step_does_not_take_longer_in_proportion_to_its_micro_batch() -> None:
    reasons = judge_cell(cell(m1=0.101, m2=0.199, m4=0.41))
    assert set(reasons) == {1, 2, 4} and "the time of one micro-batch?" in reasons[4]
    assert judge_cell(cell(m1=0.9, m2=0.7, m4=0.6, m8=0.65)) == {}
    assert judge_cell(cell(m1=0.5, m2=0.51, m4=2.4)) == {}  # at the edge of its memory
    assert judge_cell(cell(m1=0.1, m4=0.4)) == {}  # too few to tell


def test_a_layout_that_was_measured_twice_is_one_micro_batch() -> None:
    some = cell(m1=0.101, m2=0.199, m4=0.41)
    some[9] = replace(some[2], seconds=0.2)
    assert set(judge_cell(some)) == {1, 2, 4, 9}


def test_a_micro_batch_takes_some_time_whatever_its_size() -> None:
    reasons = judge_cell(cell(m1=0.1 + 0.05, m2=0.1 + 0.1, m4=0.1 + 0.2))
    assert set(reasons) == {1, 2, 4}
    # The same of all micro-batches of a step.
    assert judge_cell(cell(m1=16 * 0.15, m2=8 * 0.2, m4=4 * 0.3)) == {}
    # Larger ones that miss the caches of a processor.
    assert judge_cell(cell(m1=1.0, m2=1.1, m4=1.21, m8=1.33)) == {}


def test_layouts_with_other_work_are_not_compared_by_their_micro_batch() -> None:
    some = cell(m1=0.101, m2=0.199, m4=0.41)
    some[4] = replace(some[4], layout=replace(some[4].layout, zero_stage=1))
    assert judge_cell(some) == {}


def cell_of_twelve(**seconds: float) -> dict[int, ToldLayout]:
    return {
        size: replace(one, layout=replace(one.layout, grad_accum_steps=12 // size))
        for size, one in cell(**seconds).items()
    }


def test_micro_batches_from_one_to_four_show_how_time_grows() -> None:
    assert set(judge_cell(cell(m1=0.101, m2=0.199, m4=0.41, m8=0.83))) == {1, 2, 4, 8}
    # From 2 to 4 is less.
    assert judge_cell(cell_of_twelve(m2=0.2, m3=0.3, m4=0.4)) == {}
    assert set(judge_cell(cell_of_twelve(m1=0.1, m2=0.2, m4=0.4))) == {1, 2, 4}
    # A power of 0.3 is too steep, and one of 0.1 is not.
    steep, flat = ({f"m{m}": m**power for m in (1, 2, 4)} for power in (0.3, 0.1))
    assert set(judge_cell(cell(**steep))) == {1, 2, 4}
    assert judge_cell(cell(**flat)) == {}


def test_layouts_are_alike_to_a_billionth() -> None:
    one = 0.5123456
    assert set(judge_cell(cell(m1=0.41, m2=one, m4=one, m8=one * (1 + 0.7e-9)))) == {2, 4, 8}
    assert judge_cell(cell(m1=0.41, m2=one, m4=one, m8=one * (1 + 1.5e-9))) == {}

"""Which measurements cannot both be right."""

from __future__ import annotations

import pytest

from orchestrator.core.problem.contradiction import (
    Contradiction,
    TimedLayout,
    contradictions,
    recomputes_less,
    shapes,
)
from orchestrator.core.problem.layout import Layout, Recompute


def layout(*, mbs: int = 1, recompute: str = "none", pipeline: int = 1) -> Layout:
    return Layout(
        micro_batch_size=mbs,
        grad_accum_steps=16 // mbs,
        recompute=Recompute.parse(recompute),
        pipeline_parallel_size=pipeline,
    )


def pairs(
    *taken: tuple[Layout, float], sd: float = 0.01, thrashing: bool = False
) -> list[tuple[int, int]]:
    measured = {
        key: TimedLayout(layout=one, seconds=seconds, sd=sd, thrashing=thrashing)
        for key, (one, seconds) in enumerate(taken)
    }
    best = min(seconds for _, seconds in taken)
    return [(one.less, one.more) for one in contradictions(measured, measured, best_seconds=best)]


def test_recomputation_cannot_be_twice_as_fast_as_none() -> None:
    assert pairs(
        (layout(recompute="none"), 2.0), (layout(recompute="selective_attention"), 1.0)
    ) == [(0, 1)]
    assert (
        pairs((layout(recompute="none"), 1.0), (layout(recompute="selective_attention"), 2.0)) == []
    )


def test_larger_micro_batches_of_the_same_work_are_not_slower() -> None:
    assert pairs((layout(mbs=8), 1.6), (layout(mbs=4), 1.1)) == [(0, 1)]
    assert pairs((layout(mbs=8), 1.2), (layout(mbs=4), 1.1)) == []  # caches have sizes
    assert (
        pairs((layout(mbs=8, pipeline=2), 1.6), (layout(mbs=4, pipeline=2), 1.1)) == []
    )  # the bubble is larger


def test_so_much_slower_may_a_layout_be_that_does_less_work() -> None:
    """5 % if it recomputes less, 15 % if its micro-batches are larger; without noise."""
    for slower, contradicts in ((1.049, False), (1.051, True)):
        taken = (layout(recompute="none"), slower), (layout(recompute="full"), 1.0)
        assert bool(pairs(*taken, sd=0.0)) is contradicts
    for slower, contradicts in ((1.149, False), (1.151, True)):
        assert bool(pairs((layout(mbs=8), slower), (layout(mbs=4), 1.0), sd=0.0)) is contradicts


def test_a_difference_within_noise_contradicts_nothing() -> None:
    assert pairs((layout(recompute="none"), 1.07), (layout(recompute="full"), 1.0), sd=0.02) == []
    # 5 % and 2.8 standard deviations of the difference, of 2.8 %: 13.7 %.
    for slower, contradicts in ((1.13, False), (1.14, True)):
        taken = (layout(recompute="none"), slower), (layout(recompute="full"), 1.0)
        assert bool(pairs(*taken, sd=0.02)) is contradicts


def test_the_memory_edge_explains_a_slow_run() -> None:
    assert (
        pairs((layout(recompute="none"), 2.0), (layout(recompute="full"), 1.0), thrashing=True)
        == []
    )


def test_what_is_far_from_the_best_does_not_matter() -> None:
    assert (
        pairs(
            (layout(recompute="none"), 3.0), (layout(recompute="full"), 2.0), (layout(mbs=4), 1.0)
        )
        == []
    )


def test_only_pairs_with_what_is_new_are_told() -> None:
    measured = {
        key: TimedLayout(layout=one, seconds=seconds, sd=0.01, thrashing=False)
        for key, (one, seconds) in enumerate(
            [(layout(), 2.0), (layout(recompute="full"), 1.0), (layout(mbs=16), 1.0)]
        )
    }
    assert contradictions(measured, {2}, best_seconds=1.0) == []
    assert contradictions(measured, {0}, best_seconds=1.0) == [
        Contradiction(less=0, more=1, slower=1.0)
    ]


@pytest.mark.parametrize(("seconds", "matters"), [(1.09, True), (1.11, False)])
def test_only_a_result_within_a_tenth_of_the_best_matters(seconds: float, matters: bool) -> None:
    """It is three times as slow without recomputation as with it, of which one is wrong."""
    measured = {
        key: TimedLayout(layout=one, seconds=took, sd=0.01, thrashing=False)
        for key, (one, took) in enumerate(
            [(layout(), 3 * seconds), (layout(recompute="full"), seconds)]
        )
    }
    found = contradictions(measured, measured, best_seconds=1.0)
    assert [(one.less, one.more) for one in found] == ([(0, 1)] if matters else [])
    assert all(one.slower == pytest.approx(2.0) for one in found)


@pytest.mark.parametrize(
    ("first", "second", "is_less"),
    [
        ("none", "full", True),
        ("none", "none", False),
        ("selective_ops", "full", True),
        ("selective_ops", "selective_attention", False),
        ("full:4", "full:8", True),
        ("full:8", "full", True),
        ("full:8", "full:8", False),
        ("full", "full", False),
        ("full", "full:8", False),
        # A part of all layers, against the whole of some.
        ("selective_ops", "full:8", False),
        ("full", "selective_ops", False),
    ],
)
def test_what_computes_less_again_is_known(first: str, second: str, is_less: bool) -> None:
    assert recomputes_less(Recompute.parse(first), Recompute.parse(second)) is is_less


def test_layouts_are_compared_within_a_recomputation_and_within_an_accumulation() -> None:
    """Twins in all but recomputation; and, without a pipeline, of as many sequences a step."""
    one, two = shapes(layout(mbs=8, recompute="full"))
    assert one == layout(mbs=8)
    assert two == Layout(micro_batch_size=1, grad_accum_steps=16, recompute=Recompute.parse("full"))
    assert shapes(layout(mbs=4, recompute="full"))[1] == two
    assert shapes(layout(mbs=8, pipeline=2)) == [layout(mbs=8, pipeline=2)]

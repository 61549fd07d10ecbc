"""Rows beyond those that `auto` considers: the one that needs least shows whether anything fits."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.outcome import Measured, OutOfMemory
from orchestrator.core.sweepfile.search_section import Search, Strategy
from orchestrator.search.auto_sampler import CONSIDERED
from orchestrator.search.row_searcher import RowSearcher, RowStatus

GIB = 2.0**30


def many(num: int = 2 * CONSIDERED) -> Lattice:
    """All need 60 GiB or so of 80, but one of the last in the order, which needs 5."""
    a, b = np.arange(num) % 128, np.arange(num) // 128
    memory = np.log(60 * GIB) + np.random.default_rng(0).normal(0.0, 0.02, num)
    memory[-5] = np.log(5 * GIB)

    def belief(mean: Floats, level_sd: float, residual_sd: float) -> Belief:
        return Belief(
            mean=mean,
            basis=np.ones((num, 1)),
            covariance=np.array([[level_sd**2]]),
            residual_sd=residual_sd,
        )

    return Lattice(
        axes=(LatticeAxis.of("a", a.tolist()), LatticeAxis.of("b", b.tolist())),
        seconds=belief(0.01 * a + 0.01 * b, 0.5, 0.2),
        memory=belief(memory, 0.15, 0.08),
        memory_limit_bytes=80 * GIB,
    )


@pytest.mark.parametrize("told_beforehand", [True, False])
def test_nothing_fits_is_not_said_before_the_row_that_needs_least_of_all_was_tried(
    told_beforehand: bool,
) -> None:
    rows = many()
    assert rows.seconds is not None and rows.memory is not None
    search = RowSearcher(
        order=np.argsort(rows.seconds.mean, kind="stable"),
        lattice=rows.take,
        sampled=rows.axes,
        search=Search(strategy=Strategy.AUTO),
        memory=rows.memory.mean if told_beforehand else None,
    )
    tried: list[int] = []
    while search.hopeless() is None and len(tried) < 8:
        asked = search.ask()
        assert asked is not None
        row, _ = asked
        tried.append(row)
        search.tell(row, OutOfMemory(excess=0.3))
    least = len(rows) - 5
    if told_beforehand:
        assert tried[-1] == least
        assert search.hopeless() == least
    else:
        # What needs least is not known: nothing proves it.
        assert search.hopeless() is None


def test_rows_of_each_status_are_counted_as_they_move() -> None:
    """Ten rows: asked, told, told again, forgotten, set aside, ruled out, freed, and rebuilt."""
    rows = many(10)
    search = RowSearcher(
        order=np.arange(10),
        lattice=rows.take,
        sampled=rows.axes,
        search=Search(strategy=Strategy.RANDOM),
    )

    def counted() -> list[int]:
        counts = [search.count(status) for status in RowStatus]
        assert counts == [
            sum(search.status(row) is status for row in range(10)) for status in RowStatus
        ]
        return counts

    assert counted() == [10, 0, 0, 0, 0]
    asked = [search.ask() for _ in range(4)]
    first, second, third, _ = [one[0] for one in asked if one is not None]
    assert counted() == [6, 4, 0, 0, 0]
    search.tell(first, Measured(score=1.0))
    search.tell(first, Measured(score=1.1))
    assert counted() == [6, 3, 1, 0, 0]
    search.forget(second)
    search.set_aside(third)
    assert counted() == [7, 1, 1, 0, 1]
    condemned, freed = search.rule_out(np.ones(10, dtype=np.bool_))
    assert (len(condemned), len(freed)) == (7, 0)
    condemned, freed = search.rule_out(np.arange(10) == second)
    assert (len(condemned), len(freed)) == (0, 6)
    assert search.status(second) is RowStatus.CONDEMNED
    assert search.status(third) is RowStatus.SET_ASIDE
    search.rebuild({1: Measured(score=1.0)}, under_way=[2], set_aside=[3, 4])
    assert counted() == [6, 1, 1, 0, 2]
    # A useless outcome sets its row aside.
    useless = Measured(score=float("nan"))
    search.tell(2, useless)
    assert counted() == [6, 0, 1, 0, 3]
    search.rebuild({1: Measured(score=1.0), 5: useless}, under_way=[], set_aside=[3])
    assert counted() == [7, 0, 1, 0, 2]
    assert search.told == {1: Measured(score=1.0)}

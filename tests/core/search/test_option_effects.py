"""Options whose values no formula knows: tried one change at a time, slower if they keep more."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.option_effects import OptionEffects
from orchestrator.core.search.outcome import Measured, OutOfMemory
from orchestrator.core.search.proposer import Proposer
from tests.core.search.expected_outcome import expected

# Rows of two sizes with three kernels each.
KERNELS = ["amber", "birch", "cedar"] * 2
SIZES = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
LIMIT = 80.0


def lattice(memory: list[float] | None = None) -> Lattice:
    kernel = LatticeAxis.of_words("kernel", KERNELS)
    columns = np.stack([kernel.steps == step for step in range(3)], axis=1).astype(np.float64)
    basis = np.concatenate([np.ones((6, 1)), columns], axis=1)
    of_time = np.diag([0.1, 0.04, 0.04, 0.04])
    of_memory = np.diag([0.02, 0.25, 0.25, 0.25])
    return Lattice(
        axes=(kernel, LatticeAxis.of("size", SIZES)),
        seconds=Belief(
            mean=np.log([1.0, 1.0, 1.0, 1.02, 1.02, 1.02]),
            basis=basis,
            covariance=of_time,
            residual_sd=0.1,
        ),
        memory=Belief(
            mean=np.log(memory or [60.0, 60.0, 60.0, 40.0, 40.0, 40.0]),
            basis=basis,
            covariance=of_memory,
            residual_sd=0.03,
        ),
        memory_limit_bytes=LIMIT,
        options=("kernel",),
    )


def test_an_untried_value_is_worth_less_together_with_another_change() -> None:
    effects = OptionEffects(lattice())
    worth = effects.worth([0], 0)
    assert worth[[0, 1, 2, 3]] == pytest.approx(1.0)
    assert worth[[4, 5]] == pytest.approx(0.3)
    # Its value is known since row 4 ran.
    assert effects.worth([0, 4], 0)[4] == 1.0


def test_a_value_that_keeps_more_is_taken_to_be_slower_until_it_ran() -> None:
    effects = OptionEffects(lattice())
    constants = np.array([0.0, 0.0, 1.0, 0.0])  # birch keeps e times as much
    slower = effects.log_seconds([0], constants)
    assert slower == pytest.approx([0, 0.2, 0, 0, 0.2, 0])
    assert effects.log_seconds([0, 4], constants) == pytest.approx(np.zeros(6))


def test_two_options_have_their_own_constants_behind_all_others() -> None:
    """The first two constants are none of an option's."""
    one, two = (
        LatticeAxis.of_words("one", ["a", "b", "a"]),
        LatticeAxis.of_words("two", list("xyz")),
    )
    effects = OptionEffects(Lattice(axes=(one, two), options=("one", "two")))
    constants = np.array([9.0, 9.0, 1.0, 2.0, 10.0, 20.0, 30.0])
    assert effects.log_seconds([], constants) == pytest.approx([0.2 * 11, 0.2 * 22, 0.2 * 31])
    # Values of the row that ran are known.
    assert effects.log_seconds([0], constants) == pytest.approx([0.0, 0.2 * 22, 0.2 * 30])


def test_without_options_there_is_nothing_to_try() -> None:
    assert not OptionEffects(Lattice(axes=(LatticeAxis.of("size", SIZES),)))
    assert not OptionEffects(Lattice(axes=()))


def test_values_are_tried_next_to_the_best_row_one_change_at_a_time() -> None:
    proposer = Proposer(lattice(), seed=0)
    proposer.tell(0, Measured(score=0.0, peak_memory_bytes=50.0))
    open_rows = np.arange(6) != 0
    assert proposer.choose(open_rows)[0] in (1, 2)


def test_what_a_value_does_to_memory_is_carried_to_all_rows_that_have_it() -> None:
    space = lattice()
    proposer = Proposer(space, seed=0)
    proposer.tell(0, Measured(score=0.0, peak_memory_bytes=60.0))
    before = proposer.probability_of_fitting()
    proposer.tell(1, OutOfMemory())
    after = proposer.probability_of_fitting()
    assert before is not None and after is not None
    assert after[4] < before[4] - 0.05
    assert after[5] > before[5] - 0.05


def test_a_value_that_ran_out_of_memory_is_expected_to_be_slower_until_it_ran() -> None:
    """Row 1 shows that birch keeps more; how long it takes shows row 4, and not before it ran."""
    proposer = Proposer(lattice(), seed=0)
    proposer.tell(0, Measured(score=0.0, peak_memory_bytes=60.0))
    birch, cedar = np.arange(6) == 4, np.arange(6) == 5
    before = [expected(proposer, rows).score for rows in (birch, cedar)]
    proposer.tell(1, OutOfMemory(excess=0.5))
    after = [expected(proposer, rows).score for rows in (birch, cedar)]
    assert before[0] is not None and after[0] is not None
    assert after[0] > before[0] + 0.02
    assert after[1] == pytest.approx(before[1], abs=0.01)

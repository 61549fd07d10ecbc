"""The surrogate: shared constants, similar neighbours, bounds, pending rows and bad values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.search.censored import matched
from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.smoothness import Smoothness
from orchestrator.core.search.surrogate import KEPT, MOST, Bound, Surrogate, Value


def grid(a: int = 6, b: int = 6) -> Lattice:
    rows = np.array([(i, j) for i in range(a) for j in range(b)], dtype=np.float64)
    return Lattice(
        axes=(LatticeAxis.of("a", rows[:, 0].tolist()), LatticeAxis.of("b", rows[:, 1].tolist()))
    )


def surrogate(
    lattice: Lattice, belief: Belief | None = None, *, fits_smoothness: bool = False
) -> Surrogate:
    belief = belief or Belief.nothing(len(lattice))
    return Surrogate(
        lattice,
        belief,
        guess=Smoothness.guess(lattice, residual_sd=belief.residual_sd),
        fits_smoothness=fits_smoothness,
    )


def put(found: Surrogate, values: Sequence[Value]) -> None:
    """Give it these values, and no others."""
    found.clear()
    for value in values:
        found.add(row=value.row, value=value.value, bound=value.bound)


def truth(lattice: Lattice) -> Floats:
    places = lattice.places
    values: Floats = 1.0 + 0.3 * places[:, 0] + 0.1 * (places[:, 1] - 3) ** 2
    return values


def test_before_anything_is_known_the_belief_stands() -> None:
    lattice = grid()
    belief = Belief(
        mean=truth(lattice), basis=np.ones((36, 1)), covariance=np.array([[0.25]]), residual_sd=0.1
    )
    found = surrogate(lattice, belief)
    assert found.mean == pytest.approx(truth(lattice))
    assert found.sd == pytest.approx(np.full(36, np.sqrt(0.25 + 2 * 0.1**2)))


def test_one_value_of_a_shared_constant_informs_all_rows_that_rest_on_it() -> None:
    # Rows with b > 2 depend on a constant that is twice (0.7 in the logarithm) what was believed.
    lattice = grid()
    rests = (lattice.places[:, 1] > 2).astype(np.float64)
    belief = Belief(
        mean=np.zeros(36), basis=rests[:, None], covariance=np.array([[0.5]]), residual_sd=0.05
    )
    found = surrogate(lattice, belief)
    found.add(row=int(np.flatnonzero(rests)[0]), value=0.7)
    assert np.all(found.mean[rests > 0] > 0.6)
    assert np.all(np.abs(found.mean[rests == 0]) < 0.1)


def test_the_constants_are_those_that_the_mean_follows_beside_a_bad_value() -> None:
    """Six rows show a constant of 0.7; the last of them is off by a factor e."""
    lattice = grid()
    share = np.arange(36) / 35.0
    belief = Belief(
        mean=np.zeros(36), basis=share[:, None], covariance=np.array([[0.5]]), residual_sd=0.001
    )
    found = surrogate(lattice, belief)
    for row in (1, 7, 14, 21, 28, 35):
        found.add(row=row, value=0.7 * share[row] + (1.0 if row == 35 else 0.0))
    assert found.mean[35] == pytest.approx(0.7, abs=0.01)
    assert found.constants == pytest.approx(found.mean[35:], abs=0.002)


def test_values_are_met_and_their_neighbours_are_surer_than_what_is_far() -> None:
    lattice = grid()
    found = surrogate(lattice)
    rows = [0, 14, 35]
    for row in rows:
        found.add(row=row, value=float(truth(lattice)[row]))
    assert found.mean[rows] == pytest.approx(truth(lattice)[rows], abs=0.03)
    assert np.all(found.sd[rows] < 0.05)
    assert found.sd[15] < found.sd[5]


def test_a_smooth_truth_is_predicted_from_a_quarter_of_its_rows() -> None:
    lattice = grid(10, 10)
    found = surrogate(lattice, fits_smoothness=True)
    shown = np.random.default_rng(0).permutation(100)[:25]
    for row in shown:
        found.add(row=int(row), value=float(truth(lattice)[row]))
    assert np.abs(found.mean - truth(lattice)).mean() < 0.05


def test_smoothness_is_fitted_unless_it_is_asked_not_to_be() -> None:
    lattice = grid()
    usual = Surrogate(
        lattice, Belief.nothing(36), guess=Smoothness.guess(lattice, residual_sd=None)
    )
    fitted, guessed = (surrogate(lattice, fits_smoothness=fits) for fits in (True, False))
    for one in (usual, fitted, guessed):
        put(one, [Value(row=row, value=truth(lattice)[row]) for row in range(0, 36, 2)])
    assert usual.sd.tolist() == fitted.sd.tolist() != guessed.sd.tolist()


def test_what_is_added_one_by_one_is_what_is_told_at_once() -> None:
    lattice = grid()
    values = [Value(row=row, value=float(truth(lattice)[row])) for row in (0, 7, 9, 20, 33)] + [
        Value(row=5, value=None)
    ]
    one_by_one, at_once = surrogate(lattice), surrogate(lattice)
    for value in values:
        one_by_one.add(row=value.row, value=value.value)
        _ = one_by_one.mean
    put(at_once, values)
    assert one_by_one.mean == pytest.approx(at_once.mean, abs=1e-6)
    assert one_by_one.sd == pytest.approx(at_once.sd, abs=1e-4)


def test_a_value_far_off_its_neighbours_moves_them_little() -> None:
    lattice = grid()
    mild, wild = surrogate(lattice), surrogate(lattice)
    rows = [0, 1, 2, 6, 7, 8, 12, 13, 14]
    for one, at_centre in ((mild, 0.0), (wild, 3.0)):
        for row in rows:
            one.add(row=row, value=at_centre if row == 7 else 0.0)
    # A sixth of what it is off by.
    assert np.abs(wild.mean - mild.mean)[[1, 6, 8, 13]].max() < 0.5


def test_a_value_is_contradicted_by_those_around_it() -> None:
    found = surrogate(grid())
    for row in (0, 1, 2, 6, 8, 12, 13, 14):
        found.add(row=row, value=0.0)
    found.add(row=7, value=1.0)
    expected, sd = found.left_out()[7]
    assert abs(expected) < 0.2
    assert 1.0 - expected > 3 * sd
    assert 35 not in found.left_out()


def test_what_the_others_say_of_a_row_is_what_a_process_without_it_says() -> None:
    lattice = grid()
    values = [
        Value(row=row, value=float(truth(lattice)[row])) for row in (0, 3, 7, 14, 20, 21, 28, 33)
    ]
    whole, without = surrogate(lattice), surrogate(lattice)
    put(whole, values)
    put(without, [value for value in values if value.row != 20])
    expected, sd = whole.left_out()[20]
    # The noise of each value is judged with it, or without.
    assert expected == pytest.approx(float(without.mean[20]), abs=0.02)
    assert sd == pytest.approx(float(np.hypot(without.sd[20], without.noise_sd)), rel=0.05)
    assert surrogate(lattice).left_out() == {}


def test_a_value_that_is_corrected_is_what_it_would_have_been_from_the_start() -> None:
    lattice = grid()
    once, corrected = surrogate(lattice), surrogate(lattice)
    for row in (0, 7, 14, 21):
        once.add(row=row, value=float(truth(lattice)[row]))
        corrected.add(row=row, value=3.0 if row == 7 else float(truth(lattice)[row]))
    assert corrected.mean[7] != pytest.approx(once.mean[7], abs=0.1)
    corrected.correct(row=7, value=float(truth(lattice)[7]))
    assert corrected.mean == pytest.approx(once.mean)
    assert corrected.sd == pytest.approx(once.sd, rel=0.05)


def test_a_bound_raises_what_is_below_it_and_changes_little_above_it() -> None:
    lattice = grid()
    belief = Belief(
        mean=np.where(lattice.places[:, 0] < 3, 0.0, 2.0),
        basis=np.ones((36, 1)),
        covariance=np.array([[0.04]]),
        residual_sd=0.2,
    )
    below, above = surrogate(lattice, belief), surrogate(lattice, belief)
    below.add(row=0, value=1.0, bound=Bound.AT_LEAST)
    above.add(row=30, value=1.0, bound=Bound.AT_LEAST)
    assert below.mean[0] > 0.8
    assert above.mean == pytest.approx(belief.mean, abs=0.01)
    over = surrogate(lattice, belief)
    over.add(row=35, value=1.0, bound=Bound.AT_MOST)
    assert over.mean[35] < 1.3


def test_a_bound_shows_as_much_at_any_level_of_the_belief() -> None:
    lattice = grid()

    def told(level: float) -> tuple[Floats, Floats]:
        belief = Belief(
            mean=np.full(36, level),
            basis=np.ones((36, 1)),
            covariance=np.array([[0.04]]),
            residual_sd=0.2,
        )
        found = surrogate(lattice, belief)
        found.add(row=3, value=level + 0.3)
        assert found.mean[3] > level
        found.add(row=20, value=level + 1.0, bound=Bound.AT_LEAST)
        return found.mean - level, found.sd

    for one, other in zip(told(0.0), told(5.0), strict=True):
        assert one == pytest.approx(other)


def test_a_pending_row_makes_its_neighbourhood_surer_and_expects_nothing_new_of_it() -> None:
    lattice = grid()
    found = surrogate(lattice)
    found.add(row=0, value=1.0)
    mean, sd = found.mean.copy(), found.sd.copy()
    found.add(row=20, value=None)
    assert found.mean == pytest.approx(mean)
    assert found.sd[21] < 0.5 * sd[21]
    found.drop(20)
    assert found.sd == pytest.approx(sd, abs=1e-6)


def test_what_a_pending_row_came_to_takes_its_place() -> None:
    lattice = grid()
    found, plain = surrogate(lattice), surrogate(lattice)
    found.add(row=3, value=None)
    _ = found.mean
    found.add(row=3, value=0.5)
    plain.add(row=3, value=0.5)
    assert len(found.values) == 1
    assert found.mean == pytest.approx(plain.mean, abs=1e-6)


def test_words_are_alike_or_not_whatever_their_order() -> None:
    words = ["eager", "flash", "sdpa"] * 4
    lattice = Lattice(
        axes=(
            LatticeAxis.of_words("attention", words),
            LatticeAxis.of("size", [float(i // 3) for i in range(12)]),
        )
    )
    found = surrogate(lattice)
    found.add(row=1, value=1.0)
    assert found.sd[0] == pytest.approx(found.sd[2])
    # Another size of the same word tells more than another word of a size as far.
    assert found.sd[4] < found.sd[3]


def test_thousands_of_values_are_thinned_and_the_lowest_kept() -> None:
    lattice = grid(60, 60)
    found = surrogate(lattice)
    for row in range(0, 3600, 2):
        found.add(row=row, value=float(truth(lattice)[row]))
        if row % 400 == 0:
            _ = found.mean
    _ = found.mean
    assert KEPT <= len(found.values) <= MOST
    assert int(np.argmin(truth(lattice)[::2])) * 2 in {value.row for value in found.values}
    assert np.all(np.isfinite(found.mean)) and np.all(found.sd > 0)


def test_a_lattice_without_axes_has_one_level() -> None:
    lattice = Lattice(axes=())
    found = surrogate(lattice)
    found.add(row=0, value=2.0)
    assert found.mean == pytest.approx([2.0], abs=0.01)


def test_a_higher_level_moves_all_rows_alike_before_and_after_values() -> None:
    lattice = grid()
    found = surrogate(lattice)
    found.shift(2.0)
    assert found.mean == pytest.approx(np.full(36, 2.0))
    found.add(row=7, value=2.5)
    mean, sd = found.mean.copy(), found.sd.copy()
    later = surrogate(lattice)
    later.add(row=7, value=0.5)
    assert mean == pytest.approx(later.mean + 2.0)
    assert sd == pytest.approx(later.sd)


def test_a_pending_row_that_others_followed_is_dropped_alone() -> None:
    lattice = grid()
    found, plain = surrogate(lattice), surrogate(lattice)
    for row in (3, 10, 17, 24):
        found.add(row=row, value=None if row == 10 else 0.1 * row)
        if row != 10:
            plain.add(row=row, value=0.1 * row)
    _ = found.mean
    found.drop(10)
    assert [value.row for value in found.values] == [3, 17, 24]
    assert found.mean == pytest.approx(plain.mean, abs=1e-6)
    assert found.sd == pytest.approx(plain.sd, abs=1e-6)


@pytest.mark.parametrize("are_computed", [(False,), (True,), (True, False), (False, True, False)])
def test_pending_rows_that_were_added_last_are_dropped_as_if_they_had_never_been_added(
    are_computed: Sequence[bool],
) -> None:
    lattice = grid()
    found, plain = surrogate(lattice), surrogate(lattice)
    for one in (found, plain):
        for row in (3, 17, 24):
            one.add(row=row, value=0.1 * row)
        _ = one.mean
    for row, is_computed in enumerate(are_computed, 10):
        found.add(row=row, value=None)
        if is_computed:
            _ = found.mean
        found.drop(row)
    assert [value.row for value in found.values] == [3, 17, 24]
    assert found.sd == pytest.approx(plain.sd, abs=1e-6)
    for one in (found, plain):
        one.add(row=30, value=2.0)
    assert found.mean == pytest.approx(plain.mean, abs=1e-6)
    assert found.sd == pytest.approx(plain.sd, abs=1e-6)


def test_some_rows_of_a_lattice_have_their_own_places_beliefs_and_failures() -> None:
    whole = grid(2, 3)
    belief = Belief(
        mean=truth(whole), basis=np.ones((6, 1)), covariance=np.array([[0.25]]), residual_sd=0.1
    )
    full = replace(whole, seconds=belief, memory=belief, fails=np.arange(6) / 10)
    rows = np.array([4, 1])
    some = full.take(rows)
    assert len(some) == 2
    assert some.places.tolist() == whole.places[rows].tolist()
    assert some.seconds is not None and some.memory is not None and some.fails is not None
    assert some.seconds.mean.tolist() == some.memory.mean.tolist() == truth(whole)[rows].tolist()
    assert some.fails.tolist() == [0.4, 0.1]
    bare = whole.take(rows)
    assert (bare.seconds, bare.memory, bare.fails) == (None, None, None)


def slope(lattice: Lattice) -> Belief:
    """A belief in one constant, on which each row depends the more the later it is."""
    num = len(lattice)
    return Belief(
        mean=np.linspace(1.0, 2.0, num),
        basis=(np.arange(num) / num)[:, None],
        covariance=np.array([[0.5]]),
        residual_sd=0.1,
    )


@pytest.mark.parametrize("are_added", [False, True])
@pytest.mark.parametrize(
    ("bound", "limit"), [(Bound.AT_LEAST, 2.6), (Bound.AT_MOST, 1.2), (Bound.AT_LEAST, 1.5)]
)
def test_a_bound_beside_a_value_is_a_bound_on_what_the_value_leaves_open(
    bound: Bound, limit: float, *, are_added: bool
) -> None:
    """The Gaussian that is left has the moments of one that is cut off softly, by 4 %."""
    lattice = grid()
    exact, bounded = Value(row=20, value=1.9), Value(row=27, value=limit, bound=bound)
    plain, found = surrogate(lattice, slope(lattice)), surrogate(lattice, slope(lattice))
    plain.add(row=20, value=1.9)
    mean, variance = float(plain.mean[27]), float(plain.sd[27]) ** 2
    precision, shift = matched(
        mean=np.array([mean]),
        variance=np.array([variance]),
        limits=np.array([limit]),
        sides=np.array([float(bound)]),
        softness=0.04,
    )
    if are_added:
        found.add(row=20, value=1.9)
        assert found.mean[27] == pytest.approx(mean)
        found.add(row=27, value=limit, bound=bound)
    else:
        put(found, [exact, bounded])
    after = 1.0 / (1.0 / variance + precision[0])
    assert found.mean[27] == pytest.approx(after * (mean / variance + shift[0]), rel=2e-3)
    assert found.sd[27] == pytest.approx(np.sqrt(after), rel=5e-3)


def test_a_pending_row_that_turns_out_to_be_bounded_is_like_one_that_is_told_at_once() -> None:
    lattice = grid()
    found, plain = surrogate(lattice, slope(lattice)), surrogate(lattice, slope(lattice))
    for one in (found, plain):
        one.add(row=20, value=1.9)
    found.add(row=27, value=None)
    _ = found.mean
    for one in (found, plain):
        one.add(row=27, value=2.6, bound=Bound.AT_LEAST)
    assert found.mean == pytest.approx(plain.mean, abs=1e-3)
    assert found.sd == pytest.approx(plain.sd, abs=1e-3)


def test_a_pending_row_is_known_again_after_all_values_are_replaced() -> None:
    found = surrogate(grid())
    put(found, [Value(row=3, value=None), Value(row=5, value=0.1)])
    found.add(row=3, value=0.5)
    assert list(found.values) == [Value(row=3, value=0.5), Value(row=5, value=0.1)]


def test_a_level_that_rises_after_values_moves_bounds_with_it() -> None:
    lattice = grid()
    before, after = surrogate(lattice, slope(lattice)), surrogate(lattice, slope(lattice))
    before.shift(2.0)
    for one in (before, after):
        one.add(row=20, value=3.9 if one is before else 1.9)
        _ = one.mean
    after.shift(2.0)
    after.correct(row=20, value=3.9)
    for one in (before, after):
        one.add(row=27, value=4.6, bound=Bound.AT_LEAST)
    assert after.mean == pytest.approx(before.mean, rel=1e-3)
    assert after.sd == pytest.approx(before.sd, rel=1e-2)


def test_constants_are_as_believed_until_a_value_shows_them() -> None:
    lattice = grid()
    found = surrogate(lattice, slope(lattice))
    assert found.constants.tolist() == [0.0]
    found.add(row=35, value=2.7)
    # 0.7 above the belief, of 35 / 36 of the constant; its variance is 0.5 of all.
    share, residual = 35 / 36, 2 * 0.1**2
    gain = share * 0.5 / (share**2 * 0.5 + residual + found.noise_sd**2)
    assert found.constants == pytest.approx([0.7 * gain], rel=1e-3)


def test_two_values_predict_each_other_and_one_predicts_nothing() -> None:
    lattice = grid()
    found = surrogate(lattice, slope(lattice))
    found.add(row=7, value=1.5)
    assert found.left_out() == {}
    found.add(row=8, value=1.6)
    alone = surrogate(lattice, slope(lattice))
    alone.add(row=7, value=1.5)
    expected, sd = found.left_out()[8]
    assert set(found.left_out()) == {7, 8}
    assert expected == pytest.approx(float(alone.mean[8]), abs=0.01)
    assert sd == pytest.approx(float(np.hypot(alone.sd[8], alone.noise_sd)), rel=0.05)


def test_of_many_values_128_are_kept_the_lowest_42_of_them_and_the_newest_pending() -> None:
    """The others are spread evenly, from the first to the last."""
    lattice = grid(21, 21)
    found = surrogate(lattice)
    values = [Value(row=row, value=abs(row - 200) / 100) for row in range(400)]
    put(found, [*values, *(Value(row=row, value=None) for row in range(400, 440))])
    _ = found.mean
    kept = [value.row for value in found.values if value.value is not None]
    assert len(kept) == 128
    assert set(kept) >= {*range(179, 221), 0, 4, 399}
    assert not set(kept) & {1, 2, 3, 398}
    # About every fourth of the other 358.
    assert len(set(kept) & set(range(159, 179))) == 5
    assert [v.row for v in found.values if v.value is None] == list(range(408, 440))


def test_values_are_thinned_out_once_there_are_more_than_176() -> None:
    found = surrogate(grid(21, 21))
    put(found, [Value(row=row, value=row / 100) for row in range(128)])
    _ = found.mean
    for row in range(128, 176):
        found.add(row=row, value=row / 100)
    _ = found.mean
    assert len(found.values) == 176
    found.add(row=176, value=1.76)
    _ = found.mean
    assert len(found.values) == 128


@pytest.mark.parametrize(("num", "is_fitted"), [(3, False), (4, True)])
def test_smoothness_is_fitted_from_four_values_on(num: int, *, is_fitted: bool) -> None:
    lattice = grid()
    fitted, guessed = (surrogate(lattice, fits_smoothness=fits) for fits in (True, False))
    for one in (fitted, guessed):
        put(one, [Value(row=row, value=truth(lattice)[row]) for row in range(0, 9 * num, 9)])
    assert (fitted.sd.tolist() != guessed.sd.tolist()) is is_fitted

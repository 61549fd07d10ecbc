"""Which row is selected, when a result is doubted, and when a cell is hopeless."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from orchestrator.core.problem.arrays import Floats
from orchestrator.core.search.lattice import Belief, Lattice, LatticeAxis
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.search.proposer import ExpectedOutcome, Proposer
from orchestrator.core.trial.merit import Merit
from tests.core.search.expected_outcome import expected

LIMIT = 80.0


def lattice(seconds: Floats, memory: Floats | None = None) -> Lattice:
    rows = np.arange(len(seconds), dtype=np.float64)
    return Lattice(
        axes=(LatticeAxis.of("size", rows.tolist()),),
        seconds=Belief(
            mean=np.log(seconds),
            basis=np.ones((len(rows), 1)),
            covariance=np.array([[0.1]]),
            residual_sd=0.1,
        ),
        memory=None
        if memory is None
        else Belief(
            mean=np.log(memory),
            basis=np.ones((len(rows), 1)),
            covariance=np.array([[0.01]]),
            residual_sd=0.05,
        ),
        memory_limit_bytes=None if memory is None else LIMIT,
    )


def everything(one: Lattice) -> np.ndarray:
    return np.ones(len(one), dtype=np.bool_)


def test_the_fastest_prediction_that_fits_is_first_and_what_hardly_fits_is_last() -> None:
    space = lattice(np.array([4.0, 3.0, 2.0, 1.0]), np.array([20.0, 30.0, 60.0, 200.0]))
    proposer = Proposer(space, seed=0)
    rows, open_rows = [], everything(space)
    for _ in range(4):
        row = proposer.choose(open_rows)[0]
        rows.append(row)
        open_rows[row] = False
    assert rows[0] == 2
    # The fastest of all, were it to fit: put off, not dropped.
    assert rows[-1] == 3


def test_a_choice_says_what_is_expected_of_it() -> None:
    space = lattice(np.array([4.0, 2.0]), np.array([20.0, 60.0]))
    proposer = Proposer(space, seed=0)
    row, choice = proposer.choose(everything(space))
    assert row == 1
    assert isinstance(choice, ExpectedOutcome)
    assert choice.score == pytest.approx(np.log(2.0))
    assert choice.improvement is None
    assert choice.memory_bytes == pytest.approx(60.0)
    assert choice.fits is not None and choice.fits > 0.9
    proposer.tell(1, Measured(score=float(np.log(2.0)), peak_memory_bytes=60.0))
    other = expected(proposer, np.array([True, False]))
    assert other.improvement is not None and other.improvement < 0


def test_an_out_of_memory_makes_its_like_unlikely_and_a_measured_peak_corrects_the_level() -> None:
    space = lattice(np.linspace(2.0, 1.0, 8), np.linspace(60.0, 74.0, 8))
    proposer = Proposer(space, seed=0)
    before = expected(proposer, everything(space))
    proposer.tell(7, OutOfMemory())
    after = expected(proposer, np.arange(8) == 6)
    assert after.fits is not None and before.fits is not None
    assert after.fits < before.fits
    roomy = Proposer(space, seed=0)
    # A third less than predicted.
    roomy.tell(0, Measured(score=float(np.log(2.0)), peak_memory_bytes=40.0))
    assert (expected(roomy, np.arange(8) == 7).fits or 0.0) > 0.95


@pytest.mark.parametrize("peak", [0.0, float("nan"), float("inf")])
def test_a_peak_that_is_no_number_was_not_read(peak: float) -> None:
    space = lattice(np.linspace(2.0, 1.0, 8), np.linspace(60.0, 74.0, 8))
    unread, odd = Proposer(space, seed=0), Proposer(space, seed=0)
    unread.tell(2, Measured(score=0.4))
    odd.tell(2, Measured(score=0.4, peak_memory_bytes=peak))
    open_rows = np.arange(8) != 2
    assert odd.choose(open_rows) == unread.choose(open_rows)


def test_the_more_memory_a_row_asked_for_the_less_its_like_fit() -> None:
    space = lattice(np.ones(8), np.linspace(60.0, 74.0, 8))

    def fits(excess: float | None) -> float:
        proposer = Proposer(space, seed=0)
        proposer.tell(7, OutOfMemory(excess=excess))
        found = proposer.probability_of_fitting()
        assert found is not None
        return float(found[5])

    assert fits(0.5) < fits(0.01) < fits(None)
    # An excess that is no number was not read.
    assert fits(float("inf")) == fits(float("nan")) == fits(None)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_refused(score: float) -> None:
    proposer = Proposer(lattice(np.ones(4)), seed=0)
    with pytest.raises(ValueError, match="of row 3: a logarithm is needed"):
        proposer.tell(3, Measured(score=score))
    with pytest.raises(ValueError, match="of row 3: a logarithm is needed"):
        proposer.rebuild({0: Measured(score=1.0), 3: Measured(score=score)}, [])
    assert proposer.best is None


def test_crashes_of_its_like_put_a_row_off() -> None:
    space = lattice(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01, 1.01, 1.01, 1.01, 1.01, 1.01]))
    proposer = Proposer(space, seed=0)
    for row in (0, 1, 3):
        proposer.tell(row, Failed())
    for row in (9, 11):
        proposer.tell(row, Measured(score=0.2))
    assert proposer.choose(~np.isin(np.arange(12), [0, 1, 3, 9, 11]))[0] > 5


@pytest.mark.parametrize("num_others", [1, 3, 8])
def test_axes_on_which_no_row_differs_make_a_crash_say_neither_more_nor_less(
    num_others: int,
) -> None:
    kind = LatticeAxis.of_words("kind", ["a", "a", "a", "b", "b", "b"])
    others = [LatticeAxis.of_words(f"other {i}", ["same"] * 6) for i in range(num_others)]

    def apart(*axes: LatticeAxis) -> float:
        """How much likelier one of the kind that crashed is to fail than one that ran."""
        proposer = Proposer(Lattice(axes=axes), seed=0)
        for row in (0, 1):
            proposer.tell(row, Failed())
        for row in (3, 4):
            proposer.tell(row, Measured(score=1.0))
        crashed, ran = (expected(proposer, np.arange(6) == row).fails for row in (2, 5))
        return crashed - ran

    assert apart(kind, *others) == pytest.approx(apart(kind))


def test_rows_in_flight_are_kept_away_from() -> None:
    space = replace(lattice(np.full(40, 1.0)), seconds=None)
    proposer = Proposer(space, seed=0)
    for row in (0, 20, 39):
        proposer.tell(row, Measured(score=abs(row - 20) / 20))
    open_rows = ~np.isin(np.arange(40), [0, 20, 39])
    first = proposer.choose(open_rows)[0]
    proposer.add_pending(first)
    open_rows[first] = False
    assert abs(proposer.choose(open_rows)[0] - first) > 1


def test_without_physics_the_first_rows_are_spread() -> None:
    space = replace(lattice(np.full(41, 1.0)), seconds=None)
    proposer = Proposer(space, seed=1)
    open_rows, rows = everything(space), []
    for _ in range(3):
        row, choice = proposer.choose(open_rows)
        assert isinstance(choice, ExpectedOutcome) and choice.score is None
        rows.append(row)
        open_rows[row] = False
        proposer.add_pending(row)
    assert min(abs(a - b) for i, a in enumerate(rows) for b in rows[:i]) >= 10


@pytest.mark.parametrize("of_work", [False, True])
@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_what_is_not_in_seconds_is_searched_alike_in_any_unit(unit: float, of_work: bool) -> None:
    places = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
    truth = 0.3 * np.abs(places - (3, 1)).sum(axis=1)
    work = Belief(
        mean=0.1 * places[:, 0],
        basis=np.ones((25, 1)),
        covariance=np.array([[9.0]]),
        residual_sd=0.3,
    )
    axes = (LatticeAxis.of("a", places[:, 0].tolist()), LatticeAxis.of("b", places[:, 1].tolist()))

    def asked(unit: float) -> list[int]:
        space = Lattice(
            axes=axes,
            seconds=work if of_work else None,
            memory_limit_bytes=LIMIT * unit,
            in_seconds=False,
        )
        proposer, open_rows, rows = Proposer(space, seed=3), np.ones(25, dtype=np.bool_), []
        for _ in range(12):
            rows.append(row := proposer.choose(open_rows)[0])
            open_rows[row] = False
            proposer.add_pending(row)
            peak = LIMIT * unit * (0.4 + 0.1 * places[row, 1])
            proposer.tell(
                row, Measured(score=float(truth[row] + np.log(unit)), peak_memory_bytes=peak)
            )
        return rows

    assert asked(unit) == asked(1.0)


def test_of_two_gains_that_are_alike_the_one_that_is_shown_sooner_is_taken() -> None:
    # The best so far takes 1.05 s. One row certainly takes 1.0 s: a gain of 0.05 in the logarithm.
    # Another may take anything around 10 s: a gain of 0.06, but its 15 steps take as long as two
    # other trials. Without a unit of time, that does not count.
    belief = Belief(
        mean=np.log(np.array([1.0, 10.0, 1.05])),
        basis=np.eye(3),
        covariance=np.diag([0.01**2, 1.6**2, 0.01**2]),
        residual_sd=0.001,
    )
    space = replace(lattice(np.ones(3)), seconds=belief)
    priced, unpriced = Proposer(space, seed=0), Proposer(replace(space, in_seconds=False), seed=0)
    for proposer in (priced, unpriced):
        proposer.tell(2, Measured(score=float(np.log(1.05))))
    open_rows = np.array([True, True, False])
    assert priced.choose(open_rows)[0] == 0
    assert unpriced.choose(open_rows)[0] == 1


def test_when_results_contradict_the_prediction_half_of_the_launches_follow_it_all_the_same() -> (
    None
):
    # Predicted: row 0 is the fastest. Times scatter by a factor of 10 in no order; row 1 is best.
    seconds = np.linspace(1.0, 2.0, 24)
    proposer, open_rows = Proposer(lattice(seconds), seed=0), np.ones(24, dtype=np.bool_)
    for row, off in ((23, 0.0), (12, 2.3), (18, 1.0), (6, 2.0), (15, 0.2)):
        proposer.tell(row, Measured(score=float(np.log(seconds[row]) + off)))
        open_rows[row] = False
    row, why = proposer.choose(open_rows)
    assert row == 0
    assert isinstance(why, str) and "contradict" in why
    # The next launch does not.
    other = Proposer(lattice(seconds), seed=0)
    other.rebuild({**proposer._told, 9: Measured(score=0.5)}, [])
    assert isinstance(other.choose(open_rows)[1], ExpectedOutcome)
    # A machine that is slower as a whole contradicts nothing.
    slow = Proposer(lattice(seconds), seed=0)
    for row in (23, 12, 18, 6, 15):
        slow.tell(row, Measured(score=float(np.log(seconds[row]) + 2.0)))
    assert isinstance(slow.choose(open_rows)[1], ExpectedOutcome)


def test_one_run_that_something_slowed_does_not_turn_the_search_away_from_its_like() -> None:
    # Rows 0 to 3 depend on a constant that may be off by half, rows 4 to 7 on none.
    space = lattice(np.array([1.0, 1.05, 1.1, 1.15, 1.5, 1.6, 1.7, 1.8]))
    depends = np.array([1.0] * 4 + [0.0] * 4)
    belief = Belief(
        mean=np.log(np.array([1.0, 1.05, 1.1, 1.15, 1.5, 1.6, 1.7, 1.8])),
        basis=depends[:, None],
        covariance=np.array([[0.4**2]]),
        residual_sd=0.05,
    )
    proposer = Proposer(replace(space, seconds=belief), seed=0)
    open_rows = everything(space)
    assert proposer.choose(open_rows)[0] == 0
    proposer.tell(0, Measured(score=float(np.log(4.0))))
    open_rows[0] = False
    assert proposer.choose(open_rows)[0] == 1
    # A second slow one shows that the constant is off.
    proposer.tell(1, Measured(score=float(np.log(4.1))))
    open_rows[1] = False
    assert proposer.choose(open_rows)[0] == 4


def test_running_out_of_memory_is_not_tried_because_it_costs_few_seconds() -> None:
    # A step takes a minute, 15 of them 15 minutes: an out-of-memory costs a sixteenth of a trial.
    # Row 1 is 10 % faster than the best and fits; row 2 would be 25 % faster, and hardly fits.
    belief = Belief(
        mean=np.log(np.array([60.0, 54.0, 45.0])),
        basis=np.eye(3),
        covariance=np.eye(3) * 0.02**2,
        residual_sd=0.001,
    )
    space = replace(lattice(np.ones(3), np.array([40.0, 50.0, 82.0])), seconds=belief)
    proposer = Proposer(space, seed=0)
    proposer.tell(0, Measured(score=float(np.log(60.0)), peak_memory_bytes=40.0))
    row, _ = proposer.choose(np.array([False, True, True]))
    fits = proposer.probability_of_fitting()
    assert fits is not None and 0.1 < fits[2] < 0.4
    assert row == 1


def test_a_lone_bad_value_among_good_neighbours_is_doubted_and_a_bad_region_is_not() -> None:
    space = lattice(np.full(12, 1.0))
    lone, region = Proposer(space, seed=0), Proposer(space, seed=0)
    for row in range(8):
        lone.tell(row, Measured(score=1.0 if row == 4 else 0.0))
        region.tell(row, Measured(score=1.0 if row >= 4 else 0.0))
    found = lone.doubtful()
    assert found is not None
    assert found[0] == 4
    assert found[1] == pytest.approx(0.0, abs=0.05)
    assert region.doubtful() is None


def test_a_step_of_milliseconds_is_doubted_like_one_of_seconds() -> None:
    """Logarithms of times below a second are negative."""
    proposer = Proposer(lattice(np.full(12, 0.02)), seed=0)
    for row in range(8):
        proposer.tell(row, Measured(score=float(np.log(0.02)) + (1.0 if row == 4 else 0.0)))
    found = proposer.doubtful()
    assert found is not None and found[0] == 4


def test_no_row_surely_fails_and_none_surely_runs() -> None:
    space = replace(lattice(np.ones(2)), fails=np.array([0.0, 1.0]))
    proposer = Proposer(space, seed=0)
    chances = [expected(proposer, np.arange(2) == row).fails for row in range(2)]
    assert chances == [0.02, 0.98]


def test_behind_one_that_is_known_to_be_bad_the_next_is_doubted() -> None:
    proposer = Proposer(lattice(np.full(24, 1.0)), seed=0)
    for row in range(24):
        proposer.tell(row, Measured(score=1.5 if row == 4 else 1.0 if row == 18 else 0.0))
    first = proposer.doubtful()
    assert first is not None and first[0] == 4
    second = proposer.doubtful(but=[4])
    assert second is not None and second[0] == 18
    assert proposer.doubtful(but=[4, 18]) is None
    proposer.tell(18, Measured(score=2.0))
    worse = proposer.doubtful()
    assert worse is not None and worse[0] == 18


def test_a_result_is_not_doubted_if_its_neighbours_are_far_from_the_best() -> None:
    proposer = Proposer(lattice(np.full(24, 1.0)), seed=0)
    for row in range(24):
        proposer.tell(row, Measured(score=0.0 if row > 17 else 2.0 if row == 4 else 0.7))
    assert proposer.best == (18, 0.0)
    assert proposer.doubtful() is None


def test_told_again_it_knows_what_it_would_from_the_start() -> None:
    space = lattice(np.linspace(2.0, 1.0, 12), np.linspace(40.0, 70.0, 12))
    once, again = Proposer(space, seed=0), Proposer(space, seed=0)
    for row in (1, 4, 6, 8):
        score, peak = (-3.0, 70.0) if row == 4 else (0.1 * row, 50.0)
        again.tell(row, Measured(score=score, peak_memory_bytes=peak))
        once.tell(row, Measured(score=0.1 * row, peak_memory_bytes=50.0))
    assert again.best == (4, -3.0)
    again.tell(4, Measured(score=0.4, peak_memory_bytes=50.0))
    assert again.best == once.best
    open_rows = np.arange(12) == 10
    mine, theirs = expected(again, open_rows), expected(once, open_rows)
    assert (mine.score, mine.fits, mine.memory_bytes) == pytest.approx(
        (theirs.score, theirs.fits, theirs.memory_bytes)
    )


_RAN = Measured(score=0.4, peak_memory_bytes=50.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Failed(), _RAN),
        (OutOfMemory(), _RAN),
        (replace(_RAN, peak_memory_bytes=None), _RAN),
        (_RAN, replace(_RAN, peak_memory_bytes=None)),
        (_RAN, replace(_RAN, score=0.2, peak_memory_bytes=60.0)),
        (_RAN, Failed()),
        (_RAN, OutOfMemory()),
        (None, _RAN),
        (None, Failed()),
        (None, OutOfMemory()),
    ],
)
def test_only_the_last_outcome_of_a_row_counts(before: Outcome | None, after: Outcome) -> None:
    """Before the first one, None, it was only running."""
    space = lattice(np.linspace(2.0, 1.0, 12), np.linspace(40.0, 90.0, 12))
    once, again = Proposer(space, seed=0), Proposer(space, seed=0)
    for proposer in (once, again):
        proposer.tell(1, Measured(score=0.6, peak_memory_bytes=45.0))
        proposer.tell(9, Measured(score=0.3, peak_memory_bytes=70.0))
    if before is None:
        again.add_pending(4)
    else:
        again.tell(4, before)
    again.tell(4, after)
    once.tell(4, after)
    assert again.best == once.best
    for row in (3, 6):
        mine, theirs = (expected(one, np.arange(12) == row) for one in (again, once))
        for name in ("score", "score_sd", "improvement", "fits", "fails", "memory_bytes"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-6), name


def test_of_equal_scores_the_first_is_the_best() -> None:
    proposer = Proposer(lattice(np.full(4, 1.0)), seed=0)
    for row in (2, 1):
        proposer.tell(row, Measured(score=0.5))
    assert proposer.best == (2, 0.5)


def test_measured_again_the_new_value_counts() -> None:
    proposer = Proposer(lattice(np.full(12, 1.0)), seed=0)
    for row in range(8):
        proposer.tell(row, Measured(score=1.0 if row == 4 else 0.0))
    proposer.tell(4, Measured(score=-0.01))
    assert proposer.doubtful() is None
    assert proposer.best == (4, -0.01)


def test_that_nothing_fits_is_said_once_what_needs_least_ran_out() -> None:
    space = lattice(np.linspace(1.0, 2.0, 30), np.linspace(300.0, 100.0, 30))
    proposer = Proposer(space, seed=0)
    open_rows = everything(space)
    launches = 0
    for _ in range(30):
        launches += 1
        row = proposer.choose(open_rows)[0]
        open_rows[row] = False
        proposer.tell(row, OutOfMemory())
        if (proof := proposer.hopeless(open_rows)) is not None:
            break
    assert proof == 29
    assert launches <= 5
    proposer.tell(3, Measured(score=0.0))
    assert proposer.hopeless(open_rows) is None


def test_forgetting_gives_back_what_was_known_before() -> None:
    space = lattice(np.linspace(2.0, 1.0, 12), np.linspace(40.0, 70.0, 12))
    proposer = Proposer(space, seed=0)
    proposer.tell(11, OutOfMemory())
    before = expected(proposer, np.arange(12) == 8)
    proposer.add_pending(8)
    proposer.forget(8)
    assert expected(proposer, np.arange(12) == 8).score_sd == pytest.approx(before.score_sd)
    proposer.tell(0, Measured(score=0.1))
    proposer.forget(0)
    again = expected(proposer, np.arange(12) == 8)
    assert (again.score, again.fits) == (pytest.approx(before.score), pytest.approx(before.fits))
    assert proposer.best is None


def test_the_expected_gain_shrinks_as_the_best_is_found_and_counts_what_may_not_fit_less() -> None:
    seconds = np.array([4.0, 3.0, 2.0, 1.0])
    space = lattice(seconds)
    proposer = Proposer(space, seed=0)
    open_rows = everything(space)
    assert proposer.expected_gain(open_rows) is None  # nothing to gain over
    proposer.tell(0, Measured(score=float(np.log(4.0))))
    open_rows[0] = False
    before = proposer.expected_gain(open_rows)
    assert before is not None
    assert before > 0.5
    proposer.tell(3, Measured(score=0.0))
    open_rows[3] = False
    after = proposer.expected_gain(open_rows)
    assert after is not None
    assert after < 0.01
    assert proposer.expected_gain(np.zeros(4, dtype=np.bool_)) == 0.0
    unlikely = Proposer(lattice(seconds, np.array([20.0, 30.0, 40.0, 95.0])), seed=0)
    unlikely.tell(2, Measured(score=float(np.log(2.0)), peak_memory_bytes=40.0))
    tight = unlikely.expected_gain(np.array([False, False, False, True]))
    assert tight is not None
    assert tight < 0.05


def improvement(ahead: float, sd: float) -> float:
    """The expected improvement of a Gaussian score: sd (z F(z) + f(z)), with z = ahead / sd."""
    z = ahead / sd
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    return float(sd * (z * NormalDist().cdf(z) + density))


@pytest.mark.parametrize("seed", range(40))
def test_the_row_with_the_largest_expected_improvement_per_second_is_chosen(seed: int) -> None:
    """Times its worth by what may not fit or fail: half at a chance of 0.46, cubed."""
    rng = np.random.default_rng(seed)
    space = lattice(np.exp(rng.normal(0, 0.5, 12)), np.exp(rng.normal(4.2, 0.3, 12)))
    assert space.seconds is not None
    # A trial has 15 steps, unless it is told.
    proposer = Proposer(space, seed=0, launch_seconds=60.0)
    for row in (0, 1):
        seconds = float(space.seconds.mean[row]) + 0.1 * row
        proposer.tell(row, Measured(score=seconds, peak_memory_bytes=50.0))
    best = proposer.best
    assert best is not None
    open_rows = np.arange(12) > 1
    alone = [expected(proposer, np.arange(12) == row) for row in range(12)]
    worth, gains = np.full(12, -1.0), []
    fastest = min(one.score for one in alone if one.score is not None)
    for row in range(2, 12):
        one = alone[row]
        assert one.score is not None
        assert one.fits is not None
        gain = improvement(best[1] - one.score, one.score_sd)
        gains.append(gain * one.fits * (1 - one.fails))
        careful = (1 - one.fails) * one.fits**3 / (one.fits**3 + 0.46**3)
        worth[row] = gain * careful / (60.0 + 15.0 * np.exp(one.score))
        # Where hardly anything can be gained, likelier and faster rows come first.
        worth[row] += 1e-12 * one.fits * (1 - one.fails) * np.exp(fastest - one.score)
    assert proposer.choose(open_rows)[0] == int(np.argmax(worth))
    assert proposer.expected_gain(open_rows) == pytest.approx(max(gains), rel=1e-4)
    assert proposer.expected_gain(np.zeros(12, dtype=np.bool_)) == 0.0


@pytest.mark.parametrize("share", [0.955, 0.98])
def test_the_chance_to_fit_is_that_of_the_usable_memory(share: float) -> None:
    """The share of the limit is 2 % uncertain; the surrogate's own noise is 4 %."""
    space = replace(lattice(np.ones(3), np.array([60.0, 76.4, 90.0])), usable_share=share)
    found = Proposer(space, seed=0).probability_of_fitting()
    assert found is not None
    # The belief is off by 0.1 of the constant, and by 0.05 of what no constant explains, twice.
    sd = np.sqrt(0.01 + 2 * 0.05**2 + 0.04**2 + 0.02**2)
    usable = np.log(80.0 * share)
    expected = [NormalDist().cdf((usable - np.log(peak)) / sd) for peak in (60.0, 76.4, 90.0)]
    assert found == pytest.approx(np.array(expected), abs=1e-6)


def test_without_predictions_the_farthest_row_is_next() -> None:
    """Steps over the axis's length; words are apart by one, or not at all."""
    sizes = LatticeAxis.of("size", [0.0, 1.0, 2.0, 3.0, 4.0, 4.0])
    words = LatticeAxis.of_words("word", ["a", "a", "a", "a", "a", "b"])
    space = Lattice(axes=(sizes, words), seconds=None, memory=None, memory_limit_bytes=None)
    proposer = Proposer(space, seed=0)
    proposer.tell(0, Measured(score=0.0))
    open_rows = np.arange(6) > 0
    # One axis end to end, and another word.
    assert proposer.choose(open_rows)[0] == 5
    open_rows[5] = False
    assert proposer.choose(open_rows)[0] == 4
    proposer.add_pending(4)
    open_rows[4] = False
    assert proposer.choose(open_rows)[0] == 2


def test_nothing_is_gained_before_anything_ran() -> None:
    space = lattice(np.array([4.0, 2.0]))
    proposer = Proposer(space, seed=0)
    assert proposer.expected_gain(np.ones(2, dtype=np.bool_)) is None
    blind = Proposer(replace(space, seconds=None), seed=0)
    blind.tell(0, Measured(score=0.0))
    assert blind.expected_gain(np.ones(2, dtype=np.bool_)) is None
    blind.tell(1, Measured(score=0.1))
    assert blind.expected_gain(np.ones(2, dtype=np.bool_)) is not None


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_row_that_ran_needs_no_more_than_there_is_if_nobody_read_its_peak(
    limit: float | None,
) -> None:
    """Its neighbours then fit more surely; and less surely after one that ran out of memory."""
    space = lattice(np.ones(8), np.full(8, 76.4))
    if limit is None:
        space = replace(space, memory=None, memory_limit_bytes=None)
    before, ran, ran_out = (Proposer(space, seed=0) for _ in range(3))
    # Without a limit, memory is known by what ran out of it.
    for proposer in (before, ran, ran_out):
        proposer.tell(7, OutOfMemory())
    ran.tell(3, Measured(score=0.0))
    ran_out.tell(3, OutOfMemory())
    usual, more, less = (found.probability_of_fitting() for found in (before, ran, ran_out))
    assert usual is not None and more is not None and less is not None
    assert less[4] < usual[4] < more[4]
    # What ran out does not fit, and its twin may not.
    assert less[3] < 0.5


def test_an_expected_gain_counts_by_how_surely_a_row_works() -> None:
    """The gain of a row counts less after it has failed."""
    space = lattice(np.array([2.0, 1.0]))
    proposer = Proposer(space, seed=0)
    proposer.tell(0, Measured(score=float(np.log(2.0))))
    open_rows = np.array([False, True])
    before = proposer.expected_gain(open_rows)
    proposer.tell(1, Failed())
    after = proposer.expected_gain(open_rows)
    assert before is not None and after is not None
    assert after < before
    assert before < 2.0


def test_only_a_row_that_ran_out_of_memory_shows_that_nothing_fits() -> None:
    space = lattice(np.ones(2), np.array([300.0, 200.0]))
    closed = np.zeros(2, dtype=np.bool_)
    untold, crashed, ran_out = (Proposer(space, seed=0) for _ in range(3))
    crashed.tell(1, Failed())
    ran_out.tell(1, OutOfMemory())
    assert untold.hopeless(closed) is None
    assert crashed.hopeless(closed) is None
    assert ran_out.hopeless(closed) == 1
    crashed.rebuild({1: OutOfMemory()}, [])
    assert crashed.hopeless(closed) == 1
    ran_out.tell(0, Measured(score=0.0))
    assert ran_out.hopeless(closed) is None


def unknown(num_rows: int, **keys: Any) -> Lattice:
    """A lattice of one axis without predictions."""
    return replace(lattice(np.ones(num_rows)), seconds=None, **keys)


def test_a_first_choice_without_predictions_expects_nothing() -> None:
    open_rows = np.arange(4) == 2
    assert Proposer(unknown(4), seed=0).choose(open_rows) == (2, ExpectedOutcome(fails=0.1))
    # Without a limit nobody asks how much memory is needed.
    unlimited = replace(lattice(np.ones(4), np.full(4, 50.0)), memory_limit_bytes=None)
    assert expected(Proposer(unlimited, seed=0), open_rows).memory_bytes is None


def test_a_choice_improves_on_the_best_score_by_what_is_expected() -> None:
    proposer = Proposer(lattice(np.array([4.0, 2.0, 3.0])), seed=0)
    proposer.tell(2, Measured(score=float(np.log(3.3))))
    choice = expected(proposer, np.array([False, True, False]))
    assert choice.score is not None
    assert choice.improvement == pytest.approx(np.log(3.3) - choice.score)


def test_a_gain_without_a_limit_is_the_expected_improvement_of_what_does_not_fail() -> None:
    proposer = Proposer(lattice(np.array([4.0, 2.0])), seed=0)
    proposer.tell(0, Measured(score=float(np.log(4.0))))
    open_rows = np.array([False, True])
    one = expected(proposer, open_rows)
    assert one.improvement is not None
    gain = improvement(one.improvement, one.score_sd) * (1 - one.fails)
    assert proposer.expected_gain(open_rows) == pytest.approx(gain, rel=1e-4)


def test_results_without_a_unit_are_expected_at_the_level_of_the_first() -> None:
    """The prediction tells by how much rows differ, and the first result where they are."""
    work = lattice(np.array([1.0, 2.0, 8.0]))
    proposer = Proposer(replace(work, in_seconds=False), seed=0)
    last = np.array([False, False, True])
    proposer.tell(1, Measured(score=5.0))
    assert expected(proposer, last).score == pytest.approx(5.0 + np.log(4.0))
    # Whatever is rebuilt, the level stays.
    proposer.rebuild({1: Measured(score=5.0)}, [])
    assert expected(proposer, last).score == pytest.approx(5.0 + np.log(4.0))
    # Rows that nobody predicts are alike until they differ.
    alike = Proposer(unknown(3), seed=0)
    for row in range(2):
        alike.tell(row, Measured(score=7.0))
    assert expected(alike, last).score == pytest.approx(7.0)


def _told_of_memory(space: Lattice) -> Floats:
    """The chances to fit once a row ran and another ran out, and nobody read a peak."""
    proposer = Proposer(space, seed=0)
    proposer.tell(1, Measured(score=0.0))
    proposer.tell(6, OutOfMemory())
    found = proposer.probability_of_fitting()
    assert found is not None
    return found


def test_only_the_memory_that_is_usable_counts() -> None:
    """Half of 80 is all of 40; without a limit, the unknown limit is one."""
    known = lattice(np.ones(8), np.linspace(30.0, 45.0, 8))
    half = _told_of_memory(replace(known, memory_limit_bytes=80.0, usable_share=0.5))
    whole = _told_of_memory(replace(known, memory_limit_bytes=40.0, usable_share=1.0))
    assert half == pytest.approx(whole)
    limited = unknown(8, memory_limit_bytes=40.0, usable_share=1.0)
    assert _told_of_memory(unknown(8)) == pytest.approx(_told_of_memory(limited))


def test_a_cell_is_hopeless_below_a_chance_of_five_percent() -> None:
    memory = np.append(np.linspace(78.0, 120.0, 40), 77.0)
    proposer = Proposer(lattice(np.ones(41), memory), seed=0)
    proposer.tell(40, OutOfMemory())
    fits = proposer.probability_of_fitting()
    assert fits is not None
    assert np.any((fits > 0.025) & (fits < 0.05)) and np.any((fits > 0.05) & (fits < 0.1))
    for row in range(40):
        found = proposer.hopeless(np.arange(41) == row)
        assert found == (40 if fits[row] < 0.05 else None)


def test_after_three_that_ran_out_the_row_of_least_memory_shows_whether_anything_fits() -> None:
    """If no open row works with a chance of 20 %; before that, the fastest is still worth most."""
    memory = np.array([*np.linspace(200.0, 150.0, 6), 130.0])
    space = lattice(np.array([*np.full(6, 1.0), 1e4]), memory)
    proposer = Proposer(space, seed=0)
    open_rows = everything(space)
    for row in range(3):
        assert proposer.choose(open_rows)[0] != 6
        proposer.tell(row, OutOfMemory())
        open_rows[row] = False
    assert proposer.choose(open_rows)[0] == 6
    # Where it has been tried, or is not open, the likeliest comes next.
    open_rows[6] = False
    fits = proposer.probability_of_fitting()
    assert fits is not None
    assert proposer.choose(open_rows)[0] == int(np.argmax(np.where(open_rows, fits, 0.0)))
    # A result shows that something fits.
    proposer.tell(3, Measured(score=0.0, peak_memory_bytes=70.0))
    open_rows[[3, 6]] = False, True
    assert proposer.choose(open_rows)[0] != 6


def test_the_row_of_least_memory_shows_whether_anything_fits_even_if_it_likely_fails() -> None:
    memory = np.array([*np.linspace(200.0, 150.0, 6), 130.0])
    fails = np.array([0.1] * 6 + [0.9])
    proposer = Proposer(replace(lattice(np.ones(7), memory), fails=fails), seed=0)
    for row in range(3):
        proposer.tell(row, OutOfMemory())
    assert proposer.choose(np.arange(7) > 2)[0] == 6


@pytest.mark.parametrize(("num", "row"), [(2, 3), (3, 4)])
def test_out_of_memories_are_counted_anew_when_all_is_told_again(num: int, row: int) -> None:
    """Three of them are needed before the row of least memory, a slow one, is tried."""
    space = lattice(np.array([1.0, 1.0, 1.0, 1.0, 1e4]), np.linspace(200.0, 160.0, 5))
    proposer = Proposer(space, seed=0)
    proposer.rebuild({one: OutOfMemory() for one in range(num)}, [])
    assert proposer.choose(np.arange(5) > 2)[0] == row


def test_what_likely_works_is_no_reason_to_try_the_row_of_least_memory() -> None:
    space = lattice(
        np.array([1.0, 1.0, 1.0, 1.0, 1e4]), np.array([200.0, 190.0, 180.0, 60.0, 50.0])
    )
    proposer = Proposer(space, seed=0)
    for row in range(3):
        proposer.tell(row, OutOfMemory())
    assert proposer.choose(np.arange(5) > 2)[0] == 3


def test_where_nothing_can_be_gained_faster_and_likelier_rows_come_first() -> None:
    seconds = np.array([1.0, 4.0, 2.0, 3.0])
    proposer = Proposer(lattice(seconds), seed=0)
    proposer.tell(0, Measured(score=-60.0))
    proposer.tell(0, Measured(score=-60.0))
    assert proposer.expected_gain(np.arange(4) > 0) == pytest.approx(0.0, abs=1e-12)
    assert proposer.choose(np.arange(4) > 0)[0] == 2
    fails = np.array([0.1, 0.9, 0.5, 0.6])
    alike = Proposer(replace(lattice(np.ones(4)), fails=fails), seed=0)
    alike.tell(0, Measured(score=-60.0))
    assert alike.choose(np.arange(4) > 0)[0] == 2


def test_the_share_of_an_axis_counts_and_not_its_number_of_steps() -> None:
    """Half of a short axis is farther than 4 of 10 steps, and nearer than 6."""
    short = [0.0, 1.0, 2.0, 0.0, 0.0, 0.0] + [0.0] * 8
    long = [0.0, 0.0, 0.0, 4.0, 6.0, 7.0, 1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 10.0, 0.0]
    pair = [0.0] * 13 + [1.0]
    axes = [LatticeAxis.of(str(place), values) for place, values in enumerate((short, long, pair))]
    same = LatticeAxis.of("same", [3.0] * 14)
    proposer = Proposer(Lattice(axes=(*axes, same)), seed=0)
    proposer.tell(0, Measured(score=0.0))
    for first, second in ((1, 3), (4, 1), (13, 5), (2, 5)):
        assert proposer.choose(np.isin(np.arange(14), [first, second]))[0] == first


def test_a_far_row_that_likely_fails_comes_later() -> None:
    fails = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.9])
    proposer = Proposer(unknown(6, fails=fails), seed=0)
    proposer.tell(0, Measured(score=0.0))
    assert proposer.choose(np.arange(6) > 2)[0] == 4
    # A tenth of five steps is less than nine tenths of two.
    assert proposer.choose(np.isin(np.arange(6), [2, 5]))[0] == 2


@pytest.mark.parametrize(("off", "is_misled"), [(1.45, False), (1.55, True)])
def test_results_mislead_from_three_on_whose_median_is_off_by_half(
    off: float, *, is_misled: bool
) -> None:
    seconds = np.linspace(1.0, 2.0, 24)
    proposer, open_rows = Proposer(lattice(seconds), seed=0), np.ones(24, dtype=np.bool_)
    said = []
    for row, factor in ((23, 1.0), (12, off), (6, 1 / off)):
        proposer.tell(row, Measured(score=float(np.log(seconds[row] * factor))))
        open_rows[row] = False
        said.append(isinstance(proposer.choose(open_rows)[1], str))
    assert said == [False, False, is_misled]
    # Half of the launches follow the prediction all the same.
    proposer.tell(18, Measured(score=float(np.log(seconds[18] * off))))
    open_rows[18] = False
    assert isinstance(proposer.choose(open_rows)[1], ExpectedOutcome)


def test_two_results_mislead_nobody() -> None:
    seconds = np.linspace(1.0, 2.0, 24)
    proposer = Proposer(lattice(seconds), seed=0)
    for row, outcome in (
        (23, Measured(score=0.0)),
        (6, Measured(score=3.0)),
        (12, Failed()),
    ):
        proposer.tell(row, outcome)
    assert isinstance(proposer.choose(np.arange(24) == 0)[1], ExpectedOutcome)


@pytest.mark.parametrize("num_others", [3, 4])
def test_a_result_is_doubted_from_the_fifth_on(num_others: int) -> None:
    proposer = Proposer(lattice(np.full(12, 1.0)), seed=0)
    assert proposer.doubtful() is None
    proposer.tell(3, Measured(score=1.0))
    for row in (0, 1, 2, 4)[-num_others:]:
        proposer.tell(row, Measured(score=0.0))
    assert (proposer.doubtful() is not None) is (num_others == 4)


@pytest.mark.parametrize(("factor", "is_doubted"), [(1.2, False), (1.28, False), (1.4, True)])
def test_a_result_is_doubted_if_it_is_a_third_worse(factor: float, *, is_doubted: bool) -> None:
    proposer = Proposer(lattice(np.full(12, 1.0)), seed=0)
    for row in range(9):
        proposer.tell(row, Measured(score=float(np.log(factor)) if row == 4 else 0.0))
    found = proposer.doubtful()
    assert (found is not None) is is_doubted


@pytest.mark.parametrize("num_axes", [0, 1, 2])
def test_a_failure_is_noise_a_level_of_the_cell_or_the_layout_s_own(num_axes: int) -> None:
    """Standard deviations of 0.25, 0.1 and 0.3 around a chance of 10 %, and 0.2 of each axis."""
    axes = tuple(LatticeAxis.of_words(f"axis {n}", ["a"]) for n in range(num_axes))
    proposer = Proposer(Lattice(axes=axes), seed=0)
    proposer.tell(0, Failed())
    own = 0.3**2 + 0.1**2 + num_axes * 0.2**2
    found = expected(proposer, np.array([True])).fails
    assert found == pytest.approx(0.1 + 0.9 * own / (own + 0.25**2), rel=1e-4)


@pytest.mark.parametrize(("seconds", "is_doubted"), [(0.35, False), (0.5, True)])
def test_among_scattered_results_one_is_doubted_that_is_off_by_two_and_a_half_deviations(
    seconds: float, *, is_doubted: bool
) -> None:
    """Eleven scatter by 0.15, so what they predict is as uncertain: 0.35 is off by 2.1 times that.

    The row alone leaves much memory free: it would be on the front whatever its speed.
    """
    merits = (Merit.SPEED, Merit.HEADROOM)
    proposer = Proposer(lattice(np.full(12, 1.0), np.full(12, 40.0)), seed=0, merits=merits)
    scattered = 0.15 * np.array([1, -1, 1, -1, 0, 1, -1, 1, 1, -1, 1, -1])
    for row, score in enumerate(scattered.tolist()):
        own = row == 4
        peak = 20.0 if own else 40.0
        proposer.tell(row, Measured(score=seconds if own else score, peak_memory_bytes=peak))
    found = proposer.doubtful()
    assert (found is not None and found[0] == 4) is is_doubted


@pytest.mark.parametrize(("peak", "is_doubted"), [(30.0, True), (60.0, False)])
def test_of_several_merits_one_is_doubted_that_would_be_on_the_front(
    peak: float, *, is_doubted: bool
) -> None:
    """The others take as long as its neighbours predict for it, and 40 of the memory."""
    merits = (Merit.SPEED, Merit.HEADROOM)
    proposer = Proposer(lattice(np.ones(12), np.full(12, 40.0)), seed=0, merits=merits)
    for row in range(12):
        own = row == 4
        proposer.tell(row, Measured(score=float(own), peak_memory_bytes=peak if own else 40.0))
    assert (proposer.doubtful() is not None) is is_doubted

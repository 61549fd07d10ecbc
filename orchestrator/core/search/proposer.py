"""Selects the row of a lattice to measure next: the largest expected improvement per GPU-second.

Rows may not fit or may fail, with probabilities. No prediction excludes a row: the unlikely ones
come last. This module knows neither layouts nor Optuna.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, log
from typing import assert_never

import numpy as np

from orchestrator.core.problem.arrays import Floats, Mask
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.search.front_gain import FrontGain
from orchestrator.core.search.lattice import Belief, Lattice
from orchestrator.core.search.option_effects import OptionEffects
from orchestrator.core.search.outcome import Failed, Measured, Outcome, OutOfMemory
from orchestrator.core.search.smoothness import Smoothness
from orchestrator.core.search.surrogate import Bound, Surrogate
from orchestrator.core.trial.measurement import LAUNCH_SECONDS
from orchestrator.core.trial.merit import Merit

STEPS_PER_TRIAL = 15.0  # warm-up and measured
# Standard deviation of the logarithm of the memory that is usable under the limit.
USABLE_SD = 0.02
FAILS_UNTIL_KNOWN = 0.1  # probability for an unknown cell
START_MEASURED = 2  # values needed without physics
HARDLY = 0.2  # smallest probability that something runs
# Below this probability of the likeliest untried row, a cell with only out-of-memories is hopeless.
NOTHING_FITS = 0.05
# A value is measured again if it is worse than its neighbours predict by this factor and by this
# many standard deviations, and if the prediction is within this factor of the best.
DOUBT_FACTOR, DOUBT_SDS, DOUBT_WITHIN = 1.3, 2.5, 1.02
# The worth of a launch falls with its chance to fit: by half at this chance, and the steeper the
# larger the power. What nearly surely fits is not preferred to what surely does.
HALF_WORTH, STEEPNESS = 0.46, 3.0
# The model misleads if the median result differs by this factor from what the others predict.
MISLED_FACTOR, MISLED_FROM = 1.5, 3


@dataclass(frozen=True, kw_only=True)
class ExpectedOutcome:
    """The expected outcome of a row that was chosen."""

    score: float | None = None  # None while nothing is known
    score_sd: float = 0.0
    improvement: float | None = None  # best score minus expected score
    fits: float | None = None  # probability; None: unknown
    fails: float = 0.0  # probability
    memory_bytes: float | None = None
    # By how much it should enlarge the front of several merits, relative; None: speed alone counts.
    front_gain: float | None = None


# Why a row was chosen: for what is expected of it, or in words ("": by the prediction alone).
Reason = ExpectedOutcome | str


class Proposer:
    """The state of the search over one lattice.

    Rows may become pending, be told and be forgotten in any order.
    """

    def __init__(
        self,
        lattice: Lattice,
        *,
        seed: int,
        steps_per_trial: float = STEPS_PER_TRIAL,
        launch_seconds: float = LAUNCH_SECONDS,
        merits: Collection[Merit] = (Merit.SPEED,),
    ) -> None:
        """`merits`: what counts of a row. Of several, the search looks for the whole front."""
        self._lattice = lattice
        self._rng = np.random.default_rng(seed)
        self._steps_per_trial, self._launch_seconds = steps_per_trial, launch_seconds
        self._limit, self._usable = lattice.memory_limit_bytes, lattice.usable_share
        memory = None if self._limit is None else lattice.memory
        self._scores = _surrogate(
            lattice,
            lattice.seconds or Belief.nothing(len(lattice)),
            # Without a prediction nothing tells a slowed run from a slow layout.
            may_be_slowed=lattice.seconds is not None,
        )
        self._memory = _surrogate(lattice, memory or _unknown_memory(lattice))
        self._failing = Surrogate(
            lattice,
            _failing(lattice),
            guess=_smoothness_of_failing(lattice),
            fits_smoothness=False,
            robust=False,
        )
        self._options = OptionEffects(lattice)
        # None: the fastest row is looked for.
        self._front = None if set(merits) == {Merit.SPEED} else FrontGain(lattice, merits)
        self._told: dict[int, Outcome] = {}  # in the order of telling
        self._best: tuple[int, float] | None = None
        self._num_scored = self._num_out_of_memory = 0
        self._pending: dict[int, None] = {}
        self._spread: Floats | None = None
        self._level = 0.0  # of scores in an unknown unit
        # The row that is predicted to need least memory shows if anything fits.
        self._least = None if memory is None else int(np.argmin(memory.mean))

    @property
    def best(self) -> tuple[int, float] | None:
        """The row of the best score, and the score. None: nothing ran."""
        return self._best

    def add_pending(self, row: int) -> None:
        """Mark a row as running: others are selected as if it had its expected outcome."""
        self._pending[row] = None
        self._scores.add(row=row, value=None)

    def tell(self, row: int, outcome: Outcome) -> None:
        """Record the outcome of a row; a second outcome replaces the first.

        Raises ValueError for a score that is no number.
        """
        _check_score(row, outcome)
        before = self._told.get(row)
        was_pending = self._pending.pop(row, 0) is None
        self._told[row] = outcome
        if before is not None:
            if was_pending or not self._corrected(row, before, outcome):
                self.rebuild(self._told, self._pending)
            return
        if was_pending and not isinstance(outcome, Measured):
            self._scores.drop(row)
        self._note_values(row, outcome)

    def rebuild(self, told: Mapping[int, Outcome], pending: Iterable[int]) -> None:
        """Forget everything except these outcomes, by row, and pending rows.

        Raises ValueError for a score that is no number.
        """
        for row, outcome in told.items():
            _check_score(row, outcome)
        self._told = dict(told)
        self._pending = dict.fromkeys(pending)
        self._best, self._num_scored, self._num_out_of_memory = None, 0, 0
        for surrogate in (self._scores, self._memory, self._failing):
            surrogate.clear()
        for row, outcome in self._told.items():
            self._note_values(row, outcome)
        for row in self._pending:
            self._scores.add(row=row, value=None)

    def forget(self, row: int) -> None:
        """Drop the outcome of a row, or its pending state."""
        was_pending = self._pending.pop(row, 0) is None
        if self._told.pop(row, None) is not None:
            self.rebuild(self._told, self._pending)
        elif was_pending:
            self._scores.drop(row)

    def choose(self, open_rows: Mask) -> tuple[int, Reason]:
        """Return the open row to measure next, and why. At least one must be open."""
        best = self._best
        fits, fails = self._fits(), self._fails()
        works = (1.0 if fits is None else fits) * (1.0 - fails)
        if self._lattice.seconds is None and self._num_scored < START_MEASURED:
            row = self._farthest(open_rows, works)
            return row, self._expected(row, fits, fails, None, None)
        mean, sd = self._scores.mean, self._scores.sd
        ran: list[int] = []
        if self._options:
            # Rows that show, or will show, how fast the values of their options are.
            ran = [*self._measured_scores(), *self._pending]
            mean = mean + self._options.log_seconds(ran, self._memory.constants)
        failed_often = best is None and self._num_out_of_memory > START_MEASURED
        if failed_often and float(works[open_rows].max()) < HARDLY:
            # The row that needs least memory shows if the cell can run at all.
            least = self._least
            if least is None or not open_rows[least]:
                least = _argmax(works, open_rows)
            return least, self._expected(least, fits, fails, mean, sd)
        careful = (1.0 - fails) * (1.0 if fits is None else _worth_of_fitting(fits))
        if self._front is not None:
            gain = self._front.expected(self._measured(), mean=mean, sd=sd, memory=self._memory)
        elif best is None:
            gain = np.exp(-mean + mean.min())
        elif len(self._told) % 2 and self._is_misled():
            return self._by_prediction_alone(open_rows, careful)
        else:
            gain = _expected_improvement(best[1] - mean, sd)
        worth = gain * careful / self._cost(mean)
        if self._options and best is not None:
            worth = worth * self._options.worth(ran, best[0])
        # If nothing can be gained, likelier and faster rows still come first.
        worth = worth + 1e-12 * works * np.exp(np.clip(mean.min() - mean, -50, 0))
        row = _argmax(worth, open_rows)
        expected = self._expected(row, fits, fails, mean, sd)
        if self._front is None or best is None:
            return row, expected
        return row, replace(expected, front_gain=float(gain[row]))

    def expected_gain(self, open_rows: Mask) -> float | None:
        """Return the largest expected improvement among open rows, relative to the best.

        Of several merits it is relative to the volume of the front. None if nothing has run yet.
        """
        is_blind = self._lattice.seconds is None and self._num_scored < START_MEASURED
        if self._best is None or is_blind:
            return None
        if not open_rows.any():
            return 0.0
        fits = self._fits()
        works = (1.0 if fits is None else fits) * (1.0 - self._fails())
        mean, sd = self._scores.mean, self._scores.sd
        if self._front is None:
            gain = _expected_improvement(self._best[1] - mean, sd)
        else:
            gain = self._front.expected(self._measured(), mean=mean, sd=sd, memory=self._memory)
        return float((gain * works)[open_rows].max())

    def probability_of_fitting(self) -> Floats | None:
        """Return each row's probability to fit, 0 to 1.

        None: no limit is known, and nothing ran out of memory.
        """
        return self._fits()

    def doubtful(self, *, but: Container[int] = ()) -> tuple[int, float] | None:
        """Return the row that is furthest below what its neighbours predict, and their prediction.

        Only rows that would then be near the best count; rows in `but` are skipped. None: there is
        no such row.
        """
        best = self._best
        if best is None or self._num_scored < 5:
            return None
        mean = self._scores.mean
        predicted: dict[int, tuple[float, float]] | None = None  # computed only if needed
        worst: tuple[float, int, float] | None = None
        for value in self._scores.values:
            row, score = value.row, value.value
            if score is None or row in but or score - mean[row] < np.log(DOUBT_FACTOR) / 2:
                continue
            predicted = self._scores.left_out() if predicted is None else predicted
            if row not in predicted:
                continue
            expected, sd = predicted[row]
            off = score - expected
            is_doubtful = off > max(np.log(DOUBT_FACTOR), DOUBT_SDS * sd)
            matters = self._would_matter(row, expected, best[1])
            if is_doubtful and matters and (worst is None or off > worst[0]):
                worst = (off, row, expected)
        return None if worst is None else (worst[1], worst[2])

    def _would_matter(self, row: int, expected: float, best: float) -> bool:
        """Return whether a told row would be near the best, or on the front, with another score."""
        if self._front is None:
            return expected < best + float(np.log(DOUBT_WITHIN))
        others = self._measured()
        other_score = replace(others.pop(row), score=expected)
        return self._front.would_be_on_it(row, other_score, others, self._memory)

    def hopeless(self, open_rows: Mask) -> int | None:
        """Return the row that proves that nothing fits, else None.

        It needs least memory and ran out of it, no row ran, and no open row should fit.
        """
        told = None if self._least is None else self._told.get(self._least)
        if self._num_scored or not isinstance(told, OutOfMemory):
            return None
        fits = self._fits()
        if fits is not None and open_rows.any() and float(fits[open_rows].max()) >= NOTHING_FITS:
            return None
        return self._least

    def _by_prediction_alone(self, open_rows: Mask, worth: Floats) -> tuple[int, str]:
        """Choose by the prediction without this cell's results, in case they mislead."""
        assert self._lattice.seconds is not None
        seconds = np.exp(self._lattice.seconds.mean - self._lattice.seconds.mean.min())
        row = _argmax(worth / seconds, open_rows)
        return row, "results contradict each other: chosen by the prediction without them"

    def _is_misled(self) -> bool:
        """Return whether results differ from the prediction, and not all in the same direction."""
        if self._lattice.seconds is None or self._num_scored < MISLED_FROM:
            return False
        scores = self._measured_scores()
        off = np.array(list(scores.values())) - self._lattice.seconds.mean[list(scores)]
        spread = float(np.median(np.abs(off - np.median(off))))
        return spread > log(MISLED_FACTOR)

    # -- outcomes as values of the surrogates --

    def _note_values(self, row: int, outcome: Outcome) -> None:
        limit = 0.0 if self._limit is None else float(np.log(self._limit * self._usable))
        match outcome:
            case Measured(score=score):
                if not self._num_scored:
                    self._find_level(row, score)
                self._scores.add(row=row, value=score)
                self._num_scored += 1
                if self._best is None or score < self._best[1]:
                    self._best = (row, score)
                used = self._used(outcome)
                if used is None:
                    self._memory.add(row=row, value=limit, bound=Bound.AT_MOST)
                else:
                    self._memory.add(row=row, value=used)
                self._failing.add(row=row, value=0.0)
            case OutOfMemory(excess=excess):
                self._num_out_of_memory += 1
                needed = limit
                if excess is not None and 0.0 < excess < inf:
                    needed += float(np.log1p(excess) - np.log(self._usable))
                self._memory.add(row=row, value=needed, bound=Bound.AT_LEAST)
                # `_failing` learns nothing: with more memory the row may still fail.
            case Failed():
                self._failing.add(row=row, value=1.0)
            case _:
                assert_never(outcome)

    def _find_level(self, row: int, score: float) -> None:
        """Take the level of an unknown unit from the first score."""
        if self._lattice.seconds is not None and self._lattice.in_seconds:
            return
        expected = 0.0 if self._lattice.seconds is None else float(self._lattice.seconds.mean[row])
        self._scores.shift(score - expected - self._level)
        self._level = score - expected

    def _corrected(self, row: int, before: Outcome, outcome: Outcome) -> bool:
        """Replace the value of a row that was measured again; False if a rebuild is needed."""
        if not isinstance(before, Measured) or not isinstance(outcome, Measured):
            return False
        used = self._used(outcome)
        if (self._used(before) is None) != (used is None):
            return False
        self._scores.correct(row=row, value=outcome.score)
        if used is not None:
            self._memory.correct(row=row, value=used)
        self._best = min(self._measured_scores().items(), key=lambda one: one[1])
        return True

    def _measured(self) -> dict[int, Measured]:
        """Return the outcomes of the rows that ran, in the order of telling."""
        return {row: told for row, told in self._told.items() if isinstance(told, Measured)}

    def _measured_scores(self) -> dict[int, float]:
        """Return their scores by row."""
        return {row: told.score for row, told in self._told.items() if isinstance(told, Measured)}

    def _used(self, measured: Measured) -> float | None:
        """Return the logarithm of the peak; None without a limit or a reading (0: no counters)."""
        peak = measured.peak_memory_bytes
        if self._limit is None or peak is None or not 0 < peak < inf:
            return None
        return float(np.log(peak))

    def _fits(self) -> Floats | None:
        if self._limit is None and not self._num_out_of_memory:
            return None
        usable = 0.0 if self._limit is None else float(np.log(self._limit * self._usable))
        sd = np.sqrt(self._memory.sd**2 + self._memory.noise_sd**2 + USABLE_SD**2)
        return np.clip(normal_cdf((usable - self._memory.mean) / sd), 1e-9, 1.0)

    def _fails(self) -> Floats:
        return np.clip(self._failing.mean, 0.02, 0.98)

    def _cost(self, mean: Floats) -> Floats | float:
        """Return seconds per trial if it runs; 1 if scores have no unit.

        An out-of-memory is no cheaper: else slow cells would be searched by running out of memory.
        """
        if self._lattice.seconds is None or not self._lattice.in_seconds:
            return 1.0
        cost: Floats = self._launch_seconds + self._steps_per_trial * np.exp(np.clip(mean, -20, 12))
        return cost

    def _farthest(self, open_rows: Mask, works: Floats) -> int:
        """Return the open row farthest from known rows; rows unlikely to run come later."""
        if self._spread is None:
            axes = self._lattice.axes
            spans = [axis.steps / (max(len(axis) - 1, 1) if axis.ordered else 1) for axis in axes]
            self._spread = np.stack(spans, axis=1) if spans else np.zeros((len(self._lattice), 0))
        known = [*self._told, *self._pending]
        if not known:
            return int(self._rng.choice(np.flatnonzero(open_rows)))
        apart = np.full(len(self._lattice), np.inf)
        for row in known[-64:]:
            off = np.abs(self._spread - self._spread[row])
            off[:, ~self._lattice.ordered] = off[:, ~self._lattice.ordered] != 0
            apart = np.minimum(apart, off.sum(axis=1))
        worth = (apart + 1e-6 * self._rng.random(len(apart))) * works
        return _argmax(worth, open_rows)

    def _expected(
        self, row: int, fits: Floats | None, fails: Floats, mean: Floats | None, sd: Floats | None
    ) -> ExpectedOutcome:
        best = self._best
        knows_memory = self._limit is not None and (
            self._lattice.memory is not None or bool(self._memory.values)
        )
        return ExpectedOutcome(
            score=None if mean is None else float(mean[row]),
            score_sd=0.0 if sd is None else float(sd[row]),
            improvement=None if best is None or mean is None else best[1] - float(mean[row]),
            fits=None if fits is None else float(fits[row]),
            fails=float(fails[row]),
            memory_bytes=float(np.exp(self._memory.mean[row])) if knows_memory else None,
        )


def _check_score(row: int, outcome: Outcome) -> None:
    if isinstance(outcome, Measured) and outcome.is_useless:
        raise ValueError(
            f"score {outcome.score} of row {row}: a logarithm is needed;"
            " set a row without one aside"
        )


def _argmax(worth: Floats, open_rows: Mask) -> int:
    """Return the open row of the largest worth, the first of equals. At least one must be open."""
    rows = np.flatnonzero(open_rows)
    return int(rows[np.argmax(worth[rows])])


def _surrogate(lattice: Lattice, belief: Belief, *, may_be_slowed: bool = False) -> Surrogate:
    guess = Smoothness.guess(lattice, residual_sd=belief.residual_sd)
    return Surrogate(lattice, belief, guess=guess, may_be_slowed=may_be_slowed)


def _unknown_memory(lattice: Lattice) -> Belief:
    """Believe in memory about the limit: people search what just fits."""
    nothing = Belief.nothing(len(lattice))
    if lattice.memory_limit_bytes is None:
        return nothing
    return replace(nothing, mean=nothing.mean + np.log(lattice.memory_limit_bytes))


def _failing(lattice: Lattice) -> Belief:
    unknown = np.full(len(lattice), FAILS_UNTIL_KNOWN)
    return Belief(
        mean=unknown if lattice.fails is None else lattice.fails,
        basis=np.ones((len(lattice), 1)),
        covariance=np.array([[0.1**2]]),
    )


def _smoothness_of_failing(lattice: Lattice) -> Smoothness:
    """The smoothness of 0s and 1s: one axis alone shows soon, one failure condemns no region."""
    guess = Smoothness.guess(lattice, residual_sd=None)
    return Smoothness(
        lengths=guess.lengths,
        joint_sd=0.3,
        additive_sd=0.2 * max(len(lattice.axes), 1) ** 0.5,
        noise_sd=0.25,
    )


def _worth_of_fitting(fits: Floats) -> Floats:
    share: Floats = fits**STEEPNESS / (fits**STEEPNESS + HALF_WORTH**STEEPNESS)
    return share


def _expected_improvement(ahead: Floats, sd: Floats) -> Floats:
    """Return the expected improvement of Gaussian scores that are `ahead` of the best."""
    z = ahead / sd
    density = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / np.sqrt(2 * np.pi)
    gained: Floats = np.maximum(sd * (z * normal_cdf(z) + density), 0.0)
    return gained

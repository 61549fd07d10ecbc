"""Which row of a lattice to measure next: the largest expected improvement per GPU-second, given that a row may not fit or may fail.

Knows no layouts and no Optuna. Nothing is ruled out by a prediction: what is unlikely to fit, or to be better, comes last.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.search.lattice import Belief, Floats, Lattice
from orchestrator.core.search.surrogate import Bound, Smoothness, Surrogate, Value
from orchestrator.core.trial.measurement import LAUNCH_SECONDS

Mask = NDArray[np.bool_]

STEPS_PER_TRIAL = 15.0  # warm-up and measured
USABLE_SHARE, USABLE_SD = (
    0.955,
    0.02,
)  # of the limit: at 97 % nothing runs, and from 94 % on the allocator thrashes, at a fifth of the speed
FAILS_UNTIL_KNOWN = 0.1  # probability that a layout crashes, of a cell of which nothing is known
START_MEASURED = 2  # values before a process without physics is asked
HARDLY = 0.2  # probability below which nothing of a cell is expected to run
NOTHING_FITS = 0.05  # probability of the likeliest untried row below which a cell of out-of-memories is given up
DOUBT_FACTOR = 1.3  # a value so much worse than its neighbours say is measured once more,
DOUBT_SDS = 2.5  # if they are as sure of it,
DOUBT_WITHIN = 1.02  # and if what they say is as good as the best, or nearly


@dataclass(frozen=True, kw_only=True)
class Told:
    """What came of a row. Scores are logarithms, lower is better. Raises ValueError for a score that is no number."""

    row: int
    score: float | None = None  # None: it did not run
    peak_memory_bytes: float | None = None  # None: not read
    out_of_memory: bool = False  # else, without a score, it failed by its own or the code's fault
    excess: float | None = (
        None  # how far over the limit an out-of-memory was, relative to it; None: not known
    )

    def __post_init__(self) -> None:
        if self.score is not None and not isfinite(self.score):
            raise ValueError(
                f"score {self.score} of row {self.row}: a logarithm is needed; a row without one is told with None"
            )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A row, and what is expected of it."""

    row: int
    score: float | None  # expected; None while nothing is known
    score_sd: float
    improvement: (
        float | None
    )  # expected score of the best so far less its own: above 0 it should be better
    fits: float | None  # probability; None where neither limit nor failure is known
    fails: float  # probability
    memory_bytes: float | None  # expected


class Proposer:
    """The state of the search over one lattice. Rows may be held (in flight), told, forgotten, and asked for in any order."""

    def __init__(
        self,
        lattice: Lattice,
        *,
        seed: int,
        steps_per_trial: float = STEPS_PER_TRIAL,
        launch_seconds: float = LAUNCH_SECONDS,
    ) -> None:
        self._lattice = lattice
        self._rng = np.random.default_rng(seed)
        self._steps_per_trial, self._launch_seconds = steps_per_trial, launch_seconds
        belief = lattice.seconds or Belief.nothing(len(lattice))
        self._scores = Surrogate(
            lattice, belief, guess=Smoothness.guess(lattice, residual_sd=belief.residual_sd)
        )
        self._limit = lattice.memory_limit_bytes
        memory = (
            lattice.memory
            if lattice.memory is not None and self._limit is not None
            else _memory_of_nothing(lattice)
        )
        self._memory = Surrogate(
            lattice, memory, guess=Smoothness.guess(lattice, residual_sd=memory.residual_sd)
        )
        self._failing = Surrogate(
            lattice,
            _failing(lattice),
            guess=_smoothness_of_failing(lattice),
            learns=False,
            robust=False,
        )
        self._told: dict[int, Told] = {}
        self._best: tuple[int, float] | None = None
        self._num_scored = self._num_out_of_memory = 0
        self._held: dict[int, None] = {}
        self._spread: Floats | None = None
        self._lifted = 0.0  # the level of the scores, where nothing was known of it
        # The row that is predicted to need least: whatever is learned, it is the one that shows whether anything fits.
        self._least = (
            None
            if lattice.memory is None or self._limit is None
            else int(np.argmin(lattice.memory.mean))
        )

    @property
    def num_told(self) -> int:
        return len(self._told)

    @property
    def best(self) -> tuple[int, float] | None:
        """The row of the best score, and the score."""
        return self._best

    def hold(self, row: int) -> None:
        """A row is in flight: others are chosen as if it came to what is expected of it."""
        self._held[row] = None
        self._scores.add(Value(row=row, value=None))

    def tell(self, told: Told) -> None:
        """Record what came of a row; a second telling replaces the first."""
        before = self._told.get(told.row)
        again = before is not None
        held = self._held.pop(told.row, 0) is None
        self._told[told.row] = told
        if again and (held or not self._corrected(before, told)):
            self.rebuild(self._told.values(), self._held)
        if again:
            return
        if held and told.score is None:
            self._scores.drop(told.row)
        self._learn(told)

    def rebuild(self, told: Iterable[Told], held: Iterable[int]) -> None:
        """Start again from what is known: the next choice rests on nothing else."""
        self._told = {t.row: t for t in told}
        self._held = dict.fromkeys(held)
        self._best, self._num_scored, self._num_out_of_memory = None, 0, 0
        for surrogate in (self._scores, self._memory, self._failing):
            surrogate.replace([])
        for one in self._told.values():
            self._learn(one)
        for row in self._held:
            self._scores.add(Value(row=row, value=None))

    def forget(self, row: int) -> None:
        """A row is neither told nor in flight any more."""
        held = self._held.pop(row, 0) is None
        if self._told.pop(row, None) is not None:
            self.rebuild(self._told.values(), self._held)
        elif held:
            self._scores.drop(row)

    def choose(self, open_rows: Mask) -> Choice:
        """The best of the open rows to measure next. At least one must be open."""
        best = self.best
        fits, fails = self._fits(), self._fails()
        works = (1.0 if fits is None else fits) * (1.0 - fails)
        if self._lattice.seconds is None and self._num_scored < START_MEASURED:
            row = self._farthest(open_rows, works)
            return self._choice(row, fits, fails, None, None)
        mean, sd = self._scores.mean, self._scores.sd
        if (
            best is None
            and self._num_out_of_memory >= START_MEASURED + 1
            and float(works[open_rows].max()) < HARDLY
        ):
            # Nothing has run and hardly anything should: what needs least shows whether the cell can be run at all.
            row = (
                self._least
                if self._least is not None and open_rows[self._least]
                else int(np.argmax(np.where(open_rows, works, -1.0)))
            )
            return self._choice(row, fits, fails, mean, sd)
        gain = (
            np.exp(-mean + mean.min())
            if best is None
            else _expected_improvement(best[1] - mean, sd)
        )
        worth = gain * works / self._cost(mean, works)
        # Where nothing can be gained, what is likelier to work and faster still comes first.
        worth = worth + 1e-12 * works * np.exp(np.clip(mean.min() - mean, -50, 0))
        row = int(np.argmax(np.where(open_rows, worth, -1.0)))
        return self._choice(row, fits, fails, mean, sd)

    def expected_gain(self, open_rows: Mask) -> float | None:
        """The largest expected improvement over the best among open rows, relative, given that they may not run; None: nothing has run yet."""
        if self._best is None or (
            self._lattice.seconds is None and self._num_scored < START_MEASURED
        ):
            return None
        if not open_rows.any():
            return 0.0
        fits = self._fits()
        works = (1.0 if fits is None else fits) * (1.0 - self._fails())
        gain = _expected_improvement(self._best[1] - self._scores.mean, self._scores.sd) * works
        return float(gain[open_rows].max())

    def doubtful(self, *, but: Container[int] = ()) -> tuple[int, float] | None:
        """A told row far worse than its neighbours say, where what they say would matter: it, and the score that they say.

        `but` these, of which a repeat is not asked again: the next worst is found behind them.
        """
        best = self.best
        if best is None or self._num_scored < 5:
            return None
        mean = self._scores.mean
        said: dict[int, tuple[float, float]] | None = None  # worked out once a value is off at all
        worst: tuple[float, int, float] | None = None
        for value in self._scores.values:
            row, score = value.row, value.value
            if score is None or row in but or score - mean[row] < np.log(DOUBT_FACTOR) / 2:
                continue
            said = self._scores.left_out() if said is None else said
            if row not in said:
                continue
            expected, sd = said[row]
            off = score - expected
            if (
                off > max(np.log(DOUBT_FACTOR), DOUBT_SDS * sd)
                and expected < best[1] + np.log(DOUBT_WITHIN)
                and (worst is None or off > worst[0])
            ):
                worst = (off, row, expected)
        return None if worst is None else (worst[1], worst[2])

    def hopeless(self, open_rows: Mask) -> int | None:
        """The row that proves that nothing fits: the one that needs least was out of memory, nothing ran, nothing open should. Else None."""
        told = None if self._least is None else self._told.get(self._least)
        if self._num_scored or told is None or not told.out_of_memory:
            return None
        fits = self._fits()
        if fits is not None and open_rows.any() and float(fits[open_rows].max()) >= NOTHING_FITS:
            return None
        return self._least

    # --- beliefs: what is told, as values of them ---

    def _learn(self, told: Told) -> None:
        limit = 0.0 if self._limit is None else float(np.log(self._limit))
        if told.score is not None:
            if not self._num_scored:
                self._find_level(told.row, told.score)
            self._scores.add(Value(row=told.row, value=told.score))
            self._num_scored += 1
            if self._best is None or told.score < self._best[1]:
                self._best = (told.row, told.score)
        if told.out_of_memory:
            self._num_out_of_memory += 1
            over = (
                0.0
                if told.excess is None or not isfinite(told.excess)
                else float(np.log1p(max(told.excess, 0.0)))
            )
            self._memory.add(Value(row=told.row, value=limit + over, bound=Bound.AT_LEAST))
            return  # whether it would have failed otherwise is not known
        if told.score is not None and (used := self._used(told)) is not None:
            self._memory.add(Value(row=told.row, value=used))
        elif told.score is not None:
            self._memory.add(Value(row=told.row, value=limit, bound=Bound.AT_MOST))
        self._failing.add(Value(row=told.row, value=float(told.score is None)))

    def _find_level(self, row: int, score: float) -> None:
        """Believe the level of the first score, where nothing is known of it: the search must not hang on the unit of the objective."""
        if self._lattice.seconds is not None and self._lattice.in_seconds:
            return
        expected = 0.0 if self._lattice.seconds is None else float(self._lattice.seconds.mean[row])
        self._scores.lift(score - expected - self._lifted)
        self._lifted = score - expected

    def _corrected(self, before: Told | None, told: Told) -> bool:
        """Take in that a measured row was measured again, without starting again; False where that is not all that changed."""
        if (
            before is None
            or before.score is None
            or told.score is None
            or (self._used(before) is None) != (self._used(told) is None)
        ):
            return False
        self._scores.correct(Value(row=told.row, value=told.score))
        if (used := self._used(told)) is not None:
            self._memory.correct(Value(row=told.row, value=used))
        self._best = min(
            ((t.row, t.score) for t in self._told.values() if t.score is not None),
            key=lambda one: one[1],
        )
        return True

    def _used(self, told: Told) -> float | None:
        """Logarithm of the peak, if it was read: 0 is what a device without counters says. Without a limit it says nothing."""
        peak = told.peak_memory_bytes
        return (
            None
            if self._limit is None or peak is None or not 0 < peak < inf
            else float(np.log(peak))
        )

    def _fits(self) -> Floats | None:
        if self._limit is None and not any(t.out_of_memory for t in self._told.values()):
            return None
        usable = 0.0 if self._limit is None else float(np.log(self._limit * USABLE_SHARE))
        sd = np.sqrt(self._memory.sd**2 + self._memory.noise_sd**2 + USABLE_SD**2)
        return np.clip(normal_cdf((usable - self._memory.mean) / sd), 1e-9, 1.0)

    def _fails(self) -> Floats:
        return np.clip(self._failing.mean, 0.02, 0.98)

    def _cost(self, mean: Floats, works: Floats) -> Floats | float:
        """GPU-seconds per GPU: an out-of-memory costs its launch. Without physics, scores need not be seconds."""
        if self._lattice.seconds is None or not self._lattice.in_seconds:
            return 1.0
        cost: Floats = self._launch_seconds + works * self._steps_per_trial * np.exp(
            np.clip(mean, -20, 12)
        )
        return cost

    def _farthest(self, open_rows: Mask, works: Floats) -> int:
        """The open row farthest from all that is known, in steps of each axis over its span, unlikely ones later."""
        if self._spread is None:
            spans = [
                (axis.steps / max(len(axis) - 1, 1))
                if axis.ordered
                else axis.steps.astype(np.float64)
                for axis in self._lattice.axes
            ]
            self._spread = np.stack(spans, axis=1) if spans else np.zeros((len(self._lattice), 0))
        known = [*self._told, *self._held]
        if not known:
            return int(self._rng.choice(np.flatnonzero(open_rows)))
        apart = np.full(len(self._lattice), np.inf)
        for row in known[-64:]:
            off = np.abs(self._spread - self._spread[row])
            off[:, ~self._lattice.ordered] = off[:, ~self._lattice.ordered] != 0
            apart = np.minimum(apart, off.sum(axis=1))
        worth = (apart + 1e-6 * self._rng.random(len(apart))) * works
        return int(np.argmax(np.where(open_rows, worth, -1.0)))

    def _choice(
        self, row: int, fits: Floats | None, fails: Floats, mean: Floats | None, sd: Floats | None
    ) -> Choice:
        best = self.best
        knows_memory = self._limit is not None and (
            self._lattice.memory is not None or bool(self._memory.values)
        )
        return Choice(
            row=row,
            score=None if mean is None else float(mean[row]),
            score_sd=0.0 if sd is None else float(sd[row]),
            improvement=None if best is None or mean is None else best[1] - float(mean[row]),
            fits=None if fits is None else float(fits[row]),
            fails=float(fails[row]),
            memory_bytes=float(np.exp(self._memory.mean[row])) if knows_memory else None,
        )


def _memory_of_nothing(lattice: Lattice) -> Belief:
    """Where nothing predicts memory: about the limit, since what people search is what just fits."""
    nothing = Belief.nothing(len(lattice))
    return (
        nothing
        if lattice.memory_limit_bytes is None
        else replace(nothing, mean=nothing.mean + np.log(lattice.memory_limit_bytes))
    )


def _failing(lattice: Lattice) -> Belief:
    nothing = np.full(len(lattice), FAILS_UNTIL_KNOWN)
    return Belief(
        mean=nothing if lattice.fails is None else lattice.fails,
        basis=np.ones((len(lattice), 1)),
        covariance=np.array([[0.1**2]]),
        residual_sd=None,
    )


def _smoothness_of_failing(lattice: Lattice) -> Smoothness:
    """The smoothness of 0s and 1s: what one axis does alone shows soon, and one failure condemns no region."""
    guess = Smoothness.guess(lattice, residual_sd=None)
    return Smoothness(
        lengths=guess.lengths,
        joint_sd=0.3,
        additive_sd=0.2 * max(len(lattice.axes), 1) ** 0.5,
        noise_sd=0.25,
    )


def _expected_improvement(ahead: Floats, sd: Floats) -> Floats:
    """Expected improvement of a Gaussian score that is `ahead` of the best in expectation."""
    z = ahead / sd
    density = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / np.sqrt(2 * np.pi)
    gained: Floats = np.maximum(sd * (z * normal_cdf(z) + density), 0.0)
    return gained

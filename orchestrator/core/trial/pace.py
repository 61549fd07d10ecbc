"""The pace of a program's lines, against the step times that the lines report.

The rank reads new lines 20 to 100 times a second, so it knows at least and at most how much time
passed between two reads. The medians of such windows are the pace. A program that writes all its
lines at its end has no pace.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult

# The times in lines may differ from their pace by this factor.
PACE_FACTOR = 1.5
# A pace counts if it was seen so often: a pause for a checkpoint is one window, and the median of
# five does not see two.
FEWEST_WINDOWS = 5
# The two bounds of a window's time differ by at most such a factor: the first that gives enough
# windows. Short ones are blurred, and long ones few.
SHARP, LESS_SHARP, BLURRED = 1.3, 1.6, 3.0
# The slower and the faster windows of a program without pauses differ by at most this factor.
EVEN_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class ToldSteps:
    """The steps that a program reported: warm-up, timed ones, and those after the last one."""

    seconds: Sequence[float]
    median: float  # of the timed ones
    # True if each of them is a line, in order.
    are_lines: bool
    every: int  # steps that a line covers

    @classmethod
    def of(cls, result: RankResult, seen: ProgramSeen) -> ToldSteps:
        counted = [*result.warmup_seconds, *result.step_seconds]
        lines = [*counted, *seen.later_seconds]
        are_lines = bool(seen.reads) and seen.reads[-1].num_steps == len(lines)
        return cls(
            seconds=lines if are_lines else counted,
            median=statistics.median(result.step_seconds),
            are_lines=are_lines,
            every=seen.every,
        )

    def between(self, first: int, last: int) -> float:
        """Return the reported seconds of the lines after line `first`, up to line `last`."""
        if self.are_lines:
            return self.every * sum(self.seconds[first:last])
        return self.every * (last - first) * self.median


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The time between two reads of lines, against the time that the lines report."""

    num_steps: int
    least: float  # seconds
    most: float
    told: float  # seconds

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    @property
    def likely(self) -> float:
        """The middle; the reported time of lines of which only the latest time is known."""
        return self.middle if self.least > 0 else self.told


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """The seconds of a step in some windows: those that passed, and those that lines report."""

    real: float
    told: float

    @classmethod
    def of(cls, window: _Window, every: int) -> StepPace:
        num_steps = window.num_steps * every
        return cls(real=window.middle / num_steps, told=window.told / num_steps)

    @classmethod
    def of_faster_half(cls, windows: Sequence[_Window], every: int) -> StepPace:
        """Return the pace of the windows with the least real over reported time.

        They have half of the steps.
        """
        half = sum(one.num_steps for one in windows) / 2
        num_steps, real, told = 0, 0.0, 0.0
        for one in sorted(windows, key=lambda one: one.likely / one.told):
            if num_steps >= half:
                break
            num_steps, real, told = num_steps + one.num_steps, real + one.likely, told + one.told
        return cls(real=real / (num_steps * every), told=told / (num_steps * every))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of lines, by the medians of windows."""

    # Real time over reported time: at least, and at most.
    least: float
    most: float
    # Steps in the windows that gave `least` and `most`.
    slow: StepPace
    fast: StepPace
    # Steps in the faster half of the windows. Where two windows meet, what is not known of one's
    # time belongs to the other, so their sum is known better than each of them.
    faster_half: StepPace
    is_sharp: bool

    @classmethod
    def of(cls, seen: ProgramSeen, told: ToldSteps) -> Pace | None:
        """Return the pace; None: too few windows were seen."""
        windows = [_windows(seen.reads, told, one) for one in (SHARP, LESS_SHARP, BLURRED)]
        best = next((some for some in windows if len(some) >= FEWEST_WINDOWS), None)
        blurred = windows[-1]
        if best is None:
            return None
        # A pause makes a long window slow. If no window differs from the others, there is none.
        slow, fast = (_window_at(blurred, share, _real_over_told) for share in (0.75, 0.25))
        is_even = _real_over_told(slow) <= EVEN_FACTOR * _real_over_told(fast)
        unpaused = best if is_even else blurred
        least = _window_at(unpaused, 0.5, lambda one: one.least / one.told)
        most = _window_at(best, 0.5, lambda one: one.most / one.told)
        return cls(
            least=least.least / least.told,
            most=most.most / most.told,
            slow=StepPace.of(least, told.every),
            fast=StepPace.of(most, told.every),
            faster_half=StepPace.of_faster_half(blurred, told.every),
            is_sharp=best is not blurred,
        )


def _windows(reads: Sequence[LinesRead], told: ToldSteps, factor: float) -> list[_Window]:
    """Divide the reads into windows that are long against the time between two reads.

    A long time without lines is a window of its own, so that it changes no other. If it is longer
    than the lines after it tell, it may be a pause: then only the first of them waited for it, and
    when the others were written is known less well.
    """
    found: list[_Window] = []

    def close(first: LinesRead, last: LinesRead, *, after: int, to: int, is_known: bool) -> None:
        # A clock that stands still shows nothing.
        if to > after and last.at > first.after:
            window = _Window(
                num_steps=to - after,
                least=max(last.after - first.at, 0.0) if is_known else 0.0,
                most=last.at - first.after,
                told=told.between(after, to),
            )
            found.append(window)

    first = reads[0] if reads else None
    for before, read in pairwise(reads):
        assert first is not None, "there are reads"
        begun, ended = first.num_steps, read.num_steps
        if _is_sharp(before, read, factor):
            paused = before.num_steps
            close(first, before, after=begun, to=paused, is_known=True)
            all_told = told.between(paused, ended)
            is_pause = read.after - before.at > PACE_FACTOR * all_told
            late = paused + 1 if is_pause else ended
            close(before, read, after=paused, to=late, is_known=True)
            close(before, read, after=late, to=ended, is_known=False)
            first = read
        elif _is_sharp(first, read, factor):
            close(first, read, after=begun, to=ended, is_known=True)
            first = read
    if first is not None and found:
        close(first, reads[-1], after=first.num_steps, to=reads[-1].num_steps, is_known=True)
    return found


def _is_sharp(first: LinesRead, last: LinesRead, factor: float) -> bool:
    """Return whether the time between two reads of lines is known to such a factor."""
    return last.at - first.after <= factor * (last.after - first.at)


def _real_over_told(window: _Window) -> float:
    return window.middle / window.told


def _window_at(
    windows: Sequence[_Window], share: float, key: Callable[[_Window], float]
) -> _Window:
    """Return the window with this share of the steps in it and in those before it, by `key`."""
    ordered = sorted(windows, key=key)
    wanted, passed = share * sum(one.num_steps for one in ordered), 0
    for one in ordered:
        passed += one.num_steps
        if passed >= wanted:
            return one
    raise ValueError("no windows")

"""Judges lines that a program writes several at a time, by the time from one group to the next.

The lines of a group belong to the steps since the group before, so that together they tell about
the time between the two. If they tell much less in every group, the clock does not see what the
steps wait for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.core.trial.pace import PACE_FACTOR, ToldSteps
from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult

# The chance that lines which are written one by one, as their steps end, are seen so.
LEAST_CHANCE = 0.05
# The share of all lines that come in groups.
LEAST_SHARE = 0.5
# If so many steps are followed by a time without lines, it is a part of them, whoever holds lines
# back: it is no pause after a few.
MOST_PAUSES = 0.4
# Intervals between groups, and by how much they may differ: pauses come less regularly.
FEWEST_INTERVALS = 4
EVEN_FACTOR = 1.3
# A run with more reads is not judged: some are forgotten, so that groups look too large.
_MOST_READS = 400


@dataclass(frozen=True, kw_only=True)
class _LinesAtOnce:
    """Lines that one look found, with none in the looks before and after it."""

    after: float
    at: float
    told: float  # seconds of all its lines
    num_lines: int
    # Its lines came at one look, and the chance of that if they are written one by one.
    came_at_once: bool
    chance: float


@dataclass(frozen=True, kw_only=True)
class LineGroups:
    """Lines that come in groups."""

    # True if lines that are written one by one hardly ever come so.
    are_held_back: bool
    num_lines: float  # of a group, the median
    # Seconds from group to group, in the mean, if all these are much longer than their lines tell.
    every: float | None
    told: float  # in the mean

    @classmethod
    def of(cls, result: RankResult) -> LineGroups | None:
        """Return the groups of a program's lines; None: most come by themselves."""
        seen = result.seen
        if seen is None or not result.step_seconds or len(seen.reads) > _MOST_READS:
            return None
        told = ToldSteps.of(result, seen)
        return _of_groups(_groups(seen.reads, told), num_lines=_num_lines(seen))


def _num_lines(seen: ProgramSeen) -> int:
    """Count the lines after the first read: what came with it had all of the start to come."""
    return seen.reads[-1].num_steps - seen.reads[0].num_steps if seen.reads else 0


def _of_groups(groups: Sequence[_LinesAtOnce], *, num_lines: int) -> LineGroups | None:
    several = [group for group in groups if group.came_at_once and group.num_lines > 1]
    in_groups = sum(group.num_lines for group in several)
    if not several or in_groups < LEAST_SHARE * num_lines:
        return None
    chance = math.prod(group.chance for group in several)
    is_held_back = chance < LEAST_CHANCE
    is_frequent = len(several) >= MOST_PAUSES * in_groups
    every = _regular_interval(several) if is_held_back or is_frequent else None
    return LineGroups(
        are_held_back=is_held_back,
        num_lines=statistics.median(group.num_lines for group in several),
        every=every,
        told=sum(group.told for group in several) / len(several),
    )


def _regular_interval(groups: Sequence[_LinesAtOnce]) -> float | None:
    """Return the mean time before a group, if it is much longer than told, and regular."""
    if len(groups) < FEWEST_INTERVALS:
        return None
    # At least and at most, over what the lines tell. A pause or two in a long run change nothing.
    least = sorted(group.after / group.told for group in groups)
    most = sorted(group.at / group.told for group in groups)
    left_out = (len(groups) - 1) // 4
    slowest, fastest = least[-1 - left_out], most[left_out]
    if slowest > EVEN_FACTOR * fastest or least[left_out] <= PACE_FACTOR:
        return None
    return sum(group.after + group.at for group in groups) / 2 / len(groups)


def _groups(reads: Sequence[LinesRead], told: ToldSteps) -> list[_LinesAtOnce]:
    """Return the groups after the first, with the least and the most time since the one before."""
    runs: list[list[LinesRead]] = []
    for read in reads:
        if runs and read.after <= runs[-1][-1].at:
            runs[-1].append(read)
        else:
            runs.append([read])
    found = []
    for before, run in pairwise(runs):
        last, (first, *others) = before[-1], run
        begun, ended = last.num_steps, run[-1].num_steps
        # From the end of the first line's step to that of the last one's.
        span = told.between(begun + 1, ended)
        group = _LinesAtOnce(
            after=first.after - last.at,
            at=run[-1].at - last.after,
            told=told.between(begun, ended),
            num_lines=ended - begun,
            came_at_once=not others,
            chance=max(0.0, 1 - span / max(first.at - first.after, 1e-9)),
        )
        found.append(group)
    return found

"""Judges lines that a program writes several at a time, by the time from one group to the next.

The lines of a group belong to the steps since the group before, so together they should report
about the time between the two. If they report much less in every group, the clock of the program
stops before the steps have ended.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.core.trial.pace import PACE_FACTOR, ToldSteps
from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult

# Lines are held back if lines that are written one by one, as their steps end, look the same with
# less than this probability.
LEAST_CHANCE = 0.05
# Groups are judged if they have at least this share of all lines.
LEAST_SHARE = 0.5
# Groups over the lines in them. From this share on, so many steps are followed by a time without
# lines that it is a part of a step, and no pause, also if no lines are held back.
MOST_PAUSES = 0.4
# Fewest groups to judge, and how much their intervals may differ: pauses come less regularly.
FEWEST_INTERVALS = 4
EVEN_GROUPS_FACTOR = 1.3
# A program with more reads is not judged: some reads are left out, so groups look too large.
_MOST_READS = 400


@dataclass(frozen=True, kw_only=True)
class _LinesAtOnce:
    """Lines that came close together: in one read, or in reads that follow each other."""

    # The least and the most seconds since the group before.
    least: float
    most: float
    told: float  # seconds that its lines report
    num_lines: int
    # True if one read found all its lines; the probability of that if they are written one by one.
    in_one_read: bool
    chance: float


@dataclass(frozen=True, kw_only=True)
class LineGroups:
    """The groups in which a program's lines come."""

    # True if lines that are written one by one are unlikely to come in such groups.
    are_held_back: bool
    num_lines: float  # of a group, the median
    # The mean seconds from group to group, if they are regular and much longer than the lines
    # report; else None.
    every: float | None
    # The mean seconds that the lines of a group report.
    told: float

    @classmethod
    def of(cls, result: RankResult) -> LineGroups | None:
        """Return the groups of a program's lines; None: most lines come alone, or it is unknown."""
        seen = result.seen
        if seen is None or not result.step_seconds or not 0 < len(seen.reads) <= _MOST_READS:
            return None
        told = ToldSteps.of(result, seen)
        return _of_groups(_groups(seen.reads, told), num_lines=_num_lines(seen))


def _num_lines(seen: ProgramSeen) -> int:
    """Count the lines after the first read, which has all lines since the program began."""
    return seen.reads[-1].num_steps - seen.reads[0].num_steps


def _of_groups(groups: Sequence[_LinesAtOnce], *, num_lines: int) -> LineGroups | None:
    several = [group for group in groups if group.in_one_read and group.num_lines > 1]
    in_groups = sum(group.num_lines for group in several)
    if not several or in_groups < LEAST_SHARE * num_lines:
        return None
    are_held_back = math.prod(group.chance for group in several) < LEAST_CHANCE
    is_frequent = len(several) >= MOST_PAUSES * in_groups
    every = _regular_interval(several) if are_held_back or is_frequent else None
    return LineGroups(
        are_held_back=are_held_back,
        num_lines=statistics.median(group.num_lines for group in several),
        every=every,
        told=sum(group.told for group in several) / len(several),
    )


def _regular_interval(groups: Sequence[_LinesAtOnce]) -> float | None:
    """Return the mean seconds between groups, if they are regular and much longer than reported."""
    if len(groups) < FEWEST_INTERVALS:
        return None
    # Over the reported time. A quarter of the groups is left out at each end, for pauses.
    least = sorted(group.least / group.told for group in groups)
    most = sorted(group.most / group.told for group in groups)
    left_out = (len(groups) - 1) // 4
    slowest, fastest = least[-1 - left_out], most[left_out]
    if slowest > EVEN_GROUPS_FACTOR * fastest or least[left_out] <= PACE_FACTOR:
        return None
    return sum(group.least + group.most for group in groups) / 2 / len(groups)


def _groups(reads: Sequence[LinesRead], told: ToldSteps) -> list[_LinesAtOnce]:
    """Return the groups after the first."""
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
            least=first.after - last.at,
            most=run[-1].at - last.after,
            told=told.between(begun, ended),
            num_lines=ended - begun,
            in_one_read=not others,
            chance=max(0.0, 1 - span / max(first.at - first.after, 1e-9)),
        )
        found.append(group)
    return found

"""Finds the front of a cell's measured layouts: those that no other beats in every merit.

Speed and energy are measured with noise, so a layout that is dominated by less than noise could be
on the front too. What memory a layout leaves free hardly varies between its runs. Merits have
names: those of a cell, or the objectives of a sweep file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf

import numpy as np

from orchestrator.core.problem.hypervolume import hypervolume
from orchestrator.core.trial.merit import Merit
from orchestrator.core.trial.winner import WIDTH

# Share of the device's memory: layouts that differ by less have the same memory free.
SAME_HEADROOM = 0.005
# Share of the volume below the front: a layout that adds less is not worth a repeat.
MINOR_SHARE = 0.001


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A measured layout, by its trial, with each of the merits that are compared."""

    key: int
    # By merit; more is better. Logarithms, but for the headroom: a share of the device's memory.
    values: Mapping[str, float]
    # Standard deviation of the values of noisy merits.
    sds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Front:
    """The layouts of a front, by trial id, and those that noise may keep from it."""

    on: Sequence[int]
    # Dominated by less than noise, the least dominated first.
    possible: Sequence[int]
    # For each possible one, the layouts of the front that dominate it by less than noise.
    rivals: Mapping[int, Sequence[int]]


def front_of(
    points: Sequence[FrontPoint], merits: Sequence[str], *, headroom: str = Merit.HEADROOM
) -> Front:
    """Return the front of the points. All of them have all of the merits.

    `headroom`: the name of the merit without noise.
    """
    noisy = [merit for merit in merits if merit != headroom]
    exact = [merit for merit in merits if merit == headroom]
    # Only an earlier point of this order can beat a later one.
    by = [*noisy, *exact]
    order = sorted(points, key=lambda point: ([-point.values[merit] for merit in by], point.key))
    on: list[FrontPoint] = []
    # By dominated layout, by how much each layout of the front dominates it.
    margins: dict[int, dict[int, float]] = {}
    for point in order:
        ahead = {other.key: _margin(other, point, noisy, exact) for other in on}
        if any(margin >= 0.0 for margin in ahead.values()):
            margins[point.key] = ahead
        else:
            on.append(point)
    largest = {key: max(ahead.values()) for key, ahead in margins.items()}
    possible = sorted((key for key in largest if largest[key] < WIDTH), key=largest.__getitem__)
    return Front(
        on=[point.key for point in on],
        possible=possible,
        rivals={
            key: [other for other, margin in margins[key].items() if margin >= 0.0]
            for key in possible
        },
    )


def _margin(
    one: FrontPoint, other: FrontPoint, noisy: Sequence[str], exact: Sequence[str]
) -> float:
    """Return by how many standard deviations one beats the other in every noisy merit.

    Negative: it does not. Infinite: nothing is noisy, or minus that: it leaves less memory free.
    """
    if any(one.values[merit] - other.values[merit] < -SAME_HEADROOM for merit in exact):
        return -inf
    return min(
        (
            (one.values[merit] - other.values[merit]) / hypot(one.sds[merit], other.sds[merit])
            for merit in noisy
        ),
        default=inf,
    )


def minor_of(
    front: Front,
    points: Sequence[FrontPoint],
    merits: Sequence[str],
    *,
    headroom: str = Merit.HEADROOM,
) -> frozenset[int]:
    """Return the layouts of a front without which its volume would hardly be smaller.

    They are far from useful in one merit: the slowest layouts, or those that fill the memory.
    """
    on = [point for point in points if point.key in front.on]
    values = np.array([[point.values[merit] for merit in merits] for point in on])
    for place, merit in enumerate(merits):
        if merit != headroom and len(on):
            values[:, place] = np.exp(values[:, place] - values[:, place].max())
    values = values.reshape(len(on), len(merits))
    whole = hypervolume(values)
    without = [hypervolume(np.delete(values, place, axis=0)) for place in range(len(on))]
    return frozenset(
        point.key
        for point, rest in zip(on, without, strict=True)
        if whole - rest < MINOR_SHARE * whole
    )


def next_to_repeat(
    front: Front,
    *,
    num_repeats: Mapping[int, int],
    contenders: int,
    repeats: int,
    given_up: Collection[int] = (),
    under_way: Collection[int] = (),
    last: int | None = None,
) -> int | None:
    """Return the layout to measure again, so that the front rests on more than one run of each.

    Each layout on the front is repeated once, and so are the `contenders` that could be on it; in
    further rounds only those that noise does not tell apart. None: nothing is left to repeat.
    `last`: the layout that ran last; another goes first.
    """
    done = {key: num_repeats.get(key, 0) + (key in under_way) for key in (*front.on, *front.rivals)}
    done |= {key: repeats for key in given_up if key in done}
    possible = list(front.possible[:contenders])
    wanted = [*front.on, *possible]
    for number in range(1, repeats + 1):
        behind = [key for key in wanted if done[key] < number]
        if behind:
            others = [key for key in behind if key != last and key not in under_way]
            return min(others or behind, key=lambda key: (done[key], wanted.index(key)))
        tied = {key for one in possible for key in (one, *front.rivals[one])}
        wanted = [key for key in wanted if key in tied]
    return None


def most_repeats(
    num_on: int, num_possible: int, *, contenders: int, repeats: int, done: int = 0
) -> int:
    """Return the most repeats that the layouts of a front may still take."""
    possible = min(num_possible, contenders)
    first = num_on + possible
    # A later round has those that are tied: at most all of them.
    later = (repeats - 1) * first if possible else 0
    return max((first + later if repeats else 0) - done, 0)

"""The front of points: which of them are not dominated, and the volume that they dominate.

Larger is better in each dimension, and 0 is the reference. A point dominates another if it is at
least as good in each dimension and better in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.problem.arrays import Floats, Mask


def on_front(points: Floats) -> Mask:
    """Return which rows of `points` (points x dimensions) no other row dominates."""
    found = np.zeros(len(points), dtype=np.bool_)
    # Only an earlier point of this order can dominate a later one.
    order = np.lexsort(-points.T[::-1])
    front = np.empty((0, points.shape[1]))
    for row in order.tolist():
        point = points[row]
        at_least = (front >= point).all(axis=1)
        if not (at_least & (front > point).any(axis=1)).any():
            found[row] = True
            front = np.vstack([front, point])
    return found


def hypervolume(points: Floats) -> float:
    """Return the volume between 0 and the points. A point with a 0 adds nothing."""
    points = np.maximum(points, 0.0)
    if not len(points):
        return 0.0
    if points.shape[1] == 1:
        return float(points.max())
    points = points[on_front(points)]
    points = points[np.argsort(-points[:, -1], kind="stable")]
    heights = points[:, -1] - np.append(points[1:, -1], 0.0)
    found = 0.0
    for place, height in enumerate(heights.tolist()):
        if height > 0.0:
            found += height * hypervolume(points[: place + 1, :-1])
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """Disjoint boxes that together are the space that no point of a front dominates."""

    lower: Floats  # boxes x dimensions
    upper: Floats  # infinite at the outside


def free_boxes(points: Floats) -> Boxes:
    """Return the space above 0 that no point dominates, as boxes.

    The space is cut into slabs at the last coordinates of the points. In a slab, only the points
    that reach to its top dominate anything.
    """
    num_dimensions = points.shape[1]
    if num_dimensions == 1:
        least = float(points.max(initial=0.0))
        return Boxes(lower=np.array([[least]]), upper=np.array([[np.inf]]))
    levels = np.unique(np.append(np.maximum(points[:, -1], 0.0), 0.0))
    tops = np.append(levels[1:], np.inf)
    lower, upper = [], []
    for level, top in zip(levels.tolist(), tops.tolist(), strict=True):
        part = free_boxes(points[points[:, -1] > level, :-1])
        slab = np.ones((len(part.lower), 1))
        lower.append(np.hstack([part.lower, level * slab]))
        upper.append(np.hstack([part.upper, top * slab]))
    return Boxes(lower=np.vstack(lower), upper=np.vstack(upper))

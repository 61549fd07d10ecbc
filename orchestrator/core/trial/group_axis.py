"""Finds the axis of a layout that a group of ranks serves, by the ranks' numbers."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.kernel_names import Axis


def single_axis(layout: Layout) -> Axis | None:
    """Return the only axis that communicates. None: none does, or several do."""
    found = [axis for axis, size in _sizes(layout).items() if size > 1]
    return found[0] if len(found) == 1 else None


def axis_of_ranks(ranks: Sequence[int], layout: Layout) -> Axis:
    """Return the axis that a group of these ranks serves.

    Ranks are numbered with tensor parallelism fastest, then context, data and pipeline parallelism.
    """
    differ, stride = set(), 1
    for axis, size in _sizes(layout).items():
        if len({rank // stride % size for rank in ranks}) > 1:
            differ.add(axis)
        stride *= size
    # Gradients are averaged over data and context parallelism together.
    if differ == {Axis.DP, Axis.CP}:
        return Axis.DP
    return differ.pop() if len(differ) == 1 else Axis.OTHER


def _sizes(layout: Layout) -> dict[Axis, int]:
    """The fastest axis first."""
    return {
        Axis.TP: layout.tensor_parallel_size,
        Axis.CP: layout.context_parallel_size,
        Axis.DP: layout.data_parallel_size,
        Axis.PP: layout.pipeline_parallel_size,
    }

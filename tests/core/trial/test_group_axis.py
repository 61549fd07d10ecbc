"""The ranks of a group tell its axis."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.group_axis import axis_of_ranks, single_axis
from orchestrator.core.trial.kernel_names import Axis


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        # 2 stages x 2 replicas x 2 context x 2 tensor ranks, the last fastest.
        ((0, 1), Axis.TP),
        ((4, 6), Axis.CP),
        ((1, 5), Axis.DP),
        ((3, 11), Axis.PP),
        ((0, 2, 4, 6), Axis.DP),
        (range(16), Axis.OTHER),
        ((0, 1, 2, 3), Axis.OTHER),
    ],
)
def test_the_ranks_of_a_group_tell_its_axis(ranks: Sequence[int], axis: Axis) -> None:
    layout = Layout(
        data_parallel_size=2,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        context_parallel_size=2,
    )
    assert axis_of_ranks(ranks, layout) is axis


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (Layout(), None),
        (Layout(data_parallel_size=4), Axis.DP),
        (Layout(tensor_parallel_size=2), Axis.TP),
        (Layout(pipeline_parallel_size=2), Axis.PP),
        (Layout(data_parallel_size=2, tensor_parallel_size=2), None),
    ],
)
def test_one_axis_alone_has_all_communication(layout: Layout, axis: Axis | None) -> None:
    assert single_axis(layout) is axis

"""What follows from the values of gangs: whether they fit, their progress and their failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.cluster.contract import (
    Slots,
    first_failure,
    least_advanced,
    shapes_of,
)
from orchestrator.core.errors import ResourcesInsufficient
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import Device, Heartbeat, Phase

K = FailureKind


def test_a_gang_is_as_far_as_its_least_advanced_node() -> None:
    ahead, behind = Heartbeat(phase=Phase.STEADY, step=9), Heartbeat(phase=Phase.STEADY, step=7)
    building = Heartbeat(phase=Phase.RENDEZVOUS, step=0)
    assert least_advanced([ahead, behind, ahead]) == behind
    assert least_advanced([ahead, building]) == building  # phases come before steps
    assert least_advanced([ahead, None]) is None  # the other has not answered
    assert least_advanced([]) is None


def report(node: str, kind: FailureKind | None, at: float) -> NodeReport:
    failure = Failure(kind=kind, message="") if kind is not None else None
    return NodeReport(
        node=node,
        ranks=[],
        failure=failure,
        failed_at_unix_seconds=at if kind is not None else None,
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report("a", None, 0), report("b", None, 0)], None),
        ([report("a", K.USER_ERROR, 2.0), report("b", K.SEGFAULT, 1.0)], K.SEGFAULT),  # the earlier
        (
            [report("a", K.NCCL, 1.0), report("b", K.USER_ERROR, 2.0)],
            K.USER_ERROR,
        ),  # whoever lost its peer noticed first
        (
            [report("a", K.USER_ERROR, 1.0), report("b", K.OOM_GPU, 2.0)],
            K.OOM_GPU,
        ),  # explains the rest
        (
            [report("a", K.CANCELLED, 1.0), report("b", K.USER_ERROR, 2.0)],
            K.USER_ERROR,
        ),  # killed by us, because of b
    ],
)
def test_a_gang_died_of_what_one_node_did_and_not_of_what_others_then_suffered(
    reports: list[NodeReport], expected: FailureKind | None
) -> None:
    failure = first_failure(reports)
    assert (failure.kind if failure is not None else None) is expected


def test_how_other_nodes_end_does_not_matter_once_the_numbers_are_in() -> None:
    lost = report("b", K.NCCL, 1.0)
    assert first_failure([replace(report("a", None, 0), has_enough=True), lost]) is None


CELL = Cell(model=PRESETS["llama-3.1-8b"], num_gpus=64, sequence_length=4096, global_batch_size=64)


@pytest.mark.parametrize(
    ("device", "nodes", "per_node", "words"),
    [
        (
            Device.CUDA,
            [],
            8,
            "device: h100-sxm asks for GPUs, and there are none. Use device: cpu,",
        ),
        (
            Device.CPU,
            [2],
            2,
            "gpus: 64 needs 32 nodes with 2 cores each (without GPUs a slot is a core);"
            " here is 1 node with 2 cores. Lower gpus",
        ),
        (Device.CUDA, [8, 4], 8, "needs 8 nodes with 8 GPUs each; here are 2 nodes with 8 GPUs or"),
        (Device.CUDA, [8, 8], 64, "needs 1 node with 64 GPUs; here are 2 nodes with 8 GPUs each."),
    ],
)
def test_a_gang_that_no_empty_cluster_holds_is_refused_with_what_there_is(
    device: Device, nodes: list[int], per_node: int, words: str
) -> None:
    slots = Slots(device=device, device_name=None, nodes=dict(zip("abc", nodes, strict=False)))
    with pytest.raises(ResourcesInsufficient) as refused:
        shapes_of([CELL], slots, gpus_per_node=per_node, device="h100-sxm")
    assert words in str(refused.value)

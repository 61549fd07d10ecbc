"""Links: bandwidths as NCCL's tests count them, lines through noisy calls, and predictions for a
slow network.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.physics.collective_group import ring_seconds
from orchestrator.core.physics.link_sample import (
    PASSES,
    Collective,
    LinkSample,
    Span,
    bus_factor,
)
from orchestrator.core.physics.links import (
    ACROSS,
    INSIDE,
    _first_guess,
    fit_links,
    network_of,
)
from orchestrator.core.physics.step_time_constants import PRIORS, StepTimeConstants
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS

H100 = DEVICES["h100-sxm"]
SIZES = [1 << power for power in range(10, 29, 2)]  # 1 KiB to 256 MiB
SPANS = [
    Span(num_ranks=2, num_nodes=1),
    Span(num_ranks=8, num_nodes=1),
    Span(num_ranks=2, num_nodes=2),
    Span(num_ranks=32, num_nodes=4),
]


@pytest.mark.parametrize(
    ("collective", "num_ranks", "factor"),
    [  # doc/PERFORMANCE.md of nccl-tests
        (Collective.ALL_REDUCE, 8, 2 * 7 / 8),
        (Collective.ALL_GATHER, 8, 7 / 8),
        (Collective.REDUCE_SCATTER, 4, 3 / 4),
        (Collective.SEND_RECV, 2, 1.0),
    ],
)
def test_bus_bandwidth_is_counted_as_nccl_tests_do(
    collective: Collective, num_ranks: int, factor: float
) -> None:
    assert bus_factor(collective, num_ranks) == pytest.approx(factor)
    sample = LinkSample(
        collective=collective,
        span=Span(num_ranks=num_ranks, num_nodes=1),
        message_bytes=1 << 30,
        seconds=0.5,
    )
    assert sample.algorithm_bytes_per_second == pytest.approx(2**31)
    assert sample.bus_bytes_per_second == pytest.approx(2**31 * factor)


def line(*, latency: float, bandwidth: float, bad: int = 0, seed: int = 0) -> list[LinkSample]:
    """An all-gather of two ranks: half of each message goes through the link."""
    rng = np.random.default_rng(seed)
    seconds = [(latency + size / 2 / bandwidth) * rng.lognormal(0, 0.05) for size in SIZES]
    seconds[:bad] = [value * 20 for value in seconds[:bad]]
    span = Span(num_ranks=2, num_nodes=1)
    return [
        LinkSample(collective=Collective.ALL_GATHER, span=span, message_bytes=size, seconds=value)
        for size, value in zip(SIZES, seconds, strict=True)
    ]


@pytest.mark.parametrize("bad", [0, 2])
def test_latency_and_bandwidth_come_back_from_noisy_calls(bad: int) -> None:
    (found,) = fit_links(line(latency=20e-6, bandwidth=100e9, bad=bad))
    assert found.latency_seconds == pytest.approx(20e-6, rel=0.15)
    assert found.bus_bytes_per_second == pytest.approx(100e9, rel=0.15)
    assert found.num_sizes == len(SIZES)
    # The noise is 5 %.
    assert 0.03 < found.residual_sd < 0.1


def test_of_two_sizes_no_line_is_made() -> None:
    assert fit_links(line(latency=1e-5, bandwidth=1e9)[:2]) == []


TRUE = StepTimeConstants(
    intra_node_share=0.3,
    inter_node_share=0.05,
    collective_seconds=80e-6,
    inter_node_collective_seconds=600e-6,
    node_congestion=0.3,
)


def measured(constants: StepTimeConstants, spans: list[Span] = SPANS) -> list[LinkSample]:
    """What a machine with such constants would measure, with 5 % noise."""
    rng = np.random.default_rng(0)
    found = []
    for span in spans:
        for collective, passes in PASSES.items():
            one = ring_seconds(
                num_ranks=np.full(len(SIZES), float(span.num_ranks)),
                num_nodes=np.full(len(SIZES), float(span.num_nodes)),
                num_bytes=np.array(SIZES, dtype=float),
                hardware=H100,
                constants=constants,
            )
            seconds = passes * one * rng.lognormal(0, 0.05, len(SIZES))
            found += [
                LinkSample(
                    collective=collective, span=span, message_bytes=size, seconds=float(value)
                )
                for size, value in zip(SIZES, seconds, strict=True)
            ]
    return found


def test_the_constants_of_links_come_back_from_collectives() -> None:
    network = network_of(measured(TRUE), H100)
    assert network is not None
    assert network.names == INSIDE + ACROSS
    for name in INSIDE + ACROSS:
        # Congestion shows as the difference between two and four nodes only.
        assert network.value(name) == pytest.approx(
            getattr(TRUE, name), rel=0.5 if name == "node_congestion" else 0.2
        ), name
    assert network.residual_sd < 0.1


def test_links_that_were_not_measured_are_left_as_they_are_believed() -> None:
    network = network_of(measured(TRUE, [Span(num_ranks=8, num_nodes=1)]), H100)
    assert network is not None
    informed = Calibration.prior().informed(network)
    assert informed.constants.intra_node_share == pytest.approx(0.3, rel=0.2)
    assert informed.constants.inter_node_share == pytest.approx(PRIORS["inter_node_share"].median)
    assert network_of([], H100) is None


def test_what_was_measured_is_believed_more_than_what_is_usual() -> None:
    network = network_of(measured(TRUE), H100)
    assert network is not None
    prior = Calibration.prior()
    before, after = np.diag(prior.step_covariance), np.diag(prior.informed(network).step_covariance)
    names = list(PRIORS)
    assert after[names.index("inter_node_share")] < 0.25 * before[names.index("inter_node_share")]
    assert after[names.index("peak_efficiency")] == before[names.index("peak_efficiency")]


def layout(**sizes: int) -> Layout:
    return Layout(micro_batch_size=1, **sizes)  # type: ignore[arg-type]  # names of sizes


def test_a_slow_network_changes_which_layout_is_predicted_fastest() -> None:
    """Llama 8B on 16 GPUs in two nodes.

    Data parallelism sends all gradients over the network, four pipeline stages only activations.
    """
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=4096, global_batch_size=64
    )
    choices = [
        layout(data_parallel_size=16, grad_accum_steps=4),
        layout(data_parallel_size=4, pipeline_parallel_size=4, grad_accum_steps=16),
    ]
    table = LayoutTable.of(choices)
    usual = StepTimeConstants()
    order = []
    for share in (usual.inter_node_share, usual.inter_node_share / 40):
        network = network_of(measured(replace(usual, inter_node_share=share)), H100)
        assert network is not None
        predicted = (
            Calibration.prior().informed(network).predict(table, cell, H100, gpus_per_node=8)
        )
        order.append(int(np.argmin(predicted.log_step_seconds)))
    assert order == [0, 1]


def test_a_line_of_two_passes_gives_the_latency_of_one() -> None:
    """Two samples of an all-reduce of 8 ranks: 2 passes, each log2(8) / 3 of the constant."""
    found = network_of(measured(TRUE, [Span(num_ranks=8, num_nodes=1)]), H100)
    assert found is not None
    assert found.value("collective_seconds") == pytest.approx(TRUE.collective_seconds, rel=0.05)


def test_the_fit_begins_with_the_smallest_ring_inside_a_node_and_with_that_between_nodes() -> None:
    """Four cards of a node send as fast as four times one."""
    spans = [Span(num_ranks=8, num_nodes=2), Span(num_ranks=4, num_nodes=1)]
    names = INSIDE + ACROSS[:2]
    alone = replace(TRUE, node_congestion=1e-9)
    guesses = _first_guess(names, measured(alone, spans), H100)
    assert np.exp(guesses) == pytest.approx([getattr(TRUE, name) for name in names], rel=0.2)


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_the_fit_begins_near_the_latency_whatever_the_size_of_the_smallest_ring(
    num_ranks: int,
) -> None:
    across = measured(TRUE, [Span(num_ranks=num_ranks, num_nodes=2)])
    guesses = dict(zip(ACROSS, np.exp(_first_guess(ACROSS, across, H100)), strict=True))
    assert guesses["inter_node_collective_seconds"] == pytest.approx(
        TRUE.inter_node_collective_seconds, rel=0.2
    )

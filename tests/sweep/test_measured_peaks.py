"""Which peak a trial's MFU rests on: one per node, whoever measured first, unless somebody was
faster than it allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from db.read.rows import PeakRow
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.fingerprint import Software, Stack
from orchestrator.core.trial.measurement import ImplausibleMeasurement, Measurement
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import MeasurementPlan, RankResult
from orchestrator.sweep.measured_peaks import MeasuredPeaks

MODEL = PRESETS["llama-tiny"]
SEQUENCE_LENGTH = 64
PLAN = MeasurementPlan(warmup_steps=2, min_steps=2, max_steps=8, relative_confidence=0.02)
# FLOPs of each of two ranks, with two sequences each.
FLOPS_PER_STEP = 2 * SEQUENCE_LENGTH * MODEL.flops_per_token(SEQUENCE_LENGTH)


def row(
    flops: float,
    *nodes: str,
    source: str = "measured: matmul, in trial 1",
    device_name: str | None = "a CPU",
    precision: str = "fp32",
) -> PeakRow:
    return PeakRow(
        nodes=nodes or ("a",),
        precision=Precision(precision),
        device_name=device_name,
        flops=flops,
        source=source,
    )


def reports(
    *flops: float | None,
    source: str = "measured: matmul, in trial 2",
    device_name: str | None = "a CPU",
) -> list[NodeReport]:
    """Reports of nodes a, b, ..., one rank on each, with the peaks that they report."""
    results = [
        RankResult(
            step_seconds=[1.0] * 6,
            peak_flops=value,
            peak_flops_source=source if value is not None else None,
            stack=Stack(device_name=device_name),
        )
        for value in flops
    ]
    return [
        NodeReport(node=node, ranks=[RankOutcome(rank=rank, exit_code=0, result=result)])
        for rank, (node, result) in enumerate(zip("ab", results, strict=False))
    ]


def measured(peaks: MeasuredPeaks, told: Sequence[NodeReport]) -> Measurement:
    layout = Layout(data_parallel_size=len(told), micro_batch_size=2, precision=Precision.FP32)
    return peaks.measure(
        told, model=MODEL, sequence_length=SEQUENCE_LENGTH, layout=layout, plan=PLAN
    )


def test_a_trial_is_told_the_peaks_of_its_precision_one_per_node_and_device() -> None:
    peaks = MeasuredPeaks(
        [
            row(2e9, "a", "b"),
            row(1e9, "b"),
            row(3e9, "a", device_name="another"),
            row(4e9, precision="bf16"),
        ],
        device_name=None,
    )
    told = {(peak.node, peak.device_name): peak.flops for peak in peaks.of(Precision.FP32)}
    assert told == {("a", "a CPU"): 2e9, ("b", "a CPU"): 2e9, ("a", "another"): 3e9}


def test_the_larger_of_two_measured_peaks_stands_and_a_data_sheet_s_is_none_to_tell() -> None:
    peaks = MeasuredPeaks([row(1e9)], device_name=None)
    peaks.add(row(2e9, source="measured: matmul, in trial 7"))
    peaks.add(row(1.5e9, source="measured: matmul, in trial 8"))
    peaks.add(row(9e12, source="table: h200 bf16 dense"))
    assert [(peak.flops, peak.source) for peak in peaks.of(Precision.FP32)] == [
        (2e9, "measured: matmul, in trial 7")
    ]


def test_what_was_measured_while_the_peak_became_known_rests_on_the_known_one() -> None:
    found = measured(
        MeasuredPeaks([row(4 * FLOPS_PER_STEP)], device_name=None), reports(2 * FLOPS_PER_STEP)
    )
    assert (found.mfu, found.peak_flops_source) == (
        pytest.approx(0.25),
        "measured: matmul, in trial 1",
    )


def test_a_rank_that_does_not_name_its_device_is_on_the_cluster_s() -> None:
    peaks = MeasuredPeaks([row(4 * FLOPS_PER_STEP)], device_name="a CPU")
    assert measured(peaks, reports(2 * FLOPS_PER_STEP, device_name=None)).mfu == pytest.approx(0.25)
    assert measured(peaks, reports(2 * FLOPS_PER_STEP, device_name="another")).mfu == pytest.approx(
        0.5
    )


@pytest.mark.parametrize("source", ["table: h200 fp32 dense", None])
def test_a_peak_that_is_not_measured_or_not_known_is_left_as_it_is(source: str | None) -> None:
    flops = 2 * FLOPS_PER_STEP if source else None
    found = measured(
        MeasuredPeaks([row(4 * FLOPS_PER_STEP)], device_name=None),
        reports(flops, source=source or ""),
    )
    assert (found.peak_flops, found.peak_flops_source) == (flops, source)


def test_the_slowest_node_of_a_gang_counts() -> None:
    found = measured(
        MeasuredPeaks([row(4 * FLOPS_PER_STEP)], device_name=None),
        reports(9 * FLOPS_PER_STEP, 2 * FLOPS_PER_STEP),
    )
    assert (found.mfu, found.peak_flops_source) == (
        pytest.approx(0.5),
        "measured: matmul, in trial 2",
    )


def test_a_trial_faster_than_the_known_peak_rests_on_its_own_or_is_refused() -> None:
    peaks = MeasuredPeaks([row(0.9 * FLOPS_PER_STEP)], device_name=None)
    assert measured(peaks, reports(1.25 * FLOPS_PER_STEP)).mfu == pytest.approx(0.8)
    with pytest.raises(ImplausibleMeasurement, match="in trial 2"):
        measured(peaks, reports(0.95 * FLOPS_PER_STEP))


H100 = "NVIDIA H100 80GB HBM3"


def test_a_users_program_that_tells_no_peak_has_that_of_its_devices_data_sheet() -> None:
    def found(*, launcher: str | None, program: str | None = None) -> tuple[float | None, ...]:
        told = [
            replace(report, software=Software(stack=Stack(device_name=launcher)))
            for report in reports(None, device_name=program)
        ]
        layout = Layout(data_parallel_size=1, micro_batch_size=2, precision=Precision.BF16)
        measurement = MeasuredPeaks([], device_name=H100).measure(
            told, model=MODEL, sequence_length=SEQUENCE_LENGTH, layout=layout, plan=PLAN
        )
        assert (measurement.mfu is None) is (measurement.peak_flops is None)
        return measurement.peak_flops, measurement.peak_flops_source

    assert found(launcher=H100) == (989e12, "table: h100-sxm bf16 dense")
    assert found(launcher=H100, program="NVIDIA B200") == (2250e12, "table: b200 bf16 dense")
    assert found(launcher="Some CPU") == (None, None)
    # Workloads of this program tell their own.
    assert found(launcher=None) == (None, None)


def test_a_peak_that_the_program_tells_counts_more_than_the_data_sheet() -> None:
    told = [
        replace(report, software=Software(stack=Stack(device_name=H100)))
        for report in reports(5e12, source="mine", device_name=None)
    ]
    assert measured(MeasuredPeaks([], device_name=None), told).peak_flops_source == "mine"

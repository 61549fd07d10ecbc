"""The values that `auto` stands for."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.search.axis_values import AxisValues, axis_values, unsplit_batch
from orchestrator.core.sweepfile.spec import SweepSpec

FILE = {"name": "t", "gpus": 12, "sequence_length": 64, "global_batch_size": 24}


def values(model: str, **axes: Any) -> AxisValues:
    spec = SweepSpec.model_validate({**FILE, "model": model, "axes": axes})
    return axis_values(spec, spec.cells()[0])


@pytest.mark.parametrize(
    ("model", "quarters"), [("llama-tiny", (1, 2, 3)), ("llama-3.1-8b", (8, 16, 24))]
)
def test_recomputation_is_tried_for_quarters_of_the_layers(
    model: str, quarters: tuple[int, ...]
) -> None:
    found = values(model, recompute="auto").recompute
    assert [str(one) for one in found] == [
        "none",
        "selective_attention",
        "selective_ops",
        *(f"full:{num}" for num in quarters),
        "full",
    ]


def test_sizes_are_divisors_of_the_gpus_or_of_the_batch() -> None:
    sizes = dict.fromkeys(
        ("data_parallel_size", "tensor_parallel_size", "micro_batch_size"), "auto"
    )
    found = values("llama-3.1-8b", **sizes)
    assert found.tensor_parallel_size.tolist() == [1, 2, 3, 4, 6, 12]
    assert found.data_parallel_size.tolist() == [1, 2, 3, 4, 6, 12]
    assert found.micro_batch_size.tolist() == [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.mark.parametrize(("pipeline", "has_plain"), [([1, 2], True), ([2], False)])
def test_a_layout_without_a_pipeline_has_its_schedule_in_any_case(
    pipeline: list[int], *, has_plain: bool
) -> None:
    found = values("llama-3.1-8b", pipeline_parallel_size=pipeline, pipeline_schedule="gpipe")
    assert [str(one) for one in found.pipeline_schedule] == ["gpipe", "1f1b"][: 1 + has_plain]


def test_a_batch_that_no_number_of_replicas_divides_is_told() -> None:
    batch = {**FILE, "global_batch_size": 10, "model": "llama-3.1-8b"}
    spec = SweepSpec.model_validate({**batch, "axes": {"tensor_parallel_size": [1, 3]}})
    assert unsplit_batch(spec, spec.cells()[0]) == (
        "a global batch of 10 cannot be split over 4 or 12 replicas (gpus: 12): data_parallel_size"
        " has to divide it"
    )
    split = SweepSpec.model_validate({**batch, "axes": {"tensor_parallel_size": [1, 6]}})
    assert unsplit_batch(split, split.cells()[0]) is None


def test_the_replicas_are_what_tensor_pipeline_and_context_ranks_leave() -> None:
    """Twelve GPUs over a pipeline of two and two that share a sequence: three."""
    axes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "context_parallel_size": 2}
    spec = SweepSpec.model_validate(
        {**FILE, "global_batch_size": 16, "model": "llama-3.1-8b", "axes": axes}
    )
    assert "over 3 replicas" in (unsplit_batch(spec, spec.cells()[0]) or "")

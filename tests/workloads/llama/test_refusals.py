"""Layouts that llama cannot run: neither proposed by a search, nor begun by a rank."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.search.space import enumerate_cell
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from workloads.llama.refusals import check
from workloads.rank import ConfigRejected

# 4 layers, 4 heads of 32, 2 key-value heads, ffn 384, vocabulary 2048.
MODEL = {"preset": "llama-tiny"}
INTERLEAVED = PipelineSchedule.parse("interleaved:2")
DP, TP, PP, CP = (f"{name}_parallel_size" for name in ("data", "tensor", "pipeline", "context"))
Changes = dict[str, Any]

REFUSED: list[tuple[str, Changes, Changes, Changes]] = [
    # Words of the message, the layout, the model, the rest of the sweep.
    ("does not divide num_attention_heads 4", {TP: 8}, {}, {}),
    ("does not divide num_key_value_heads 2", {TP: 4}, {}, {}),
    ("does not divide ffn_hidden_size 383", {TP: 2}, {"ffn_hidden_size": 383}, {}),
    ("does not divide vocab_size 1023", {TP: 2}, {"vocab_size": 1023}, {}),
    ("does not divide sequence_length 33", {TP: 2}, {}, {"sequence_length": 33}),
    ("2 x context_parallel_size does not", {CP: 2}, {}, {"sequence_length": 66}),
    (
        "does not divide sequence_length 68",
        {CP: 2, TP: 4},
        {"num_key_value_heads": 4},
        {},
    ),
    ("pipeline_parallel_size is more than 4", {PP: 8, "grad_accum_steps": 8}, {}, {}),
    (
        "pipeline_schedule is more than 4, the layers",
        {PP: 4, "grad_accum_steps": 8, "pipeline_schedule": INTERLEAVED},
        {},
        {},
    ),
    (
        "1 with tied_embeddings",
        {PP: 2, "grad_accum_steps": 2},
        {"tied_embeddings": True},
        {},
    ),
    ("grad_accum_steps is less than pipeline_parallel_size", {PP: 2}, {}, {}),
    (
        "pipeline_parallel_size does not divide grad_accum_steps",
        {PP: 2, "grad_accum_steps": 3, "pipeline_schedule": INTERLEAVED},
        {},
        {},
    ),
    ("zero_stage is 3", {DP: 2, PP: 2, "grad_accum_steps": 2, "zero_stage": 3}, {}, {}),
    ("replicas is above 1 with zero_stage 0", {DP: 2}, {}, {"options": {"replicas": 2}}),
    (
        "replicas does not divide data_parallel_size",
        {DP: 2, "zero_stage": 1},
        {},
        {"options": {"replicas": 3}},
    ),
    (
        "replicas leaves one rank",
        {DP: 2, "zero_stage": 1},
        {},
        {"options": {"replicas": 2}},
    ),
    (
        "accumulate is last with zero_stage above 1",
        {DP: 2, "zero_stage": 2, "grad_accum_steps": 2},
        {},
        {"options": {"accumulate": "last"}},
    ),
    (
        "precision is fp8",
        {"precision": Precision.FP8},
        {"ffn_hidden_size": 376},
        {},
    ),
    ("precision is fp8", {TP: 2, "precision": Precision.FP8}, {"ffn_hidden_size": 400}, {}),
]


@pytest.mark.parametrize(("words", "axes", "sizes", "rest"), REFUSED)
def test_a_layout_is_refused_by_its_field_before_a_process_starts(
    words: str, axes: Changes, sizes: Changes, rest: Changes
) -> None:
    layout = Layout(**{"precision": Precision.BF16, **axes})
    spec = sweep(layout, {**MODEL, **sizes}, **rest)
    (cell,) = spec.cells()
    with pytest.raises(ConfigRejected, match=words):
        check(request(layout, spec))
    space = enumerate_cell(spec, cell, gpus_per_node=16)
    assert len(space.legal) == 0
    assert words in (space.reason(layout) or "")


def test_what_the_refused_layouts_are_changed_from_is_legal() -> None:
    spec = sweep(Layout(), MODEL)
    assert check(request(Layout(), spec)) is not None
    space = enumerate_cell(spec, spec.cells()[0], gpus_per_node=16)
    assert space.legal.layouts() == [Layout()]


def test_two_ways_to_accumulate_are_one_where_they_do_the_same() -> None:
    spec = SweepSpec.model_validate(
        {
            "name": "x",
            "model": "llama-tiny",
            "gpus": 2,
            "sequence_length": 64,
            "global_batch_size": 4,
            "workload": "llama",
            "axes": {
                "zero_stage": [0, 1],
                "micro_batch_size": 1,
                "recompute": "none",
                "options": {"accumulate": ["scatter", "last"]},
            },
        }
    )
    legal = enumerate_cell(spec, spec.cells()[0], gpus_per_node=8).legal.layouts()
    assert {(layout.zero_stage, dict(layout.options)["accumulate"]) for layout in legal} == {
        (0, "scatter"),
        (1, "scatter"),
        (1, "last"),
    }


def sweep(
    layout: Layout,
    model: Changes,
    *,
    sequence_length: int = 68,
    options: Changes | None = None,
) -> SweepSpec:
    """A sweep whose only layout is this one."""
    axes = {
        name: getattr(layout, name)
        for name in (DP, TP, PP, CP, "micro_batch_size", "grad_accum_steps", "zero_stage")
    }
    return SweepSpec.model_validate(
        {
            "name": "x",
            "model": model,
            "gpus": layout.world_size,
            "sequence_length": sequence_length,
            "global_batch_size": layout.global_batch_size,
            "precision": layout.precision,
            "tensor_parallel_across_nodes": True,
            "workload": {"name": "llama", "options": options or {}},
            "axes": {
                **axes,
                "recompute": "none",
                "pipeline_schedule": str(layout.pipeline_schedule),
            },
        }
    )


def request(layout: Layout, spec: SweepSpec) -> TrialRequest:
    return TrialRequest(
        sweep="x",
        trial_id=1,
        attempt=1,
        workload="llama",
        options=spec.workload.options.as_written(),
        model=spec.model[0],
        sequence_length=spec.sequence_length[0],
        layout=layout,
        device=Device.CUDA,
        measurement=MeasurementPlan(
            warmup_steps=2, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
        ),
        seed=1,
    )

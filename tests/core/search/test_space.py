from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import TABLES, translate
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule, ScheduleKind
from orchestrator.core.search import axis_values as axis_values_module
from orchestrator.core.search import legality, space
from orchestrator.core.search.axis_values import axis_values, unsplit_batch
from orchestrator.core.search.legality import GLOBAL_BATCH, WORLD_SIZE
from orchestrator.core.search.space import (
    CellSpace,
    CellSpaces,
    SpaceTooLarge,
    broken_rule,
    enumerate_cell,
)
from orchestrator.core.sweepfile.capabilities import Capabilities
from orchestrator.core.sweepfile.spec import SweepSpec
from tests.examples import examples


def sweep(**changes: Any) -> SweepSpec:
    """A sweep of one cell: the 8B model on 8 GPUs, simulated."""
    data = {
        "name": "x",
        "model": "llama-3.1-8b",
        "gpus": 8,
        "sequence_length": 4096,
        "global_batch_size": 64,
        "workload": "synthetic",
    }
    return SweepSpec.model_validate({**data, **changes})


def enumerated(gpus_per_node: int = 8, **changes: Any) -> CellSpace:
    spec = sweep(**changes)
    return enumerate_cell(spec, spec.cells()[0], gpus_per_node=gpus_per_node)


def layouts(cell_space: CellSpace) -> list[Layout]:
    return [cell_space.legal.layout(row) for row in range(len(cell_space.legal))]


def only_reason(gpus_per_node: int = 8, **changes: Any) -> str:
    """The one reason besides the products."""
    reasons = set(enumerated(gpus_per_node, **changes).rejected) - {WORLD_SIZE, GLOBAL_BATCH}
    assert len(reasons) == 1, reasons
    return reasons.pop()


EVERYTHING = {
    "tensor_parallel_size": "auto",
    "pipeline_parallel_size": "auto",
    "context_parallel_size": "auto",
    "recompute": ["none", "full", "full:8", "full:32", "full:40", "selective"],
    "zero_stage": "auto",
}


@pytest.mark.parametrize("framework", Framework)
def test_the_layouts_of_a_framework_are_exactly_those_that_it_can_express(
    framework: Framework,
) -> None:
    name = "{framework_arguments}" if TABLES[framework].file is None else "{framework_file}"
    options = {"argv": ["program", name], "framework": framework}
    axes = {**EVERYTHING, "micro_batch_size": [1, 2]}
    precision = list(Precision)
    every = enumerated(
        workload={"name": "command", "options": {"argv": ["program"]}},
        axes=axes,
        precision=precision,
    )
    found = enumerated(
        workload={"name": "command", "options": options}, axes=axes, precision=precision
    )

    def is_possible(layout: Layout) -> bool:
        job = Job(cell=every.cell, layout=layout, gpus_per_node=8)
        return not translate(job, framework).impossible

    assert set(layouts(found)) == {it for it in layouts(every) if is_possible(it)}
    assert len(found.legal) + sum(found.rejected.values()) == found.num_combinations
    assert len(found.legal) > 0


def test_auto_is_every_divisor_of_the_gpus_and_of_the_batch() -> None:
    spec = sweep(gpus=12, axes={**EVERYTHING, "recompute": "auto"})
    values = axis_values(spec, spec.cells()[0])
    assert list(values.data_parallel_size) == [1, 2, 3, 4, 6, 12]
    assert list(values.micro_batch_size) == [1, 2, 4, 8, 16, 32, 64]
    assert values.zero_stage == (0, 1, 2, 3)
    assert list(map(str, values.recompute)) == [
        "none",
        "selective_attention",
        "selective_ops",
        "full:8",
        "full:16",
        "full:24",
        "full",
    ]


def test_every_legal_layout_uses_the_gpus_and_the_batch_exactly() -> None:
    cell_space = enumerated(axes=EVERYTHING, precision=["bf16", "fp8"])
    table = cell_space.legal
    assert len(table) > 1000
    assert (table.world_size == 8).all()
    assert (table.data_parallel_size * table.micro_batch_size * table.grad_accum_steps == 64).all()
    assert len({layout.key for layout in layouts(cell_space)}) == len(table)


def test_every_layout_of_the_lattice_is_legal_or_counted_under_a_reason() -> None:
    cell_space = enumerated(
        axes=EVERYTHING, constraints=["tp <= 4", "8 // (pp - 1) > 0 or pp == 1"]
    )
    sizes = cell_space.values.sizes
    assert cell_space.num_combinations == np.prod(list(sizes.values()))
    assert len(cell_space.legal) + sum(cell_space.rejected.values()) == cell_space.num_combinations
    assert all(count > 0 for count in cell_space.rejected.values())


VARYING = {
    "workload": "synthetic",
    "axes": {
        "micro_batch_size": [1, 2],
        "options": {"time_scale": [1, 2, 3], "sleep": [False, True]},
    },
}


def test_options_that_vary_multiply_the_lattice_and_stand_in_every_layout() -> None:
    plain = enumerated(workload="synthetic", axes={"micro_batch_size": [1, 2]})
    cell_space = enumerated(**VARYING)
    assert cell_space.num_combinations == 6 * plain.num_combinations
    assert (
        len({layout.key for layout in layouts(cell_space)})
        == len(cell_space.legal)
        == 6 * len(plain.legal)
    )
    found = {layout.options for layout in layouts(cell_space)}
    assert found == {
        (("sleep", sleep), ("time_scale", scale)) for sleep in (False, True) for scale in (1, 2, 3)
    }


def test_a_constraint_may_name_options_that_vary_and_is_counted() -> None:
    cell_space = enumerated(**VARYING, constraints=["not sleep or time_scale == 1"])
    # 2 of 6, where 4 of 6 are left.
    assert (
        cell_space.rejected["constraint: not sleep or time_scale == 1"]
        == len(cell_space.legal) // 2
    )
    assert len(cell_space.legal) + sum(cell_space.rejected.values()) == cell_space.num_combinations
    one = next(layout for layout in layouts(cell_space) if ("sleep", True) in layout.options)
    assert cell_space.reason(one) is None
    assert (
        cell_space.reason(replace(one, options=(("sleep", True), ("time_scale", 2))))
        == "constraint: not sleep or time_scale == 1"
    )
    said = cell_space.reason(replace(one, options=()))
    assert said is not None and said.startswith(
        "options none is not among the axes' values: sleep=false time_scale=1"
    )


def test_the_batch_is_never_rounded() -> None:
    cell_space = enumerated(global_batch_size=60, axes={"micro_batch_size": [1, 2, 4, 8]})
    # 60 / 8 is no whole number.
    assert len(cell_space.legal) == 0
    assert cell_space.rejected[GLOBAL_BATCH] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 64, "global_batch_size": 8}, "a global batch of 8 cannot be split over 64 rep"),
        # Each replica has two or four GPUs.
        (
            {"gpus": 64, "global_batch_size": 8, "axes": {"tensor_parallel_size": [2, 4]}},
            "cannot be split over 16 or 32 replicas",
        ),
        ({"gpus": 64, "global_batch_size": 8, "axes": {"tensor_parallel_size": [1, 8]}}, None),
        ({"gpus": 64}, None),
        ({"gpus": 64, "axes": {"data_parallel_size": [3]}}, None),  # it is not about the batch
    ],
)
def test_a_batch_that_no_number_of_replicas_divides_is_named(
    changes: dict[str, Any], said: str | None
) -> None:
    spec = sweep(**changes)
    found = unsplit_batch(spec, spec.cells()[0])
    assert found == said if said is None else said in (found or "")


def test_lists_of_sizes_are_kept_to() -> None:
    cell_space = enumerated(
        axes={
            "data_parallel_size": [4, 8],
            "tensor_parallel_size": [1, 2],
            "micro_batch_size": [1, 3, 4],
            "grad_accum_steps": [2, 4, 8],
        }
    )
    found = {
        (x.data_parallel_size, x.tensor_parallel_size, x.micro_batch_size, x.grad_accum_steps)
        for x in layouts(cell_space)
    }
    # Dp x mbs x ga = 64.
    assert found == {(8, 1, 1, 8), (8, 1, 4, 2), (4, 2, 4, 4)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"gpus": 64, "axes": {"tensor_parallel_size": 16}},
            "tensor_parallel_size is more than 8, the GPUs of a node"
            " (tensor_parallel_across_nodes allows it)",
        ),
        (
            {
                "model": "llama-3.2-3b",
                "gpus": 16,
                "tensor_parallel_across_nodes": True,
                "axes": {"tensor_parallel_size": 16},
            },
            "tensor_parallel_size does not divide num_attention_heads 24",
        ),
        (
            {
                "gpus": 16,
                "tensor_parallel_across_nodes": True,
                "axes": {"tensor_parallel_size": 16},
            },
            "tensor_parallel_size does not divide num_key_value_heads 8",
        ),
        (
            {
                "model": "llama-tiny",
                "gpus": 2,
                "axes": {"tensor_parallel_size": 2},
                "constraints": ["tp == 1"],
            },
            "constraint: tp == 1",
        ),
        (
            {
                "model": {"preset": "llama-tiny", "ffn_hidden_size": 383},
                "gpus": 2,
                "axes": {"tensor_parallel_size": 2},
            },
            "tensor_parallel_size does not divide ffn_hidden_size 383",
        ),
        (
            {"model": "llama-tiny", "axes": {"pipeline_parallel_size": 8}},
            "pipeline_parallel_size is more than 4, the layers of the model",
        ),
        (
            {"axes": {"pipeline_parallel_size": 8, "grad_accum_steps": [4]}},
            "grad_accum_steps is less than pipeline_parallel_size - 1: the pipeline never fills",
        ),
        (
            {"sequence_length": 4100, "axes": {"context_parallel_size": 8}},
            "2 x context_parallel_size does not divide sequence_length 4100",
        ),
        (
            {"axes": {"recompute": ["none", "full:33"]}},
            "recomputes more than the model's 32 layers",
        ),
        (
            {"axes": {"recompute": ["full", "full:32"]}},
            "same as recomputing all layers: the model has 32",
        ),
        (
            {"gpus": 1, "axes": {"zero_stage": [0, 1]}},
            "same as zero_stage 0: the optimizer states of one rank cannot be sharded",
        ),
        (
            {"device": "a100-80gb", "precision": ["bf16", "fp8"]},
            "precision is none that device a100-80gb has",
        ),
        (
            {"axes": {"pipeline_schedule": ["1f1b", "gpipe"]}},
            "same as pipeline_schedule 1f1b: a pipeline of one stage",
        ),
        (
            {
                "model": "llama-tiny",
                "axes": {
                    "pipeline_parallel_size": 4,
                    "pipeline_schedule": "interleaved:2",
                    "grad_accum_steps": [8],
                },
            },
            "pipeline_parallel_size x stages per rank of pipeline_schedule is more than 4,"
            " the layers of the model",
        ),
        ({"gpus": 12}, "12 GPUs are not whole nodes of 8"),
        ({"constraints": [{"require": "mbs > 1", "because": "too slow"}]}, "too slow"),
        ({"constraints": ["8 // (pp - 1) > 0"]}, "constraint divides by zero: 8 // (pp - 1) > 0"),
    ],
)
def test_an_illegal_layout_is_counted_under_its_rule(changes: dict[str, Any], reason: str) -> None:
    assert only_reason(**changes) == reason


LIMITED = Capabilities(
    zero_stages=frozenset({0, 1}),
    precisions=frozenset({Precision.FP32, Precision.BF16}),
    pipeline_schedules=frozenset({ScheduleKind.ONE_F_ONE_B}),
    max_tensor_parallel_size=1,
    max_pipeline_parallel_size=1,
    max_context_parallel_size=1,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"axes": {"zero_stage": [0, 3]}},
            "zero_stage is none that workload synthetic can do (0, 1)",
        ),
        (
            {"precision": ["bf16", "fp8"]},
            "precision is none that workload synthetic can do (bf16, fp32)",
        ),
        (
            {"axes": {"tensor_parallel_size": 2}},
            "tensor_parallel_size is more than 1, the most that workload synthetic can do",
        ),
        (
            {"axes": {"pipeline_parallel_size": 2, "grad_accum_steps": [2]}},
            "pipeline_parallel_size is more than 1, the most that workload synthetic can do",
        ),
        (
            {"axes": {"context_parallel_size": 2}},
            "context_parallel_size is more than 1, the most that workload synthetic can do",
        ),
        (
            {"axes": {"pipeline_schedule": ["1f1b", "gpipe"]}},
            "pipeline_schedule is none that workload synthetic can do (1f1b)",
        ),
    ],
)
def test_a_layout_that_its_workload_cannot_run_is_counted_under_the_ability_that_is_missing(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (legality, axis_values_module):
        monkeypatch.setattr(module, "CAPABILITIES", {"synthetic": LIMITED})
    assert only_reason(**changes) == reason


def test_tensor_parallelism_may_cross_nodes_where_the_sweep_says_so() -> None:
    changes = {"model": "llama-2-7b", "gpus": 16, "axes": {"tensor_parallel_size": 16}}
    assert len(enumerated(**changes).legal) == 0
    assert len(enumerated(tensor_parallel_across_nodes=True, **changes).legal) > 0


def test_stages_of_unequal_depth_are_legal() -> None:
    cell_space = enumerated(
        model="llama-3.2-3b", gpus=8, axes={"pipeline_parallel_size": 8, "grad_accum_steps": [16]}
    )
    assert len(cell_space.legal) > 0  # 28 layers over 8 stages


def test_the_shortest_pipeline_feed_is_one_less_than_the_stages() -> None:
    cell_space = enumerated(
        global_batch_size=42, axes={"pipeline_parallel_size": 8, "micro_batch_size": [1, 6, 7]}
    )
    # 7 = 8 - 1 is enough, 6 is not.
    assert {x.grad_accum_steps for x in layouts(cell_space)} == {
        7,
        42,
    }


def test_a_duplicate_is_kept_where_its_twin_is_not_asked_for() -> None:
    assert {
        str(x.recompute) for x in layouts(enumerated(axes={"recompute": ["none", "full:32"]}))
    } == {"none", "full:32"}
    assert {x.zero_stage for x in layouts(enumerated(gpus=1, axes={"zero_stage": [2, 3]}))} == {2}


def test_layouts_without_a_pipeline_have_one_schedule_whatever_is_asked() -> None:
    cell_space = enumerated(
        axes={"pipeline_parallel_size": [1, 2], "pipeline_schedule": ["gpipe", "interleaved:2"]}
    )
    assert {(x.pipeline_parallel_size, str(x.pipeline_schedule)) for x in layouts(cell_space)} == {
        (1, "1f1b"),
        (2, "gpipe"),
        (2, "interleaved:2"),
    }
    assert len({layout.key for layout in layouts(cell_space)}) == len(cell_space.legal)


def test_auto_is_one_schedule_of_each_kind() -> None:
    cell_space = enumerated(axes={"pipeline_parallel_size": 2, "pipeline_schedule": "auto"})
    assert {str(x.pipeline_schedule) for x in layouts(cell_space)} == {
        "gpipe",
        "1f1b",
        "interleaved:2",
    }


@pytest.mark.parametrize(("replicas", "context", "tensor"), [(1, 8, 1), (2, 2, 2), (8, 1, 1)])
def test_zero_over_several_ranks_is_no_duplicate(replicas: int, context: int, tensor: int) -> None:
    cell_space = enumerated(
        axes={
            "data_parallel_size": replicas,
            "context_parallel_size": context,
            "tensor_parallel_size": tensor,
            "zero_stage": [0, 1],
        }
    )
    assert {x.zero_stage for x in layouts(cell_space)} == {0, 1}


def test_a_single_node_may_be_used_in_part() -> None:
    assert len(enumerated(gpus=3, global_batch_size=63).legal) > 0
    assert len(enumerated(gpus=24, global_batch_size=48).legal) > 0


def test_the_reason_of_one_layout_is_the_rule_that_it_breaks() -> None:
    cell_space = enumerated(axes=EVERYTHING, constraints=["tp <= 4"])
    good = Layout(
        data_parallel_size=4, tensor_parallel_size=2, micro_batch_size=2, grad_accum_steps=8
    )
    assert cell_space.reason(good) is None
    assert (
        cell_space.reason(Layout(data_parallel_size=4, micro_batch_size=2, grad_accum_steps=8))
        == WORLD_SIZE
    )
    assert (
        cell_space.reason(Layout(data_parallel_size=8, micro_batch_size=2, grad_accum_steps=8))
        == GLOBAL_BATCH
    )
    assert (
        cell_space.reason(Layout(tensor_parallel_size=8, micro_batch_size=8, grad_accum_steps=8))
        == "constraint: tp <= 4"
    )
    assert (
        cell_space.reason(Layout(data_parallel_size=8, micro_batch_size=3, grad_accum_steps=8))
        == "micro_batch_size 3 is not among the axes' values: 1, 2, 4, 8, 16, 32, 64"
    )
    assert (
        cell_space.reason(
            Layout(data_parallel_size=8, grad_accum_steps=8, precision=Precision.FP16)
        )
        == "precision fp16 is not among the axes' values: bf16"
    )


# --- against a reference that builds the whole lattice, one layout at a time ---

sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3, unique=True)
specs = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            [
                "llama-tiny",
                "llama-60m",
                {"preset": "llama-tiny", "num_key_value_heads": 4, "name": "mha"},
            ]
        ),
        "gpus": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
        "global_batch_size": st.sampled_from([1, 6, 8, 12, 16]),
        "sequence_length": st.sampled_from([6, 16, 64]),
        "workload": st.sampled_from(["synthetic", "llama"]),
        "precision": st.sampled_from([["bf16"], ["fp32", "fp8"]]),
        "tensor_parallel_across_nodes": st.booleans(),
        "device": st.sampled_from(["auto", "a100-80gb"]),
        "constraints": st.lists(
            st.sampled_from(
                [
                    "tp <= 2",
                    "mbs * dp < 9",
                    "not pp > 1 or zero_stage < 2",
                    "4 // (cp - 1) > 1",
                    "recompute != 'full'",
                ]
            ),
            max_size=2,
        ),
        "axes": st.fixed_dictionaries(
            {
                "data_parallel_size": st.one_of(sizes, st.just("auto")),
                "tensor_parallel_size": st.one_of(sizes, st.just("auto")),
                "pipeline_parallel_size": sizes,
                "context_parallel_size": sizes,
                "micro_batch_size": st.one_of(sizes, st.just("auto")),
                "grad_accum_steps": st.one_of(sizes, st.just("auto")),
                "recompute": st.lists(
                    st.sampled_from(["none", "full", "full:4", "full:5", "selective:2"]),
                    min_size=1,
                    max_size=3,
                    unique=True,
                ),
                "pipeline_schedule": st.lists(
                    st.sampled_from(["gpipe", "1f1b", "interleaved:2"]),
                    min_size=1,
                    max_size=3,
                    unique=True,
                ),
                "zero_stage": st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True),
            }
        ),
    }
)


def llama_can(x: Layout, cell: Cell) -> bool:
    """What workload llama asks for, once more in plain words."""
    tp, pp, cp = x.tensor_parallel_size, x.pipeline_parallel_size, x.context_parallel_size
    model, is_interleaved = cell.model, x.pipeline_schedule.virtual_stages > 1
    widths = (model.hidden_size, model.kv_size, model.ffn_hidden_size)
    return all(
        [
            model.vocab_size % tp == 0,
            tp == 1 or cell.sequence_length % (tp * cp) == 0,
            pp == 1 or not model.tied_embeddings,
            str(x.pipeline_schedule) != "1f1b" or x.grad_accum_steps >= pp,
            not is_interleaved or x.grad_accum_steps % pp == 0,
            pp == 1 or x.zero_stage < 3,
            x.precision != "fp8" or all(width // tp % 16 == 0 for width in widths),
        ]
    )


def legal_by_hand(x: Layout, spec: SweepSpec, cell: Cell, gpus_per_node: int) -> bool:
    """The rules once more, in plain words and integers."""
    model, dp, tp, pp, cp = (
        cell.model,
        x.data_parallel_size,
        x.tensor_parallel_size,
        x.pipeline_parallel_size,
        x.context_parallel_size,
    )
    llama = spec.workload.name == "llama"
    named = {"tp": tp, "mbs": x.micro_batch_size, "dp": dp}
    by_hand = {
        "tp <= 2": named["tp"] <= 2,
        "mbs * dp < 9": named["mbs"] * named["dp"] < 9,
        "not pp > 1 or zero_stage < 2": pp == 1 or x.zero_stage < 2,
        "4 // (cp - 1) > 1": cp != 1 and 4 // (cp - 1) > 1,
        "recompute != 'full'": x.recompute.mode != "full",
    }
    return all(
        [
            dp * tp * pp * cp == cell.num_gpus,
            dp * x.micro_batch_size * x.grad_accum_steps == cell.global_batch_size,
            cell.num_gpus <= gpus_per_node or cell.num_gpus % gpus_per_node == 0,
            tp <= gpus_per_node or spec.tensor_parallel_across_nodes,
            model.num_attention_heads % tp == 0
            and model.num_key_value_heads % tp == 0
            and model.ffn_hidden_size % tp == 0,
            pp * x.pipeline_schedule.virtual_stages <= model.num_layers,
            str(x.pipeline_schedule) == "1f1b"
            if pp == 1
            else x.pipeline_schedule in spec.axes.pipeline_schedule,
            pp <= model.num_layers and x.grad_accum_steps >= pp - 1,
            cp == 1 or cell.sequence_length % (2 * cp) == 0,
            (x.recompute.num_layers or 0) <= model.num_layers,
            x.recompute.num_layers != model.num_layers
            or Recompute(mode=x.recompute.mode, policy=x.recompute.policy)
            not in spec.axes.recompute,
            dp * cp > 1 or x.zero_stage == min(spec.axes.zero_stage),
            not llama or llama_can(x, cell),
            spec.device == "auto" or x.precision != "fp8",
            all(by_hand[constraint.require] for constraint in spec.constraints),
        ]
    )


@given(data=specs, gpus_per_node=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=examples(60))
def test_the_legal_layouts_are_those_that_a_plain_reference_finds(
    data: dict[str, Any], gpus_per_node: int
) -> None:
    spec = sweep(**data)
    cell = spec.cells()[0]
    cell_space = enumerate_cell(spec, cell, gpus_per_node=gpus_per_node)
    values = cell_space.values
    lattice = [
        Layout(
            data_parallel_size=int(dp),
            tensor_parallel_size=int(tp),
            pipeline_parallel_size=int(pp),
            context_parallel_size=int(cp),
            micro_batch_size=int(mbs),
            grad_accum_steps=int(ga),
            pipeline_schedule=schedule,
            recompute=recompute,
            zero_stage=stage,
            precision=precision,
        )
        for dp, tp, pp, cp, mbs, ga, stage, schedule, recompute, precision in product(
            values.data_parallel_size,
            values.tensor_parallel_size,
            values.pipeline_parallel_size,
            values.context_parallel_size,
            values.micro_batch_size,
            values.grad_accum_steps,
            values.zero_stage,
            values.pipeline_schedule,
            values.recompute,
            values.precision,
        )
    ]
    expected = {x.key for x in lattice if legal_by_hand(x, spec, cell, gpus_per_node)}
    assert len(lattice) == cell_space.num_combinations
    assert {x.key for x in layouts(cell_space)} == expected
    assert len(cell_space.legal) == len(expected)
    assert len(expected) + sum(cell_space.rejected.values()) == cell_space.num_combinations
    # One layout asked alone gets the reason under which the whole lattice counted it.
    step = max(1, len(lattice) // 50)
    some = lattice[::step]
    assert all((cell_space.reason(x) is None) == (x.key in expected) for x in some)
    if step == 1:
        assert Counter(reason for x in lattice if (reason := cell_space.reason(x))) == Counter(
            cell_space.rejected
        )


# --- size ---


def test_a_lattice_of_billions_is_counted_without_being_built() -> None:
    many = list(range(1, 200))
    cell_space = enumerated(
        axes={
            **EVERYTHING,
            "data_parallel_size": many,
            "tensor_parallel_size": many,
            "pipeline_parallel_size": many,
            "micro_batch_size": many,
            "grad_accum_steps": many,
        }
    )
    assert cell_space.num_combinations > 10**12
    assert len(cell_space.legal) + sum(cell_space.rejected.values()) == cell_space.num_combinations


def test_more_layouts_than_can_be_searched_are_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space, "MAX_LAYOUTS", 100)
    with pytest.raises(SpaceTooLarge) as caught:
        enumerated(axes=EVERYTHING)
    assert "more than 100 legal layouts" in str(caught.value)
    assert "Narrow the widest axes, micro_batch_size (7 values)" in str(caught.value)
    assert caught.value.exit_code == 2
    spec = sweep(axes=EVERYTHING)
    assert len(enumerate_cell(spec, spec.cells()[0], gpus_per_node=8, unlimited=True).legal) > 100


def test_candidates_beyond_reason_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space, "MAX_CANDIDATES", 100)
    with pytest.raises(SpaceTooLarge, match="layouts with exact products"):
        enumerated(axes=EVERYTHING, constraints=["tp > 8"])


@pytest.mark.parametrize(
    ("axes", "widest"),
    [
        ({}, "micro_batch_size (2 values), grad_accum_steps (2 values)"),
        (
            {"zero_stage": [0, 1, 2], "recompute": ["none", "full"]},
            "zero_stage (3 values), micro_batch_size (2 values), grad_accum_steps (2 values)",
        ),
    ],
)
def test_the_three_widest_axes_are_named(
    axes: dict[str, Any], widest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "MAX_LAYOUTS", 1)
    two = {
        "data_parallel_size": 8,
        "micro_batch_size": [1, 2],
        "grad_accum_steps": [4, 8],
        "recompute": "none",
    }
    with pytest.raises(SpaceTooLarge) as caught:
        enumerated(axes={**two, **axes})
    assert f"Narrow the widest axes, {widest}, with" in str(caught.value)


@pytest.mark.parametrize(("num", "said"), [(12, "11, 12"), (13, "11, 12 and 1 more")])
def test_twelve_values_of_an_axis_are_named(num: int, said: str) -> None:
    cell_space = enumerated(axes={"micro_batch_size": list(range(1, num + 1))})
    reason = cell_space.reason(Layout(data_parallel_size=8, micro_batch_size=99))
    assert reason is not None
    assert reason.startswith("micro_batch_size 99 is not among the axes' values: 1, 2, ")
    assert reason.endswith(said)


def test_ranks_of_a_model_that_do_not_divide_the_gpus_leave_no_layout() -> None:
    """Four by two of twelve GPUs: each divides them, and both together do not."""
    cell_space = enumerated(
        gpus_per_node=12,
        gpus=12,
        global_batch_size=24,
        axes={"tensor_parallel_size": 4, "context_parallel_size": 2},
    )
    assert len(cell_space.legal) == 0
    assert cell_space.rejected == {WORLD_SIZE: cell_space.num_combinations}


def test_any_schedule_breaks_no_rule_where_the_file_says_auto() -> None:
    spec = sweep(axes={"pipeline_parallel_size": 2, "pipeline_schedule": "auto"})
    (cell,) = spec.cells()
    for text in ("1f1b", "interleaved:4"):
        layout = Layout(
            data_parallel_size=4,
            pipeline_parallel_size=2,
            micro_batch_size=1,
            grad_accum_steps=16,
            pipeline_schedule=PipelineSchedule.parse(text),
        )
        assert broken_rule(spec, cell, layout, gpus_per_node=8) is None


def test_as_many_layouts_as_may_be_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"tensor_parallel_size": [1, 2], "zero_stage": [0, 1]}
    num = len(enumerated(axes=axes).legal)
    # Before the other rules: each of them has exact products.
    for name in ("MAX_LAYOUTS", "MAX_CANDIDATES"):
        monkeypatch.setattr(space, name, num)
        assert len(enumerated(axes=axes).legal) == num
        monkeypatch.setattr(space, name, num - 1)
        with pytest.raises(SpaceTooLarge):
            enumerated(axes=axes)
        monkeypatch.undo()


def test_a_placement_is_rejected_with_each_of_its_batches_and_choices() -> None:
    """Three micro-batch sizes, two numbers of steps, three stages and two recomputations."""
    cell_space = enumerated(
        gpus=16,
        model="llama-2-7b",
        axes={
            "data_parallel_size": [1],
            "tensor_parallel_size": [16],
            "micro_batch_size": [1, 2, 4],
            "grad_accum_steps": [32, 64],
            "zero_stage": [0, 1, 2],
            "recompute": ["none", "full"],
        },
    )
    ((reason, num),) = cell_space.rejected.items()
    assert "more than 8, the GPUs of a node" in reason
    assert num == cell_space.num_combinations == 3 * 2 * 3 * 2


def test_chunks_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = enumerated(axes=EVERYTHING, constraints=["tp <= 4"])
    monkeypatch.setattr(space, "CHUNK_ROWS", 7)
    pieces = enumerated(axes=EVERYTHING, constraints=["tp <= 4"])
    assert layouts(pieces) == layouts(whole)
    assert pieces.rejected == whole.rejected


def test_a_space_is_enumerated_once_however_large_the_nodes_beyond_its_gpus() -> None:
    spec = sweep(gpus=4)
    (cell,) = spec.cells()
    spaces = CellSpaces(spec)
    assert spaces.of(cell, gpus_per_node=4) is spaces.of(cell, gpus_per_node=8)
    assert spaces.of(cell, gpus_per_node=2) is not spaces.of(cell, gpus_per_node=4)


def test_a_constraint_may_compute_with_the_size_of_a_node() -> None:
    spec = sweep(gpus=4, constraints=["gpus_per_node < 8"])
    (cell,) = spec.cells()
    spaces = CellSpaces(spec)
    sizes = [len(spaces.of(cell, gpus_per_node=size).legal) for size in (4, 8)]
    assert sizes[0] > sizes[1] == 0

"""Predictions of layouts that share what does not depend on recomputation: the same numbers, bit by
bit, as those of each layout alone.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.physics.layout_groups import LayoutGroups
from orchestrator.core.physics.memory import Stage, predict_memory, predict_peak
from orchestrator.core.physics.step_time import StepTimeModel, predict_step_time
from orchestrator.core.physics.step_time_constants import StepTimeConstants
from orchestrator.core.physics.trainer import TRAINERS, Trainer, llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from tests.examples import examples

H100 = DEVICES["h100-sxm"]
# 31 layers: no number of stages divides them.
CELL = Cell(
    model=replace(PRESETS["llama-3.1-8b"], num_layers=31),
    num_gpus=16,
    sequence_length=4096,
    global_batch_size=64,
)
RECOMPUTES = tuple(
    map(
        Recompute.parse,
        ["none", "selective_attention", "selective_ops", "full", "full:7", "full:1"],
    )
)


def layout(zero_stage: int = 0, *, recompute: str = "none", tp: int = 1) -> Layout:
    return Layout(
        data_parallel_size=16 // tp,
        tensor_parallel_size=tp,
        micro_batch_size=1,
        grad_accum_steps=4 * tp,
        zero_stage=zero_stage,
        recompute=Recompute.parse(recompute),
    )


def test_layouts_that_differ_in_recomputation_alone_are_a_group_while_they_follow_each_other() -> (
    None
):
    rows = [
        layout(0, recompute="none"),
        layout(0, recompute="full"),
        layout(1, recompute="full"),
        layout(1, recompute="none"),
        layout(0, recompute="full:7"),
    ]
    found = LayoutGroups.of(LayoutTable.of(rows))
    assert found.group is not None
    assert found.group.tolist() == [0, 0, 1, 1, 2]
    assert found.table.layouts() == [rows[0], rows[2], rows[4]]
    assert found.spread(np.array([5.0, 6.0, 7.0])).tolist() == [5, 5, 6, 6, 7]
    assert len(found) == 5


def test_options_do_not_part_a_group() -> None:
    """What they change is in the trainer's constants, of which a prediction has one set."""
    one, other = (replace(layout(), options=(("loss", text),)) for text in ("whole", "chunked:8"))
    found = LayoutGroups.of(LayoutTable.of([one, other]))
    assert found.group is not None
    assert found.group.tolist() == [0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"micro_batch_size": 2},
        {"grad_accum_steps": 2},
        {"zero_stage": 1},
        {"pipeline_schedule": PipelineSchedule.parse("gpipe")},
        {"precision": Precision.FP32},
    ],
)
def test_any_other_axis_parts_two_layouts(change: dict[str, object]) -> None:
    table = LayoutTable.of([Layout(), replace(Layout(), **change)])
    found = LayoutGroups.of(table)
    assert found.group is None
    assert found.table is table


def test_no_layouts_have_no_groups() -> None:
    table = LayoutTable.of([layout()]).take(slice(0, 0))
    assert len(LayoutGroups.of(table)) == 0
    assert len(predict_peak(table, CELL, Trainer())) == 0


@st.composite
def tables(draw: st.DrawFn) -> LayoutTable:
    """Some layouts of a cell in the order of a table: recomputation changes fastest, or not."""
    sizes = draw(
        st.lists(
            st.sampled_from(
                [
                    (tp, pp, cp, mbs)
                    for tp, pp, cp, mbs in product([1, 2], [1, 2, 4], [1, 2], [1, 2, 4])
                ]
            ),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    schedules = draw(
        st.lists(
            st.sampled_from(["1f1b", "gpipe", "interleaved:2"]), min_size=1, max_size=2, unique=True
        )
    )
    stages = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    recomputes = draw(st.lists(st.sampled_from(RECOMPUTES), min_size=1, max_size=5, unique=True))
    found = []
    for (tp, pp, cp, mbs), zero, schedule, recompute in product(
        sizes, stages, schedules, recomputes
    ):
        dp = CELL.num_gpus // (tp * pp * cp)
        found.append(
            Layout(
                data_parallel_size=dp,
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                context_parallel_size=cp,
                micro_batch_size=mbs,
                grad_accum_steps=CELL.global_batch_size // (dp * mbs),
                zero_stage=zero,
                pipeline_schedule=PipelineSchedule.parse(schedule if pp > 1 else "1f1b"),
                recompute=recompute,
                precision=draw(st.sampled_from([Precision.BF16, Precision.BF16, Precision.FP32])),
            )
        )
    some = draw(st.sets(st.integers(0, len(found) - 1), min_size=1))
    return LayoutTable.of(found[place] for place in sorted(some))


TRAINERS_OF_ALL_KINDS = {
    **TRAINERS,
    "eager": replace(TRAINERS["nanotron"], eager_attention=True, sequence_parallel=False),
    **{
        f"{attention} {loss} {accumulate} {replicas} {compiled} {on_gpu}": llama_trainer(
            {
                "attention": attention,
                "loss": loss,
                "accumulate": accumulate,
                "replicas": replicas,
                "compile": compiled,
            },
            on_gpu=on_gpu,
        )
        for attention, loss, accumulate, replicas, compiled, on_gpu in product(
            ["auto", "eager"],
            ["whole", "chunked:8"],
            ["scatter", "last"],
            [1, 2],
            [False, True],
            [False, True],
        )
    },
}


@given(tables(), st.sampled_from(sorted(TRAINERS_OF_ALL_KINDS)), st.sampled_from(Stage))
@settings(max_examples=examples(100))
def test_memory_of_layouts_together_is_that_of_each_alone(
    table: LayoutTable, name: str, stage: Stage
) -> None:
    trainer = TRAINERS_OF_ALL_KINDS[name]
    together = predict_memory(table, CELL, trainer, stage=stage)
    alone = [
        predict_memory(table.take(slice(row, row + 1)), CELL, trainer, stage=stage)
        for row in range(len(table))
    ]
    for part in fields(together):
        found, wanted = (
            getattr(together, part.name),
            np.concatenate([getattr(one, part.name) for one in alone]),
        )
        assert found.tolist() == wanted.tolist(), part.name
    assert predict_peak(table, CELL, trainer, stage=stage).tolist() == together.total.tolist()


@given(tables(), st.sampled_from(sorted(TRAINERS_OF_ALL_KINDS)))
@settings(max_examples=examples(100))
def test_step_times_of_layouts_together_are_those_of_each_alone(
    table: LayoutTable, name: str
) -> None:
    trainer = TRAINERS_OF_ALL_KINDS[name]
    together = predict_step_time(table, CELL, H100, gpus_per_node=8, trainer=trainer)
    alone = [
        predict_step_time(
            table.take(slice(row, row + 1)), CELL, H100, gpus_per_node=8, trainer=trainer
        )
        for row in range(len(table))
    ]
    for part in fields(together):
        found, wanted = (
            getattr(together, part.name),
            np.concatenate([getattr(one, part.name) for one in alone]),
        )
        assert found.tolist() == wanted.tolist(), part.name


@given(tables(), tables(), st.sampled_from(["llama", "auto whole scatter 1 True True"]))
@settings(max_examples=examples(50))
def test_joined_step_time_models_keep_the_groups_of_each(
    first: LayoutTable, second: LayoutTable, name: str
) -> None:
    models = [
        StepTimeModel.of(table, CELL, H100, gpus_per_node=8, trainer=TRAINERS_OF_ALL_KINDS[name])
        for table in (first, second)
    ]
    constants = StepTimeConstants()
    apart = np.concatenate([model.seconds(constants).total for model in models])
    assert StepTimeModel.joined(models).seconds(constants).total.tolist() == apart.tolist()

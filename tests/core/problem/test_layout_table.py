from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.layout import CODED, Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import BLOCK_ROWS, COLUMNS, LayoutTable
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule

layouts = st.lists(
    st.builds(
        Layout,
        data_parallel_size=st.integers(1, 64),
        tensor_parallel_size=st.integers(1, 8),
        pipeline_parallel_size=st.integers(1, 8),
        context_parallel_size=st.integers(1, 8),
        grad_accum_steps=st.integers(1, 8),
        micro_batch_size=st.integers(1, 8),
        pipeline_schedule=st.sampled_from(
            [PipelineSchedule.parse(text) for text in ("gpipe", "1f1b", "interleaved:2")]
        ),
        recompute=st.sampled_from(
            [Recompute.parse(text) for text in ("none", "full", "full:3", "selective_attention")]
        ),
        zero_stage=st.integers(0, 3),
        precision=st.sampled_from(Precision),
        options=st.sampled_from([(("attention", "eager"),), (("attention", "sdpa"),)]),
    ),
    max_size=20,
)


@given(rows=layouts)
def test_a_table_holds_its_layouts_in_their_order(rows: list[Layout]) -> None:
    table = LayoutTable.of(rows)
    assert [table.layout(i) for i in range(len(table))] == table.layouts() == rows
    assert table.world_size.tolist() == [row.world_size for row in rows]


@given(rows=layouts, data=st.data())
def test_rows_can_be_taken_by_index_and_by_mask(rows: list[Layout], data: st.DataObject) -> None:
    table = LayoutTable.of(rows)
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=np.bool_
    )
    taken = table.take(mask)
    assert [taken.layout(i) for i in range(len(taken))] == [
        row for row, kept in zip(rows, mask, strict=True) if kept
    ]
    backwards = table.take(np.arange(len(rows))[::-1])
    assert [backwards.layout(i) for i in range(len(backwards))] == rows[::-1]


def test_every_axis_of_a_layout_is_a_column() -> None:
    axes = set(Layout.__dataclass_fields__)
    assert set(COLUMNS) == axes
    assert {field.name for field in fields(LayoutTable)} == axes | {
        axis.distinct for axis in CODED.values()
    }


def test_a_table_knows_the_names_of_its_options() -> None:
    assert LayoutTable.of(
        [Layout(options=(("b", 1), ("c", True))), Layout(options=(("b", 2), ("c", True)))]
    ).option_names == ("b", "c")
    assert LayoutTable.of([Layout()]).option_names == ()


def test_a_table_of_nothing_is_empty() -> None:
    table = LayoutTable.of([])
    assert len(table) == 0
    assert table.take(np.zeros(0, dtype=np.bool_)).world_size.tolist() == []


def test_blocks_are_all_rows_in_their_order() -> None:
    layouts = [Layout(grad_accum_steps=number) for number in (1, 2, 3)]
    table = LayoutTable.of(layouts)
    many = table.take(np.arange(BLOCK_ROWS + 2) % 3)
    blocks = many.blocks()
    assert [len(block) for block in blocks] == [BLOCK_ROWS, 2]
    rows = np.concatenate([block.grad_accum_steps for block in blocks])
    assert rows.tolist() == many.grad_accum_steps.tolist()
    assert [len(block) for block in table.blocks()] == [3]


def test_the_row_of_each_layout_is_found_and_no_other_layout() -> None:
    layouts = [
        Layout(data_parallel_size=dp, micro_batch_size=size, recompute=Recompute.parse(recompute))
        for dp in (1, 2)
        for size in (1, 4)
        for recompute in ("none", "full:2")
    ]
    row_of = LayoutTable.of(layouts).row_of
    assert [row_of[layout] for layout in layouts] == list(range(8))
    assert layouts[0] in row_of
    others = [
        replace(layouts[0], zero_stage=1),
        replace(layouts[0], recompute=Recompute.parse("full")),
        replace(layouts[0], options=(("compile", True),)),
    ]
    for other in others:
        assert other not in row_of and row_of.get(other) is None
        with pytest.raises(KeyError):
            row_of[other]

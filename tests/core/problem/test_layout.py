from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.problem.layout import (
    LAYOUT_COLUMNS,
    Layout,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
    from_columns,
    parse_key,
    to_columns,
)
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule, ScheduleKind

sizes = st.integers(1, 100_000)
recomputes = st.one_of(
    st.just(Recompute()),
    st.builds(
        Recompute,
        mode=st.just(RecomputeMode.FULL),
        num_layers=st.one_of(st.none(), st.integers(1, 99_999)),
    ),
    st.builds(
        Recompute,
        mode=st.just(RecomputeMode.SELECTIVE),
        policy=st.sampled_from(SelectivePolicy),
        num_layers=st.one_of(st.none(), st.integers(1, 99_999)),
    ),
)
schedules = st.one_of(
    st.sampled_from([PipelineSchedule(), PipelineSchedule(kind=ScheduleKind.GPIPE)]),
    st.builds(
        PipelineSchedule,
        kind=st.just(ScheduleKind.INTERLEAVED),
        virtual_stages=st.integers(2, 999),
    ),
)
layouts = st.builds(
    Layout,
    data_parallel_size=sizes,
    tensor_parallel_size=sizes,
    pipeline_parallel_size=sizes,
    context_parallel_size=sizes,
    micro_batch_size=sizes,
    grad_accum_steps=sizes,
    pipeline_schedule=schedules,
    recompute=recomputes,
    zero_stage=st.integers(0, 3),
    precision=st.sampled_from(Precision),
    options=st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True),
        st.one_of(
            st.booleans(),
            st.integers(-(10**15), 10**15),
            st.text(st.characters(codec="utf-8"), max_size=12),
            st.sampled_from(["true", "1", "-7", "a-b", "-x=1"]),
        ),
        max_size=3,
    ).map(lambda options: tuple(sorted(options.items()))),
)


@given(layout=layouts)
def test_a_key_reads_back_as_its_layout(layout: Layout) -> None:
    read = parse_key(layout.key)
    assert read == layout
    assert [type(value) for _, value in read.options] == [
        type(value) for _, value in layout.options
    ]


@given(layout=layouts)
def test_the_columns_of_a_row_read_back_as_its_layout(layout: Layout) -> None:
    columns = to_columns(layout)
    assert set(columns) == {column.name for column in LAYOUT_COLUMNS}
    for column in LAYOUT_COLUMNS:
        value = columns[column.name]
        assert type(value) is column.type or (value is None and column.is_nullable)
    assert from_columns(columns | {"state": "queued"}) == layout


@given(one=layouts, other=layouts)
def test_two_layouts_have_one_key_only_when_they_are_equal(one: Layout, other: Layout) -> None:
    same = one == other and [type(value) for _, value in one.options] == [
        type(value) for _, value in other.options
    ]  # True == 1
    assert (one.key == other.key) == same


@given(layout=layouts)
def test_a_key_can_name_a_file_and_stand_in_sql_and_logs(layout: Layout) -> None:
    assert re.fullmatch(r"[a-z0-9_.]+(-[A-Za-z0-9_]+=[A-Za-z0-9_.+,:@~%-]*)*", layout.key)


def test_the_key_is_stable() -> None:
    layout = Layout(
        data_parallel_size=8,
        micro_batch_size=2,
        grad_accum_steps=4,
        recompute=Recompute.parse("full:8"),
        zero_stage=1,
    )
    assert layout.key == "dp8_tp1_pp1_cp1_mbs2_ga4_full.8_z1_bf16"
    assert layout.short == "dp8 mbs2 ga4 full:8 z1 bf16"
    assert (
        Layout(tensor_parallel_size=2, context_parallel_size=4).short
        == "dp1 tp2 cp4 mbs1 ga1 none bf16"
    )


def test_the_key_names_a_schedule_only_if_it_is_not_1f1b() -> None:
    layout = Layout(
        pipeline_parallel_size=4,
        grad_accum_steps=8,
        pipeline_schedule=PipelineSchedule.parse("interleaved:2"),
    )
    assert layout.key == "dp1_tp1_pp4_cp1_mbs1_ga8_interleaved.2_none_z0_bf16"
    assert layout.short == "dp1 pp4 interleaved:2 mbs1 ga8 none bf16"
    plain = Layout(pipeline_parallel_size=4, grad_accum_steps=8)
    assert plain.key == "dp1_tp1_pp4_cp1_mbs1_ga8_none_z0_bf16"


def test_options_stand_behind_the_key_readably() -> None:
    layout = Layout(options=(("attention", "eager"), ("fused", True), ("threads", 2)))
    assert (
        layout.key == "dp1_tp1_pp1_cp1_mbs1_ga1_none_z0_bf16-attention=eager-fused=true-threads=2"
    )
    assert layout.short == "dp1 mbs1 ga1 none bf16 attention=eager fused=true threads=2"


def test_a_word_that_looks_like_a_number_stays_a_word() -> None:
    assert Layout(options=(("a", "1"), ("b", "true"))).key.endswith("_bf16-a=%31-b=%74rue")


def test_options_without_an_order_would_have_two_names() -> None:
    with pytest.raises(ValueError, match="alphabetical"):
        Layout(options=(("b", 1), ("a", 2)))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "dp1_tp1_pp1_cp1_mbs1_ga1_none_z0_bf16-",
        "dp1_tp1_pp1_cp1_mbs1_ga1_none_z0_bf16-a",
        "dp1_tp1_pp1_cp1_mbs1_ga1_none_z0_bf16-a=b=c",
        "dp1_tp1_pp1_cp1_mbs1_ga1_none_z0_bf16-b=1-a=2",
        "dp8",
        "dp8_tp1_pp1_cp1_mbs2_ga4_full_z4_bf16",
        "dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf61",
        "dp8_tp1_pp1_cp1_mbs2_ga4_none.3_z0_bf16",
        "dp8_tp1_pp1_cp1_mbs2_ga4_1f1b_none_z0_bf16",
        "dp8_tp1_pp1_cp1_mbs2_ga4_interleaved.1_none_z0_bf16",
        "dp8_tp1_pp1_cp1_mbs2_ga4_interleaved_none_z0_bf16",
        "dp-1_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16",
        "dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16\n",
    ],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError):
        parse_key(key)


def test_products_are_exact() -> None:
    layout = Layout(
        data_parallel_size=3,
        tensor_parallel_size=5,
        pipeline_parallel_size=7,
        context_parallel_size=11,
        micro_batch_size=13,
        grad_accum_steps=17,
    )
    assert layout.world_size == 3 * 5 * 7 * 11
    assert layout.global_batch_size == 3 * 13 * 17


def test_a_layout_is_a_value() -> None:
    assert hash(Layout(micro_batch_size=2)) == hash(Layout(micro_batch_size=2))
    with pytest.raises(FrozenInstanceError):
        Layout().micro_batch_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Recompute()),
        ("full", Recompute(mode=RecomputeMode.FULL)),
        ("full:8", Recompute(mode=RecomputeMode.FULL, num_layers=8)),
        ("selective", Recompute(mode=RecomputeMode.SELECTIVE, policy=SelectivePolicy.OPS)),
        (
            "selective_ops:3",
            Recompute(mode=RecomputeMode.SELECTIVE, policy=SelectivePolicy.OPS, num_layers=3),
        ),
        (
            "selective_attention",
            Recompute(mode=RecomputeMode.SELECTIVE, policy=SelectivePolicy.ATTENTION),
        ),
        (
            "selective_attention:4",
            Recompute(mode=RecomputeMode.SELECTIVE, policy=SelectivePolicy.ATTENTION, num_layers=4),
        ),
    ],
)
def test_recompute_reads_what_a_sweep_file_writes(text: str, expected: Recompute) -> None:
    assert Recompute.parse(text) == expected
    assert Recompute.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "ful",
        "full:",
        "full:0",
        "full:-1",
        "full:01",
        "full:8 ",
        "full.8",
        "none:3",
        "selective:x",
        "selective_",
        "full:100000",
    ],
)
def test_what_is_no_recompute_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of none, full, selective"):
        Recompute.parse(text)


@given(recompute=recomputes)
def test_recompute_reads_back_as_it_is_written(recompute: Recompute) -> None:
    assert Recompute.parse(str(recompute)) == recompute


@pytest.mark.parametrize(
    "parts",
    [
        {"mode": RecomputeMode.SELECTIVE},
        {"mode": RecomputeMode.FULL, "policy": SelectivePolicy.OPS},
        {"mode": RecomputeMode.NONE, "num_layers": 3},
        {"mode": RecomputeMode.FULL, "num_layers": 0},
    ],
)
def test_parts_of_a_recompute_that_do_not_go_together_are_refused(parts: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Recompute(**parts)  # type: ignore[arg-type]


def test_the_layers_recomputed_are_never_more_than_the_model_has() -> None:
    assert Recompute().layers_of(32) == 0
    assert Recompute.parse("full").layers_of(32) == 32
    assert Recompute.parse("full:8").layers_of(32) == 8
    assert Recompute.parse("full:40").layers_of(32) == 32


def test_each_technique_beyond_data_parallelism_counts_once() -> None:
    assert Layout(data_parallel_size=8, micro_batch_size=4).num_techniques == 0
    several = Layout(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        context_parallel_size=4,
        grad_accum_steps=8,
        recompute=Recompute.parse("full"),
        zero_stage=1,
    )
    assert several.num_techniques == 6

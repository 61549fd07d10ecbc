"""The partial order behind "this would not fit either": its laws, and that no memory that grows
with what is kept contradicts it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.dominance import keeps_at_least, needs_at_least
from orchestrator.core.problem.layout import (
    Layout,
    Precision,
    Recompute,
    RecomputeMode,
    SelectivePolicy,
)
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS
from tests.examples import examples

NUM_LAYERS = 8
BATCH_OF_A_REPLICA = 8

RECOMPUTES = [
    Recompute.parse(mode + k)
    for mode in ("full", "selective_ops", "selective_attention")
    for k in ("", ":1", ":3", ":8", ":20")
]
recomputes = st.sampled_from([Recompute(), *RECOMPUTES])


def layout(*, micro_batch_size: int = 1, recompute: str = "none", **sizes: int) -> Layout:
    return Layout(
        micro_batch_size=micro_batch_size,
        grad_accum_steps=BATCH_OF_A_REPLICA // micro_batch_size,
        recompute=Recompute.parse(recompute),
        **{"data_parallel_size": 4, **sizes},  # type: ignore[arg-type]
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    micro_batch_size = draw(st.sampled_from([1, 2, 4, 8]))
    dp, tp, pp = draw(st.sampled_from([(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4)]))
    return Layout(
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=BATCH_OF_A_REPLICA // micro_batch_size,
        recompute=draw(recomputes),
        zero_stage=draw(st.integers(0, 3)),
        precision=draw(st.sampled_from([Precision.BF16, Precision.FP32])),
    )


def needs(a: Layout, b: Layout) -> bool:
    return bool(needs_at_least(LayoutTable.of([a]), b, num_layers=NUM_LAYERS)[0])


def test_an_out_of_memory_says_nothing_of_other_options() -> None:
    eager = replace(layout(), options=(("attention", "eager"),))
    larger = replace(layout(micro_batch_size=2), options=eager.options)
    assert needs(larger, eager)
    assert not needs(replace(larger, options=(("attention", "sdpa"),)), eager)
    assert not needs(replace(larger, options=()), eager)


@given(layouts())
def test_every_layout_needs_at_least_what_it_needs(one: Layout) -> None:
    assert needs(one, one)


@settings(max_examples=examples(300))
@given(st.lists(layouts(), min_size=3, max_size=12))
def test_the_order_is_transitive(some: list[Layout]) -> None:
    table = LayoutTable.of(some)
    # Above[j, i]: i needs at least j.
    above = np.array([needs_at_least(table, b, num_layers=NUM_LAYERS) for b in some])
    assert not ((above.astype(int) @ above.astype(int) > 0) & ~above).any()


def test_recomputation_is_ordered_transitively_and_both_ways_only_among_equals() -> None:
    every = [Recompute(), *RECOMPUTES]
    for a, b, c in product(every, repeat=3):
        if keeps_at_least(a, b, num_layers=NUM_LAYERS) and keeps_at_least(
            b, c, num_layers=NUM_LAYERS
        ):
            assert keeps_at_least(a, c, num_layers=NUM_LAYERS)
    for a, b in product(every, repeat=2):
        if keeps_at_least(a, b, num_layers=NUM_LAYERS) and keeps_at_least(
            b, a, num_layers=NUM_LAYERS
        ):
            assert (a.mode, a.policy, a.layers_of(NUM_LAYERS)) == (
                b.mode,
                b.policy,
                b.layers_of(NUM_LAYERS),
            )


@settings(max_examples=examples(300))
@given(layouts(), layouts())
def test_two_layouts_that_need_each_others_memory_differ_in_nothing_that_costs_any(
    a: Layout, b: Layout
) -> None:
    if needs(a, b) and needs(b, a):
        assert (a.micro_batch_size, a.zero_stage) == (b.micro_batch_size, b.zero_stage)
        assert a.recompute.layers_of(NUM_LAYERS) == b.recompute.layers_of(NUM_LAYERS)


def kept(recompute: Recompute, *, of_policy: dict[SelectivePolicy, float], of_full: float) -> float:
    """Units that all layers keep per token: 1 without recomputation, a share of it with."""
    share = 1.0
    if recompute.mode is RecomputeMode.FULL:
        share = of_full
    elif recompute.policy is not None:
        share = of_policy[recompute.policy]
    recomputed = recompute.layers_of(NUM_LAYERS)
    return (NUM_LAYERS - recomputed) + recomputed * share


@settings(max_examples=examples(300))
@given(
    proof=layouts(),
    others=st.lists(layouts(), min_size=1, max_size=20),
    ops=st.floats(0.0, 1.0),
    attention=st.floats(0.0, 1.0),
    full=st.floats(0.0, 1.0),
    state=st.floats(0.0, 100.0),
)
def test_a_memory_that_grows_with_what_is_kept_never_contradicts_it(
    proof: Layout, others: list[Layout], ops: float, attention: float, full: float, state: float
) -> None:
    # Full recomputation keeps the least of a layer.
    of_full = full * min(ops, attention)
    of_policy = {SelectivePolicy.OPS: ops, SelectivePolicy.ATTENTION: attention}

    def memory(one: Layout) -> float:
        in_flight = one.micro_batch_size * min(one.pipeline_parallel_size, one.grad_accum_steps)
        activations = in_flight * kept(one.recompute, of_policy=of_policy, of_full=of_full)
        shards = one.data_parallel_size
        parameters, gradients, optimizer = (
            state / (shards if one.zero_stage >= stage else 1) for stage in (3, 2, 1)
        )
        # While the activations are at their peak.
        held = gradients if one.grad_accum_steps > 1 else 0.0
        return parameters + 6 * optimizer + max(activations + held, gradients)

    condemned = needs_at_least(LayoutTable.of(others), proof, num_layers=NUM_LAYERS)
    for one, worse in zip(others, condemned, strict=True):
        assert not worse or memory(one) >= memory(proof) * (1 - 1e-12)


@settings(max_examples=examples(100))
@given(layouts(), st.lists(layouts(), min_size=1, max_size=20))
def test_the_predicted_memory_agrees(proof: Layout, others: list[Layout]) -> None:
    cell = Cell(
        model=PRESETS["llama-3.1-8b"], num_gpus=4, sequence_length=4096, global_batch_size=32
    )
    table = LayoutTable.of([proof, *others])
    condemned = needs_at_least(table, proof, num_layers=cell.model.num_layers)
    predicted = predict_memory(table, cell, Trainer()).total
    assert (predicted[condemned] >= predicted[0] * (1 - 1e-12)).all()


@st.composite
def cells_and_layouts(draw: st.DrawFn) -> tuple[Cell, list[Layout]]:
    """A model of few layers, and layouts of it.

    Some have stages of one layer, some recompute all but the last one.
    """
    stages = draw(st.sampled_from([1, 2, 4]))
    num_layers = stages * draw(st.integers(1, 4))
    texts = [
        "none",
        *(
            f"{mode}:{k}"
            for mode in ("full", "selective_ops", "selective_attention")
            for k in range(1, num_layers + 1)
        ),
    ]
    model = replace(
        PRESETS["llama-tiny"], num_layers=num_layers, vocab_size=draw(st.sampled_from([64, 32_000]))
    )
    cell = Cell(
        model=model,
        num_gpus=2 * stages,
        sequence_length=draw(st.sampled_from([16, 1024])),
        global_batch_size=8,
    )
    some = st.builds(
        lambda text, micro_batch_size, zero_stage, precision: Layout(
            data_parallel_size=2,
            pipeline_parallel_size=stages,
            micro_batch_size=micro_batch_size,
            grad_accum_steps=4 // micro_batch_size,
            recompute=Recompute.parse(text),
            zero_stage=zero_stage,
            precision=precision,
        ),
        st.sampled_from(texts),
        st.sampled_from([1, 2, 4]),
        st.integers(0, 3),
        st.sampled_from([Precision.BF16, Precision.FP32]),
    )
    return cell, draw(st.lists(some, min_size=10, max_size=40))


@settings(max_examples=examples(150))
@given(cells_and_layouts(), st.sampled_from(list(TRAINERS.values())), st.booleans())
def test_the_predicted_memory_of_few_layers_agrees(
    known: tuple[Cell, list[Layout]], trainer: Trainer, eager_attention: bool
) -> None:
    cell, some = known
    table = LayoutTable.of(some)
    predicted = predict_memory(table, cell, replace(trainer, eager_attention=eager_attention)).total
    for row, proof in enumerate(some):
        condemned = needs_at_least(table, proof, num_layers=cell.model.num_layers)
        assert (predicted[condemned] >= predicted[row] * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("less", "proof", "num_layers", "num_stages", "proven"),
    [
        (
            "none",
            "selective_ops",
            1,
            1,
            False,
            # The only layer is the last one: its activations are back when its backward needs them.
        ),
        ("none", "selective_ops", 4, 4, False),
        ("none", "selective_ops", 4, 2, True),
        ("selective_attention", "full", 4, 4, False),
        ("selective_attention", "full", 4, 2, True),
        ("selective_ops:7", "full", 8, 1, True),
        ("selective_ops:7", "selective_ops", 8, 1, False),
        ("selective_ops:6", "selective_ops", 8, 1, True),
        ("selective_ops:6", "selective_ops:7", 8, 1, True),
        (
            "full:3",
            "full:6",
            8,
            2,
            False,
            # The first stage may end with any layer: some trainers balance stages by work.
        ),
        ("full:6", "full:6", 8, 2, True),
        ("full:1", "full:3", 8, 2, False),
        ("none", "full:6", 8, 3, True),
    ],
)
def test_recomputing_only_the_last_layer_of_a_stage_saves_nothing(
    less: str, proof: str, num_layers: int, num_stages: int, proven: bool
) -> None:
    a, b = Recompute.parse(less), Recompute.parse(proof)
    assert keeps_at_least(a, b, num_layers=num_layers, num_stages=num_stages) is proven


@pytest.mark.parametrize(
    "worse",
    [
        layout(micro_batch_size=4, recompute="full:4", zero_stage=1),
        layout(micro_batch_size=2, recompute="full:3", zero_stage=1),
        layout(micro_batch_size=2, recompute="full:4", zero_stage=0),
        layout(micro_batch_size=2, recompute="selective:4", zero_stage=1),
        layout(micro_batch_size=2, recompute="none", zero_stage=1),
        layout(micro_batch_size=4, recompute="none", zero_stage=0),
    ],
    ids=lambda worse: worse.key,
)
def test_an_oom_condemns_a_larger_micro_batch_less_recompute_and_a_lower_zero_stage(
    worse: Layout,
) -> None:
    assert needs(worse, layout(micro_batch_size=2, recompute="full:4", zero_stage=1))


@pytest.mark.parametrize(
    "other",
    [
        layout(micro_batch_size=1, recompute="full:4", zero_stage=1),
        layout(
            micro_batch_size=4,
            recompute="full:5",
            zero_stage=1,
            # More recompute against a larger micro-batch: sizes decide.
        ),
        layout(micro_batch_size=2, recompute="selective:5", zero_stage=1),
        layout(micro_batch_size=4, recompute="full:4", zero_stage=2),
        layout(micro_batch_size=4, recompute="full:4", zero_stage=1, tensor_parallel_size=2),
        layout(micro_batch_size=4, recompute="full:4", zero_stage=1, data_parallel_size=2),
        layout(
            micro_batch_size=8,
            recompute="none",
            zero_stage=0,
            # No accumulation: it holds no gradients during the forward pass.
        ),
    ],
    ids=lambda other: other.key,
)
def test_an_oom_condemns_nothing_whose_memory_depends_on_sizes(other: Layout) -> None:
    assert not needs(other, layout(micro_batch_size=2, recompute="full:4", zero_stage=1))


def test_the_selective_policies_are_not_comparable() -> None:
    ops, attention = layout(recompute="selective_ops"), layout(recompute="selective_attention")
    assert not needs(ops, attention)
    assert not needs(attention, ops)


@pytest.mark.parametrize("sums_shards", [False, True])
def test_two_micro_batches_whose_shards_are_summed_up_need_less_than_more_of_them(
    sums_shards: bool,
) -> None:
    proof, two, four = (
        layout(micro_batch_size=size, recompute="full", zero_stage=1) for size in (1, 4, 2)
    )
    assert two.grad_accum_steps == 2
    condemned = needs_at_least(
        LayoutTable.of([two, four]), proof, num_layers=NUM_LAYERS, sums_shards=sums_shards
    )
    assert condemned.tolist() == [not sums_shards, True]


@pytest.mark.parametrize(("steps", "is_proven"), [(2, True), (3, False)])
def test_two_micro_batches_are_proven_by_two_and_not_by_three(steps: int, is_proven: bool) -> None:
    """The replicas sum their shards up after the last one."""
    proof, two = (
        Layout(data_parallel_size=4, micro_batch_size=6 // num, grad_accum_steps=num, zero_stage=1)
        for num in (steps, 2)
    )
    found = needs_at_least(LayoutTable.of([two]), proof, num_layers=8, sums_shards=True)
    assert found.tolist() == [is_proven]


def test_a_model_without_a_pipeline_has_one_stage() -> None:
    """A second stage could begin with the layer that one of the two recomputes more."""
    less, more = Recompute.parse("selective_ops:6"), Recompute.parse("selective_ops:7")
    assert keeps_at_least(less, more, num_layers=8)
    assert not keeps_at_least(less, more, num_layers=8, num_stages=2)


def test_a_proof_without_accumulation_condemns_what_has_none_either() -> None:
    assert needs(
        layout(micro_batch_size=8, recompute="none"), layout(micro_batch_size=8, recompute="full")
    )

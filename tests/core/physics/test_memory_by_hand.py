"""Each term of the predicted memory, by arithmetic: a model whose sizes can be multiplied in mind.

h = 6, k = 2, f = 10, 3 heads, V = 50, 4 layers; T = 8 tokens a micro-batch; e = 2 bytes in bf16.
Weights: 2*36 + 2*12 + 3*60 + 12 = 288 a layer, 300 of the embedding, as many of the head, 6 of the
last norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.physics.memory import (
    MemoryPrediction,
    Stage,
    predict_memory,
    predict_peak,
)
from orchestrator.core.physics.trainer import GIB, Trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from tests.core.by_hand import MODEL

# So few words that a layer, not the head, is the fullest moment.
FEW_WORDS = replace(MODEL, vocab_size=1)
LENGTH = 8
LAYER, EMBEDDING, NORM = 288, 300, 6
ALL = 4 * LAYER + 2 * EMBEDDING + NORM
# Without gradients that the optimizer's step widens: then no layout is fullest there.
PLAIN = Trainer(gradient_bytes=4.0)
EAGER = replace(PLAIN, eager_attention=True)


def predict(
    layout: Layout,
    *,
    trainer: Trainer = PLAIN,
    model: ModelShape = MODEL,
    length: int = LENGTH,
    stage: Stage = Stage.FULLEST,
) -> MemoryPrediction:
    cell = Cell(
        model=model,
        num_gpus=layout.world_size,
        sequence_length=length,
        global_batch_size=layout.global_batch_size,
    )
    return predict_memory(LayoutTable.of([layout]), cell, trainer, stage=stage)


def layout(recompute: str = "none", **sizes: int) -> Layout:
    return Layout(**sizes, recompute=Recompute.parse(recompute))


def fp32(recompute: str = "none") -> Layout:
    return replace(layout(recompute), precision=Precision.FP32)


@pytest.mark.parametrize(
    ("of", "trainer", "bytes_per_token"),
    [
        # e (6h + 2k + 4f) + 4a + 8 = 2 * 80 + 12 + 8
        (layout(), PLAIN, 4 * 180),
        (fp32(), PLAIN, 4 * 340),
        (layout("full"), PLAIN, 4 * 12),
        (layout("full:3"), PLAIN, 3 * 12 + 180),
        # e (4h + 2k + f) + 4a = 2 * 38 + 12
        (layout("selective_ops"), PLAIN, 4 * 88),
        # As none, less the 4a of attention.
        (layout("selective_attention"), PLAIN, 4 * 168),
        # e (8h + 4f) + 6as + 8 = 2 * 88 + 6 * 24 + 8; in fp32, 4as.
        (layout(), EAGER, 4 * 328),
        (fp32(), EAGER, 4 * (4 * 88 + 4 * 24 + 8)),
        # The scores: e a s = 2 * 24, in place of 4a.
        (layout("selective_ops"), EAGER, 4 * (2 * 38 + 48)),
        (layout("selective_attention"), EAGER, 4 * 168),
        (layout("full"), EAGER, 4 * 12),
        (layout(), replace(PLAIN, activation_factor=1.5), 6 * 180),
    ],
)
def test_layers_keep_so_many_bytes_of_each_token(
    of: Layout, trainer: Trainer, bytes_per_token: int
) -> None:
    assert predict(of, trainer=trainer).activations[0] == LENGTH * bytes_per_token


@pytest.mark.parametrize(
    ("recompute", "trainer", "bytes_per_token"),
    [
        # 8 of the norms' scales, 2eh = 24 of the two gathered inputs, half of the other 148.
        ("none", PLAIN, 8 + 24 + 74),
        ("none", replace(PLAIN, gathered_inputs=0.0), 8 + 12 + 74),
        ("none", replace(PLAIN, gathered_inputs=0.5), 8 + 18 + 74),
        # Inputs of the norms whole, too: half of 124.
        ("none", replace(PLAIN, sequence_parallel=False), 8 + 24 + 24 + 62),
        ("full", PLAIN, 6),
        ("full", replace(PLAIN, sequence_parallel=False), 12),
        ("selective_ops", PLAIN, 24 + 32),
        # Without gathering, all is divided but the scales.
        ("selective_attention", replace(PLAIN, gathered_inputs=0.0), 8 + 80),
    ],
)
def test_two_tensor_parallel_ranks_share_what_they_do_not_gather(
    recompute: str, trainer: Trainer, bytes_per_token: int
) -> None:
    found = predict(layout(recompute, tensor_parallel_size=2), trainer=trainer)
    assert found.activations[0] == LENGTH * 4 * bytes_per_token


def test_a_pipeline_keeps_less_of_what_it_gathers() -> None:
    """The share is 1 - 2/p of the trainer's."""
    four = layout(tensor_parallel_size=2, pipeline_parallel_size=4, grad_accum_steps=8)
    for share, gathered in ((1.0, 0.5), (0.5, 0.25), (0.0, 0.0)):
        trainer = replace(PLAIN, gathered_inputs_in_pipeline=share, gathered_inputs=9.0)
        one = 8 + 24 * (gathered + (1 - gathered) / 2) + 74
        found = predict(four, trainer=trainer, stage=Stage.FIRST)
        # One layer a stage; four micro-batches wait for their backward pass.
        assert found.activations[0] == pytest.approx(4 * LENGTH * one)
    two = layout(tensor_parallel_size=2, pipeline_parallel_size=2, grad_accum_steps=1)
    found = predict(two, stage=Stage.FIRST)
    assert found.activations[0] == 2 * LENGTH * (8 + 12 + 74)


@pytest.mark.parametrize(
    ("stages", "accumulated", "first", "last"),
    # Layers times micro-batches in flight: four layers in two stages, in three (2, 2, at least 1),
    # in four; never more micro-batches than there are.
    [(2, 8, 2 * 2, 2), (3, 8, 2 * 3, 1), (4, 8, 1 * 4, 1), (4, 3, 1 * 3, 1), (2, 1, 2 * 1, 2)],
)
def test_a_stage_holds_one_micro_batch_for_each_stage_behind_it(
    stages: int, accumulated: int, first: int, last: int
) -> None:
    of = layout("full", pipeline_parallel_size=stages, grad_accum_steps=accumulated)
    trainer = replace(PLAIN, pipeline_activation_factor=2.0, activation_factor=7.0)
    for stage, held in ((Stage.FIRST, first), (Stage.LAST, last)):
        assert predict(of, trainer=trainer, stage=stage).activations[0] == 2 * LENGTH * 12 * held


def test_the_first_layers_are_recomputed_up_to_the_stage_s_own() -> None:
    of = layout("full:3", pipeline_parallel_size=2, grad_accum_steps=1)
    assert predict(of, stage=Stage.FIRST).activations[0] == LENGTH * 2 * 12


def test_context_parallel_ranks_share_the_tokens_and_the_shards() -> None:
    of = layout("full", context_parallel_size=4, zero_stage=1)
    found = predict(of)
    assert found.activations[0] == 2 * 4 * 12
    assert found.optimizer[0] == 12 * ALL / 4


@pytest.mark.parametrize(
    ("sizes", "first", "last"),
    [
        ({"tensor_parallel_size": 2}, (ALL - NORM) / 2 + NORM, (ALL - NORM) / 2 + NORM),
        (
            {"pipeline_parallel_size": 2},
            2 * LAYER + EMBEDDING,
            2 * LAYER + EMBEDDING + NORM,
        ),
        (
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 2},
            (LAYER + EMBEDDING) / 2,
            (LAYER + EMBEDDING) / 2 + NORM,
        ),
    ],
)
def test_a_rank_has_the_weights_of_its_part(
    sizes: dict[str, int], first: float, last: float
) -> None:
    for stage, weights in ((Stage.FIRST, first), (Stage.LAST, last)):
        found = predict(layout(**sizes), stage=stage)
        assert (found.parameters[0], found.gradients[0], found.optimizer[0]) == (
            2 * weights,
            4 * weights,
            12 * weights,
        )


def test_tied_embeddings_are_one_table_unless_stages_divide_them() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    assert predict(layout(), model=tied).parameters[0] == 2 * (ALL - EMBEDDING)
    two = layout(pipeline_parallel_size=2)
    assert predict(two, model=tied, stage=Stage.LAST).parameters[0] == 2 * (876 + NORM)


def test_states_are_those_of_the_trainer_in_mixed_precision_and_sixteen_bytes_in_fp32() -> None:
    trainer = replace(PLAIN, parameter_bytes=3.0, gradient_bytes=5.0, optimizer_bytes=7.0)
    mixed, whole = (predict(of, trainer=trainer) for of in (layout(), fp32()))
    assert [p[0] for p in (mixed.parameters, mixed.gradients, mixed.optimizer)] == [
        3 * ALL,
        5 * ALL,
        7 * ALL,
    ]
    assert [p[0] for p in (whole.parameters, whole.gradients, whole.optimizer)] == [
        4 * ALL,
        4 * ALL,
        8 * ALL,
    ]


@pytest.mark.parametrize(
    ("recompute", "trainer", "bytes_per_token"),
    [
        # Gradients of the widest products: e (h + 2f) = 52.
        ("none", PLAIN, 52),
        # And what is computed again, 180 - 12.
        ("full", PLAIN, 168 + 52),
        # 180 - 88, and the layer's input, 12.
        ("selective_ops", PLAIN, 92 + 12 + 52),
        ("selective_attention", PLAIN, 52),
        # If the last layer is not recomputed, it computes nothing again.
        ("full:3", PLAIN, 52),
        # Eager attention, for long sequences: 6 a s + e (2k - 2h - 4f) with a s = 192.
        ("none", EAGER, 6 * 192 + 2 * (4 - 12 - 40)),
        ("selective_attention", EAGER, 12 * 192 + 2 * (12 - 40)),
        ("selective_ops", EAGER, 10 * 192 + 2 * 30),
        ("full", EAGER, 12 * 192 + 2 * (36 + 4)),
    ],
)
def test_the_last_layer_s_backward_adds_so_many_bytes_of_each_token(
    recompute: str, trainer: Trainer, bytes_per_token: int
) -> None:
    length = 64 if trainer.eager_attention else LENGTH
    found = predict(layout(recompute), trainer=trainer, model=FEW_WORDS, length=length)
    assert found.workspace[0] == length * bytes_per_token
    assert found.loss[0] == 0


@pytest.mark.parametrize(
    ("recompute", "scores", "rest"),
    [("none", 8, 4 * (4 - 12 - 40)), ("selective_ops", 8, 4 * 30), ("full", 12, 160)],
)
def test_scores_in_fp32_take_other_bytes_in_the_backward_pass(
    recompute: str, scores: int, rest: int
) -> None:
    found = predict(fp32(recompute), trainer=EAGER, model=FEW_WORDS, length=64)
    assert found.workspace[0] == 64 * (scores * 192 + rest)


@pytest.mark.parametrize(
    ("recompute", "trainer", "bytes_per_token"),
    [
        # Two ranks keep 106 bytes, of which 6 are there: 100 are computed again.
        ("full", PLAIN, 100 + 26),
        # 106 - 56, and half of the layer's input.
        ("selective_ops", PLAIN, 50 + 6 + 26),
        ("full", EAGER, (12 * 192 + 80) / 2),
    ],
)
def test_two_tensor_parallel_ranks_share_the_backward_of_a_layer(
    recompute: str, trainer: Trainer, bytes_per_token: float
) -> None:
    length = 64 if trainer.eager_attention else LENGTH
    of = layout(recompute, tensor_parallel_size=2)
    found = predict(of, trainer=trainer, model=FEW_WORDS, length=length)
    assert found.workspace[0] == length * bytes_per_token


def test_the_loss_holds_logits_and_the_head_s_backward_holds_its_gradient() -> None:
    """2eh + 4 + 12V = 628 a token; or 3eh + eV = 136 a token, and eVh = 600."""
    assert predict(layout()).loss[0] == 8 * 628
    assert predict(layout(), length=1).loss[0] == 136 + 600
    assert predict(fp32(), length=1).loss[0] == 2 * 736
    two = layout(tensor_parallel_size=2)
    assert predict(two).loss[0] == 8 * (24 + 4 + 300)
    assert predict(two, length=1).loss[0] == 36 + 50 + 300
    assert predict(layout(), trainer=replace(PLAIN, logit_bytes=6.0)).loss[0] == 8 * 328


def test_several_micro_batches_may_hold_more_logits() -> None:
    trainer = replace(PLAIN, accumulated_logits=0.5)
    several = 8 * (24 + 4 + 1.5 * 600)
    assert predict(layout(), trainer=trainer).loss[0] == 8 * 628
    assert predict(layout(grad_accum_steps=2), trainer=trainer).loss[0] == several
    # A pipeline counts as accumulating.
    two = layout(pipeline_parallel_size=2)
    assert predict(two, trainer=trainer, stage=Stage.LAST).loss[0] == several


def test_the_first_stage_has_no_logits() -> None:
    of = layout(pipeline_parallel_size=2)
    first, last = (predict(of, stage=stage) for stage in (Stage.FIRST, Stage.LAST))
    assert (first.loss[0], first.workspace[0]) == (0, 8 * 52)
    assert last.loss[0] == 8 * 628


def test_tied_embeddings_wait_for_each_other_s_gradient() -> None:
    tied = replace(MODEL, vocab_size=4, tied_embeddings=True)
    few = replace(PLAIN, logit_bytes=1.0)
    # The head's e V h = 48, on top of a layer's backward.
    assert predict(layout(), model=tied, trainer=few, length=64).workspace[0] == 64 * 52 + 48
    # At the end of the backward pass: the head's, the embedding's, their sum; nothing is kept.
    many = predict(layout("full"), model=replace(tied, vocab_size=200), trainer=few, length=1)
    assert many.activations[0] + many.temporaries[0] == 3 * 2 * 200 * 6
    # A pipeline's stages do not share the table.
    two = layout(pipeline_parallel_size=2)
    found = predict(two, model=tied, trainer=few, length=64, stage=Stage.LAST)
    assert found.workspace[0] == 64 * 52


@pytest.mark.parametrize(
    ("of", "trainer", "bytes_per_weight"),
    [
        # Gradients of a chunk are widened to fp32, of the rank's share; new weights are gathered.
        (layout("full"), Trainer(), 4),
        (layout("full"), Trainer(gradient_bytes=3.0), 4),
        (layout("full", data_parallel_size=4), Trainer(), 4),
        (layout("full", data_parallel_size=2, zero_stage=1), Trainer(), 4 / 2 + 2),
        (layout("full", data_parallel_size=4, zero_stage=1), Trainer(), 4 / 4 + 2),
        (layout("full", context_parallel_size=4, zero_stage=2), Trainer(), 4 / 4 + 2),
        (layout("full", data_parallel_size=4, zero_stage=1), PLAIN, 2),
        (replace(fp32("full"), data_parallel_size=4, zero_stage=1), Trainer(), 4),
        # Copies made for all weights at once: of the rank's share.
        (layout("full"), Trainer(stepping_bytes=5.0), 5),
        (layout("full"), Trainer(stepping_bytes=3.0), 4),
        (layout("full", data_parallel_size=4, zero_stage=1), Trainer(stepping_bytes=16.0), 4),
    ],
)
def test_the_optimizer_s_step_needs_so_many_bytes_a_weight(
    of: Layout, trainer: Trainer, bytes_per_weight: float
) -> None:
    """So few words and tokens that the step is the fullest moment."""
    found = predict(of, trainer=trainer, model=FEW_WORDS, length=4)
    above = found.activations[0] + found.temporaries[0]
    assert above == bytes_per_weight * (4 * LAYER + 2 * 6 + NORM)


def test_a_step_without_copies_needs_nothing() -> None:
    found = predict(fp32("full"), trainer=Trainer(), model=FEW_WORDS, length=4)
    # Four inputs of 24 bytes a token; 328 and 4 (6 + 20) in the backward pass.
    assert found.activations[0] + found.temporaries[0] == 4 * (4 * 24 + (340 - 24) + 104)


def test_zero_3_gathers_two_units_but_no_more_than_it_sharded() -> None:
    """The largest unit is the head's 300 weights, of 1,758."""
    of = layout(data_parallel_size=4, zero_stage=3)
    plain = predict(replace(of, zero_stage=2), model=FEW_WORDS).workspace[0]
    gathered = predict(of, model=FEW_WORDS)
    assert plain == 8 * 52
    assert gathered.workspace[0] == 8 * 52 + 2 * LAYER * 2
    assert gathered.parameters[0] == 2 * (4 * LAYER + 2 * 6 + NORM) / 4
    # With as many words as the model has, the head is the unit.
    full = replace(of, recompute=Recompute.parse("full"))
    found = predict(full, trainer=replace(PLAIN, logit_bytes=0.0), length=64)
    assert found.workspace[0] == 64 * 220 + 2 * 300 * 2
    # Fifty units are more than there is: three quarters of all weights come from other ranks.
    units = predict(of, model=FEW_WORDS, trainer=replace(PLAIN, gathered_units=50.0))
    assert units.workspace[0] == 8 * 52 + 2 * (4 * LAYER + 2 * 6 + NORM) * 3 / 4
    two = layout(data_parallel_size=4, tensor_parallel_size=2, zero_stage=3)
    assert predict(two, model=FEW_WORDS).workspace[0] == 8 * 26 + 2 * LAYER / 2 * 2


def test_buckets_come_on_top_in_mixed_precision_only() -> None:
    trainer = replace(PLAIN, bucket_bytes=1.0)
    assert predict(layout(data_parallel_size=2), trainer=trainer).gradients[0] == 5 * ALL
    assert predict(layout(context_parallel_size=2), trainer=trainer).gradients[0] == 5 * ALL
    wide = replace(fp32(), data_parallel_size=2)
    assert predict(wide, trainer=trainer).gradients[0] == 4 * ALL


def test_the_reserve_is_held_by_every_layout() -> None:
    found = predict(layout(), trainer=replace(PLAIN, reserve_bytes=0.25 * GIB))
    assert found.reserve[0] == 2**28
    assert found.total[0] == 2**28 + predict(layout()).total[0]


def test_stages_balanced_by_work_count_the_head_as_layers() -> None:
    """The head's 300 weights are 1.04 of a layer's 288: 5.04 in two stages, 2.52 each."""
    trainer = replace(PLAIN, stages_by_work=True)
    of = layout("full", pipeline_parallel_size=2)
    first, last = (predict(of, trainer=trainer, stage=stage) for stage in (Stage.FIRST, Stage.LAST))
    # 2.52, rounded up; the last stage has the head and 1.48 layers, rounded up.
    assert (first.activations[0], last.activations[0]) == (3 * 8 * 12, 2 * 8 * 12)
    # A single stage has all layers; many words leave the last stage none.
    assert predict(layout("full"), trainer=trainer).activations[0] == 4 * 8 * 12
    many = replace(MODEL, vocab_size=5000)
    found = predict(of, trainer=trainer, model=many, stage=Stage.LAST)
    assert found.activations[0] == 0
    assert predict(of, trainer=trainer, model=many, stage=Stage.FIRST).activations[0] == 4 * 8 * 12


# Workload llama. As PLAIN, its optimizer widens nothing.
OURS = replace(
    PLAIN,
    fully_shards=True,
    frees_gradients=True,
    reduce_bytes=4.0,
    pipeline_buffers=True,
    gathers_context=True,
)


def schedule(of: Layout, text: str) -> Layout:
    return replace(of, pipeline_schedule=PipelineSchedule.parse(text))


@pytest.mark.parametrize(
    ("of", "trainer", "bytes_per_weight"),
    # Weights, gradients and optimizer states. Gradients that come and go are counted at their
    # moment.
    [
        (layout(data_parallel_size=4, zero_stage=1, grad_accum_steps=2), OURS, (1, 1, 2)),
        (layout(data_parallel_size=4, zero_stage=3, grad_accum_steps=2), OURS, (1, 1, 2)),
        (layout(data_parallel_size=4, zero_stage=1), OURS, (1, 0, 2)),
        (layout(context_parallel_size=4, zero_stage=1), OURS, (1, 0, 2)),
        (
            layout(data_parallel_size=4, zero_stage=1),
            replace(OURS, frees_gradients=False),
            (1, 1, 2),
        ),
        (layout(data_parallel_size=4, zero_stage=1), replace(OURS, replicas=2), (2, 0, 4)),
        (layout(data_parallel_size=4), OURS, (2, 4, 12)),
        (layout(grad_accum_steps=2), OURS, (2, 4, 12)),
        (layout(), OURS, (2, 0, 12)),
        (layout(), replace(OURS, gradient_bytes=2.0), (2, 0, 12)),
        # Sums in fp32 stay beside gradients in half precision.
        (layout(), replace(OURS, gradient_bytes=5.0), (2, 5, 12)),
        (fp32(), OURS, (4, 0, 8)),
        (replace(fp32(), grad_accum_steps=2), OURS, (4, 4, 8)),
        # One rank shards nothing.
        (layout(zero_stage=1, grad_accum_steps=2), OURS, (2, 4, 12)),
    ],
)
def test_shards_are_masters_and_need_no_copy(
    of: Layout, trainer: Trainer, bytes_per_weight: tuple[float, float, float]
) -> None:
    found = predict(of, trainer=trainer)
    assert (found.parameters[0], found.gradients[0], found.optimizer[0]) == tuple(
        each * ALL for each in bytes_per_weight
    )


def test_tensor_parallelism_does_not_cut_norms() -> None:
    of = layout(tensor_parallel_size=2, grad_accum_steps=2)
    weights = 4 * ((LAYER - 12) / 2 + 12) + EMBEDDING + NORM
    assert predict(of, trainer=OURS).parameters[0] == 2 * weights
    tied = replace(MODEL, tied_embeddings=True)
    assert predict(of, trainer=OURS, model=tied).parameters[0] == 2 * (weights - EMBEDDING / 2)


@pytest.mark.parametrize(
    ("num_layers", "stages", "text", "first", "last"),
    [
        (4, 3, "1f1b", 2, 1),
        (5, 3, "1f1b", 2, 1),
        (6, 3, "1f1b", 2, 2),
        # A rank has every second one of four virtual stages.
        (6, 2, "interleaved:2", 2 + 1, 2 + 1),
        (7, 2, "interleaved:2", 2 + 2, 2 + 1),
        (5, 2, "interleaved:2", 2 + 1, 1 + 1),
    ],
)
def test_the_first_stages_have_one_layer_more(
    num_layers: int, stages: int, text: str, first: int, last: int
) -> None:
    of = schedule(layout(pipeline_parallel_size=stages, grad_accum_steps=4), text)
    model = replace(MODEL, num_layers=num_layers)
    for stage, layers, rest in (
        (Stage.FIRST, first, EMBEDDING),
        (Stage.LAST, last, EMBEDDING + NORM),
    ):
        found = predict(of, trainer=OURS, model=model, stage=stage)
        assert found.parameters[0] == 2 * (layers * LAYER + rest)


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        # Two layers of 96 bytes a micro-batch: of two micro-batches, of one, and a result that was
        # sent. The last stage's input is its buffer.
        ("1f1b", 2 * 192 + 2 * 96, 192),
        # All four; and three heads of 8 tokens: 2eh + 4 and 4V.
        ("gpipe", 4 * 192, 4 * 192 + 3 * 8 * (24 + 4 + 4) - 4 * 96),
        # (2 - 1) 2 + 2 * 2 - 1 = 5 of a layer each, and 3; each sends its result, two more are on
        # their way.
        ("interleaved:2", 5 * 96 + 7 * 96, 3 * 96 + 5 * 96),
    ],
)
def test_a_schedule_decides_what_waits(text: str, first: int, last: int) -> None:
    of = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=4), text)
    for stage, bytes_ in ((Stage.FIRST, first), (Stage.LAST, last)):
        found = predict(of, trainer=OURS, model=FEW_WORDS, stage=stage)
        assert found.activations[0] == bytes_


def test_unequal_virtual_stages_wait_as_the_first_one() -> None:
    """Five layers in four stages: 2 and 1. Four micro-batches of the first wait, one of the other.

    Full: nine inputs of a layer, and seven results.
    """
    of = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=8), "interleaved:2")
    model = replace(FEW_WORDS, num_layers=5)
    found = predict(of, trainer=OURS, model=model, stage=Stage.FIRST)
    assert found.activations[0] == pytest.approx((4 * 2 + 1) * 96 + 7 * 96)


def test_the_first_layers_of_the_model_are_recomputed_wherever_they_are() -> None:
    """Two of four: all of the first stage's, none of the last one's; in turn, one of each."""
    two = layout("full:2", pipeline_parallel_size=2, grad_accum_steps=2)
    few = replace(OURS, pipeline_buffers=False)
    first, last = (
        predict(two, trainer=few, model=FEW_WORDS, stage=stage)
        for stage in (Stage.FIRST, Stage.LAST)
    )
    assert (first.activations[0], last.activations[0]) == (2 * 8 * 24, 8 * 360)
    three = replace(two, recompute=Recompute.parse("full:3"))
    found = predict(three, trainer=few, model=FEW_WORDS, stage=Stage.LAST)
    assert found.activations[0] == 8 * (12 + 180)
    # The last stage of five layers begins behind three.
    four = replace(two, recompute=Recompute.parse("full:4"))
    model = replace(FEW_WORDS, num_layers=5)
    found = predict(four, trainer=few, model=model, stage=Stage.LAST)
    assert found.activations[0] == 8 * (12 + 180)
    turns = schedule(replace(two, grad_accum_steps=4), "interleaved:2")
    found = predict(turns, trainer=few, model=FEW_WORDS, stage=Stage.LAST)
    assert found.activations[0] == 1.5 * 8 * (12 + 180)


def test_few_micro_batches_bound_what_waits() -> None:
    of = schedule(layout("full", pipeline_parallel_size=4, grad_accum_steps=4), "interleaved:2")
    model = replace(FEW_WORDS, num_layers=8)
    # 4 + 8 - 1 = 11 of 8 that there are; and ten results.
    found = predict(of, trainer=OURS, model=model, stage=Stage.FIRST)
    assert found.activations[0] == 8 * 96 + 10 * 96
    # Three layers in unequal virtual stages: two micro-batches wait in all of them.
    two = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=2), "interleaved:2")
    found = predict(two, trainer=OURS, model=replace(model, num_layers=5), stage=Stage.FIRST)
    assert found.activations[0] == 2 * 3 * 96 + 6 * 96


@pytest.mark.parametrize(
    ("text", "buffers"),
    # Four of gradients, or of activations. With two virtual stages each: four of three kinds.
    [("1f1b", 4), ("gpipe", 4), ("interleaved:2", 12)],
)
def test_a_stage_keeps_a_buffer_for_each_micro_batch(text: str, buffers: int) -> None:
    of = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=4), text)
    without = replace(OURS, pipeline_buffers=False)
    for stage in (Stage.FIRST, Stage.LAST):
        held, none = (
            predict(of, trainer=trainer, model=FEW_WORDS, stage=stage)
            for trainer in (OURS, without)
        )
        sent = held.activations[0] - none.activations[0]
        assert held.total[0] - none.total[0] == buffers * 96 + sent
    half = replace(of, tensor_parallel_size=2)
    held, none = (
        predict(half, trainer=trainer, model=FEW_WORDS, stage=Stage.FIRST)
        for trainer in (OURS, without)
    )
    sent = held.activations[0] - none.activations[0]
    assert held.total[0] - none.total[0] == buffers * 48 + sent
    assert predict(layout(), trainer=OURS).total[0] == predict(layout(), trainer=without).total[0]


@pytest.mark.parametrize(
    ("of", "trainer", "bytes_per_token"),
    [
        # Keys and values of the other rank, 2ek = 8; the pieces' results side by side, eh = 12.
        (layout(context_parallel_size=2), OURS, 180 + 8 + 12),
        (layout(context_parallel_size=4), OURS, 180 + 3 * 8 + 12),
        (layout("selective_attention", context_parallel_size=2), OURS, 168 + 8),
        # e (3h + 2k + f) + 4a: both regions' inputs, w1's result, attention's.
        (layout("selective_ops"), OURS, 76),
        (layout("selective_ops"), replace(OURS, eager_attention=True), 64 + 48),
        (layout("selective_ops", context_parallel_size=2), OURS, 76 + 8 + 12),
        (layout("full", context_parallel_size=2), OURS, 12),
        # Masks of two pieces of 2 queries, of 10 keys in all; of pieces of 1, 9.
        (layout(context_parallel_size=2), replace(OURS, has_masks=True), 200 + 2 * 10 / 2),
        (layout(context_parallel_size=4), replace(OURS, has_masks=True), 216 + 2 * 9 / 2),
        (
            layout(context_parallel_size=2, micro_batch_size=4),
            replace(OURS, has_masks=True),
            200 + 2 * 10 / 8,
        ),
        (
            layout("selective_ops", context_parallel_size=2),
            replace(OURS, has_masks=True),
            96 + 2 * 10 / 2,
        ),
        (
            layout("selective_attention", context_parallel_size=2),
            replace(OURS, has_masks=True),
            176,
        ),
        # Others exchange keys and values in a ring.
        (layout(context_parallel_size=2), PLAIN, 180),
        # Scores of 5 keys on average, of 3 heads: 6 bytes each; e (8h + 4f) + 8 besides.
        (
            layout(context_parallel_size=2),
            replace(OURS, eager_attention=True),
            184 + 6 * 3 * 5 + 8 + 12,
        ),
        (
            layout("selective_ops", context_parallel_size=2),
            replace(OURS, eager_attention=True),
            64 + 2 * 3 * 5 + 8 + 12,
        ),
        # A head of keys and values for each head of queries: 2e (h - k) more, unless recomputed.
        (layout(), replace(OURS, repeats_keys=tuple(Precision)), 180 + 16),
        (layout("selective_ops"), replace(OURS, repeats_keys=tuple(Precision)), 76 + 16),
        (layout("selective_attention"), replace(OURS, repeats_keys=tuple(Precision)), 168),
        (layout(), replace(OURS, repeats_keys=(Precision.FP32,)), 180),
        # Compiled: the activation of SwiGLU is computed again, and attention with its result.
        (layout(), replace(OURS, compiled=True), 180 - 20),
        (layout("selective_attention"), replace(OURS, compiled=True), 168 - 20 - 12),
        (layout("full"), replace(OURS, compiled=True), 12),
        (layout("full"), replace(OURS, compiled=True, keeps_recomputed_products=True), 12 + 20),
        (layout(), replace(OURS, activation_factor=1.5), 270),
    ],
)
def test_layers_of_ours_keep_so_many_bytes_of_each_token(
    of: Layout, trainer: Trainer, bytes_per_token: float
) -> None:
    tokens = of.micro_batch_size * LENGTH // of.context_parallel_size
    found = predict(of, trainer=trainer)
    assert found.activations[0] == pytest.approx(tokens * 4 * bytes_per_token)


@pytest.mark.parametrize(
    ("of", "trainer", "bytes_per_token"),
    [
        (layout(tensor_parallel_size=2), OURS, 8 + 24 + 74),
        # A pipeline gathers and keeps as much as a single stage.
        (
            layout(tensor_parallel_size=2, pipeline_parallel_size=4, grad_accum_steps=1),
            OURS,
            8 + 24 + 74,
        ),
        (layout("selective_ops", tensor_parallel_size=2), OURS, 38),
        (layout(tensor_parallel_size=2, context_parallel_size=2), OURS, 8 + 24 + 74 + 4 + 6),
        (layout(tensor_parallel_size=2), replace(OURS, compiled=True), 8 + 24 + 74 - 10),
    ],
)
def test_two_tensor_parallel_ranks_of_ours_keep_what_they_gathered(
    of: Layout, trainer: Trainer, bytes_per_token: float
) -> None:
    tokens, layers = LENGTH // of.context_parallel_size, 4 // of.pipeline_parallel_size
    found = predict(of, trainer=replace(trainer, pipeline_buffers=False), stage=Stage.FIRST)
    sent = 0
    if of.pipeline_parallel_size > 1:
        found = predict(of, trainer=trainer, stage=Stage.FIRST)
        sent = 48
    assert found.activations[0] == tokens * layers * bytes_per_token + sent


def above(of: Layout, trainer: Trainer, **options: Any) -> float:
    found = predict(of, trainer=trainer, **options)
    return float((found.activations + found.temporaries)[0])


TWO = {"grad_accum_steps": 2}


@pytest.mark.parametrize(
    ("recompute", "bytes_per_token"),
    # None: 4 * 180 kept, 52 of gradients; full: 4 * 12, 168 computed again. By regions: 4 * 76, of
    # 180 - 76 all but the norm's result and scale before attention.
    [("none", 720 + 52), ("full", 48 + 168 + 52), ("selective_ops", 304 + 104 - 16 + 52)],
)
def test_the_last_layer_of_ours_is_at_its_fullest_in_its_feed_forward(
    recompute: str, bytes_per_token: int
) -> None:
    trainer = replace(OURS, logit_bytes=0.0)
    found = above(layout(recompute, **TWO), trainer, model=FEW_WORDS, length=64)
    assert found == 64 * bytes_per_token
    # A rank that shares no layer with another sums no results up.
    copied = replace(trainer, copied_reductions=1.0)
    assert above(layout(recompute, **TWO), copied, model=FEW_WORDS, length=64) == found


def test_regions_of_two_tensor_parallel_ranks_gather_later() -> None:
    """38 a layer; of the 106 - 38 others, 12 of the gathered norm come later."""
    trainer = replace(OURS, logit_bytes=0.0)
    of = layout("selective_ops", tensor_parallel_size=2, **TWO)
    found = above(of, trainer, model=FEW_WORDS, length=64)
    assert found == 64 * (4 * 38 + (106 - 38) - 2 - 12 + 26)


def test_a_norm_that_is_gathered_in_part_comes_later_in_part() -> None:
    """Half of what the ranks gathered is kept: 3/4 of it, of 24 in a layer and 12 of the norm."""
    trainer = replace(OURS, logit_bytes=0.0, gathered_inputs=0.5)
    of = layout("selective_ops", tensor_parallel_size=2, **TWO)
    found = above(of, trainer, model=FEW_WORDS, length=64)
    assert found == 64 * (4 * 38 + (8 + 18 + 74 - 38) - 2 - 9 + 26)


def test_gradients_appear_in_the_backward_pass_of_a_step_of_one_micro_batch() -> None:
    """4 bytes a weight: of the head, of 3 layers and of a product of the first, in fp32."""
    of = replace(fp32("full"), grad_accum_steps=1)
    few = replace(OURS, logit_bytes=0.0)
    first = 2 * (24 + 340 - 24 + 104) - 24 * 0
    found = above(of, few, length=2)
    made = 4 * (306 + 3 * LAYER + 60)
    late = 4 * (306 + 4 * LAYER) + 2 * 6 * 16
    step = 4 * ALL
    assert found == max(first + made, late, step)
    # With more tokens, the last layer: all four inputs, and only the head's gradients.
    tokens = 512
    last = tokens * (4 * 24 + 316 + 104) + 4 * (306 + 60)
    again = tokens * (24 + 316 + 104) + made
    assert above(of, few, length=tokens) == max(last, again)


def test_a_loss_in_chunks_holds_the_logits_of_one() -> None:
    """12 V a token of a chunk; 3eh + 4 of all; the head's gradient, eVh.

    Of the three, the norm's input is split by sequence parallelism.
    """
    # 1024 / 4; 1024 / 3, rounded up; at least 128; or all.
    for length, chunks, tokens in ((1024, 4, 256), (1024, 3, 342), (300, 8, 128), (8, 8, 8)):
        trainer = replace(OURS, loss_chunks=chunks)
        found = predict(layout(**TWO), trainer=trainer, length=length)
        assert found.loss[0] == tokens * 600 + length * 40 + 600
    of = layout(tensor_parallel_size=2, **TWO)
    half = predict(of, trainer=replace(OURS, loss_chunks=4), length=1024)
    # Tensor-parallel ranks keep a chunk's logits, 4 V more, until they have exchanged sums.
    assert half.loss[0] == 256 * 16 * 25 + 1024 * (24 + 6 + 4) + 300
    whole = predict(layout(tensor_parallel_size=2, **TWO), trainer=OURS)
    assert whole.loss[0] == 8 * (12 + 6 + 4 + 300)
    short = predict(layout(tensor_parallel_size=2, **TWO), trainer=OURS, length=1)
    assert short.loss[0] + short.workspace[0] >= 24 + 6 + 50 + 300


def test_a_head_of_many_micro_batches_keeps_gradients_in_chunks() -> None:
    """GPipe's last stage: 2eh + 4 a token, and eVh; three times."""
    of = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=4), "gpipe")
    trainer = replace(OURS, loss_chunks=4, pipeline_buffers=False)
    found = predict(of, trainer=trainer, stage=Stage.LAST)
    assert found.activations[0] == 4 * 192 + 3 * (8 * 28 + 600)


def test_an_all_reduce_widens_its_buckets() -> None:
    """In half precision: 4 bytes a weight of a bucket, and the embedding's gradient of 600."""
    trainer = replace(OURS, gradient_bytes=2.0, logit_bytes=0.0, reduction_bucket_bytes=1e9)
    of = layout("full", data_parallel_size=2)
    # The optimizer widens as much, without the embedding's gradient and the hidden state's.
    assert above(of, trainer, length=1) == 4 * ALL + 600 + 12
    assert above(of, replace(trainer, gradient_bytes=3.0), length=1) == 4 * ALL + 600 + 12
    # Gradients of 4 bytes are fp32: the head's backward is the fullest, with four layers' inputs.
    wide = replace(trainer, gradient_bytes=4.0)
    assert above(of, wide, length=1) == 4 * 12 + 3 * 12 + 100 + 600
    small = replace(trainer, reduction_bucket_bytes=200.0)
    assert above(of, small, length=1) == 4 * ALL
    assert above(of, replace(trainer, reduce_bytes=2.0), length=1) == 4 * ALL
    # A pipeline puts them together first: 2 bytes more.
    stage = 2 * LAYER + EMBEDDING
    two = layout("full", data_parallel_size=2, pipeline_parallel_size=2, grad_accum_steps=2)
    no_buffers = replace(trainer, pipeline_buffers=False)
    assert above(two, no_buffers, length=1, stage=Stage.FIRST) == 6 * stage
    # Two buckets of 100 weights are under way.
    few = replace(no_buffers, reduction_bucket_bytes=200.0)
    assert above(two, few, length=1, stage=Stage.FIRST) == 4 * stage
    # Buckets of 350 weights: 6 bytes of two of them are more than the 4 of the stage's 876.
    some = replace(no_buffers, reduction_bucket_bytes=700.0)
    assert above(two, some, length=1, stage=Stage.FIRST) == 6 * 2 * 350
    whole = replace(two, precision=Precision.FP32)
    assert above(whole, no_buffers, length=1, stage=Stage.FIRST) == 4 * stage


def test_the_fullest_moment_of_shards_is_one_of_the_moments() -> None:
    """Weights that dwarf the tokens: the head is reduced, with all other units gathered."""
    of = layout("full", data_parallel_size=4, zero_stage=1)
    copied = replace(OURS, copied_reductions=1.0, logit_bytes=0.0)
    gathered = 2 * (4 * LAYER + EMBEDDING)
    # 4 + 4 + 1 bytes of the head's weights, and their gradient; four inputs of 12 bytes, and one
    # that flows.
    assert above(of, copied, length=1) == gathered + (9 + 2) * 306 + 5 * 12
    # Without a copy: all of the last layer's gradients, beside the head's input and its shard; 16
    # bytes an element of its norm.
    plain = replace(copied, copied_reductions=0.0)
    assert above(of, plain, length=1) == gathered + (4 + 1) * 306 + 2 * LAYER + 16 * 6 + 3 * 12


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    # 1,170 weights: 12 of the head, 288 of each layer, 6 of the embedding. In reduction a gradient
    # has 4 + 4 + 1 bytes over four shards, beside 2 of the 60 of a product: 2,712.
    [
        # The other units are gathered; the head's shard is made.
        ({}, {}, 2 * (3 * 288 + 6) + 12 + 2712),
        ({}, {"scatters_each": False}, 2 * (3 * 288 + 6) + 12 + 2712),
        # All stay gathered for the next micro-batch.
        (TWO, {}, 2 * 1170 + 2712),
        ({**TWO, "zero_stage": 2}, {}, 2 * 1170 + 2712),
        # The next layer is gathered meanwhile.
        ({**TWO, "zero_stage": 3}, {}, 2 * 288 + 2712),
        # All gradients stay whole, in fp32; that of the layer is the input of its reduction.
        (TWO, {"scatters_each": False}, 2 * (3 * 288 + 6) + 4 * 1170 + 2712 - 4 * 288),
        # Two shards of all sums; a reduction's result is half of its input. Two micro-batches
        # hold sums in the last one only.
        (TWO, {"replicas": 2}, 2 * 1170 + 2 * (3 * 288 + 6) + 10 * 288 + 120),
        ({"grad_accum_steps": 3}, {"replicas": 2}, 2 * 1170 + 2 * 1170 + 10 * 288 + 120),
        ({}, {"replicas": 2}, 2 * 12 + 2 * (3 * 288 + 6) + 10 * 288 + 120),
    ],
)
def test_weights_that_dwarf_the_tokens_are_fullest_while_the_last_layer_is_reduced(
    sizes: dict[str, int], options: dict[str, Any], expected: int
) -> None:
    """Three inputs of 12 bytes wait then, and one flows."""
    trainer = replace(OURS, copied_reductions=1.0, logit_bytes=0.0, scatters_each=True)
    of = layout("full", **{"data_parallel_size": 4, "zero_stage": 1, **sizes})
    found = above(of, replace(trainer, **options), model=FEW_WORDS, length=1)
    assert found == expected + 4 * 12


def test_tensor_parallel_ranks_reduce_their_parts_of_products() -> None:
    """150 weights of a layer, 9 of the head, 3 of the embedding; a product has 30."""
    trainer = replace(OURS, copied_reductions=1.0, logit_bytes=0.0)
    of = layout("full", data_parallel_size=4, zero_stage=1, tensor_parallel_size=2)
    found = above(of, trainer, model=FEW_WORDS, length=1)
    assert found == 2 * (3 * 150 + 3) + 9 + 9 * 150 + 2 * 30 + 4 * 6


def test_gathered_weights_are_beside_the_logits_and_beside_sums_of_results() -> None:
    of = layout(data_parallel_size=4, zero_stage=1)
    found = predict(of, trainer=OURS)
    assert (found.loss[0], found.workspace[0]) == (8 * 628 + 2 * ALL, 0)
    # In a chunk, the buffer of the head's gather as well.
    chunked = predict(of, trainer=replace(OURS, loss_chunks=1))
    assert chunked.loss[0] == 8 * 640 + 600 + 2 * ALL + 2 * 306
    trainer = replace(OURS, copied_reductions=1.0, logit_bytes=0.0, scatters_each=True)
    two = replace(of, tensor_parallel_size=2, grad_accum_steps=2)
    # Each rank has 612 weights.
    found = predict(two, trainer=trainer, model=FEW_WORDS, length=64)
    assert (found.loss[0], found.workspace[0]) == (0, 64 * 54 + 2 * 612)


def test_tied_embeddings_of_ours_end_with_three_gradients_of_the_table() -> None:
    """It has 200 words: gradients of the head, the embedding, their sum and the hidden state."""
    tied = replace(MODEL, vocab_size=200, tied_embeddings=True)
    trainer = replace(OURS, logit_bytes=0.0)
    assert above(layout("full", **TWO), trainer, model=tied, length=1) == 3 * 2 * 200 * 6 + 12


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_first_layer_is_the_fullest_where_gradients_grow_faster_than_inputs_go(
    factor: float,
) -> None:
    """In fp32: its own input, what it computes again, and 4 bytes of each gradient by then."""
    trainer = replace(OURS, logit_bytes=0.0, activation_factor=factor)
    found = above(fp32("full"), trainer, length=16)
    assert found == 16 * (factor * 24 + 340 - 24 + 104) + 4 * (306 + 3 * LAYER + 60)


def test_the_norm_of_a_single_layer_is_the_fullest_once_all_its_gradients_are_made() -> None:
    """16 bytes of each of 6 elements, of two tokens; 4 of the gradients of layer and head."""
    trainer = replace(OURS, logit_bytes=0.0)
    model = replace(FEW_WORDS, num_layers=1)
    found = above(fp32("full"), trainer, model=model, length=2)
    assert found == 2 * 16 * 6 + 4 * (LAYER + 12)


def test_eager_attention_of_regions_is_at_its_fullest_in_its_backward_pass() -> None:
    """With 64 keys and 3 heads, 2 * 3 * 64 + 64 bytes are kept of a token and layer.

    In the backward pass, 12 * 3 * 64 of scores come on top, and e(h - f) = -8: w1's result is freed
    by then.
    """
    trainer = replace(OURS, eager_attention=True, logit_bytes=0.0)
    found = above(layout("selective_ops", **TWO), trainer, model=FEW_WORDS, length=64)
    assert found == 64 * (4 * (384 + 64) + 2304 - 8)


def test_tensor_parallel_ranks_sum_up_a_layer_s_result_with_copies() -> None:
    """With gloo: the whole result twice, a copy of each, and the part: e h (4 + 1/2) a token.

    That is more than the 26 of the last layer's widest products.
    """
    trainer = replace(OURS, copied_reductions=1.0, logit_bytes=0.0)
    found = above(layout(tensor_parallel_size=2, **TWO), trainer, model=FEW_WORDS, length=64)
    assert found == 64 * (4 * 106 + 12 * 4.5)


def test_fp32_gradients_are_not_widened_by_the_optimizer_s_step() -> None:
    """It makes 4 bytes a weight from the 2 of bf16 gradients; fp32 ones have 4."""
    trainer = replace(OURS, gradient_bytes=2.0, logit_bytes=0.0, frees_gradients=False)
    half = replace(fp32("full"), precision=Precision.BF16)
    assert above(half, trainer, length=1) == 4 * ALL
    assert above(half, replace(trainer, gradient_bytes=3.0), length=1) == 4 * ALL
    assert above(fp32("full"), trainer, length=1) < 4 * ALL


def test_a_loss_in_one_chunk_keeps_gradients_instead_of_log_softmax() -> None:
    """The last stage's other micro-batches keep 2eh + 4 a token, and eVh; else 4V a token."""
    of = schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=4), "gpipe")
    plain = replace(OURS, pipeline_buffers=False)
    one = predict(of, trainer=replace(plain, loss_chunks=1), stage=Stage.LAST)
    assert one.activations[0] == 4 * 192 + 3 * (8 * 28 + 600)
    whole = predict(of, trainer=plain, stage=Stage.LAST)
    assert whole.activations[0] == 4 * 192 + 3 * 8 * (28 + 4 * 50)
    # Two ranks share the norm's input, not its result, and the words.
    half = predict(replace(of, tensor_parallel_size=2), trainer=plain, stage=Stage.LAST)
    assert half.activations[0] == 4 * 96 + 3 * 8 * (12 + 6 + 4 + 4 * 25)


MANY = [
    layout(),
    fp32(),
    layout("full", grad_accum_steps=2),
    replace(fp32("full"), grad_accum_steps=2),
    layout("selective_ops", context_parallel_size=2),
    replace(fp32("selective_ops"), context_parallel_size=2),
    layout("selective_attention", context_parallel_size=4, micro_batch_size=2),
    layout("full:3", tensor_parallel_size=2, data_parallel_size=2),
    layout("selective_ops", tensor_parallel_size=2, pipeline_parallel_size=4, grad_accum_steps=3),
    layout("full:2", pipeline_parallel_size=2, data_parallel_size=2, grad_accum_steps=4),
    schedule(layout("full", pipeline_parallel_size=2, grad_accum_steps=4), "gpipe"),
    schedule(layout("full:2", pipeline_parallel_size=2, grad_accum_steps=4), "interleaved:2"),
    *(
        layout("full", data_parallel_size=4, zero_stage=stage, grad_accum_steps=steps)
        for stage in (0, 1, 2, 3)
        for steps in (1, 2, 3)
    ),
    replace(fp32(), data_parallel_size=4, zero_stage=3),
]
ALL_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "workspace",
    "reserve",
)


@pytest.mark.parametrize(
    "trainer",
    [
        PLAIN,
        EAGER,
        Trainer(bucket_bytes=1.0, gathered_inputs=0.5, gathered_inputs_in_pipeline=0.2),
        OURS,
        replace(OURS, has_masks=True, gradient_bytes=2.0, reduction_bucket_bytes=600.0),
        replace(OURS, eager_attention=True, repeats_keys=(Precision.FP32,)),
        replace(OURS, replicas=2, scatters_each=True, copied_reductions=1.0),
        replace(OURS, compiled=True, loss_chunks=2, logit_bytes=6.0),
    ],
)
@pytest.mark.parametrize("model", [MODEL, FEW_WORDS], ids=["words", "few words"])
def test_layouts_of_one_table_are_predicted_as_each_alone(
    trainer: Trainer, model: ModelShape
) -> None:
    cell = Cell(model=model, num_gpus=1, sequence_length=LENGTH, global_batch_size=1)
    table = LayoutTable.of(MANY)
    for stage in Stage:
        total = predict_memory(table, cell, trainer, stage=stage).total
        assert predict_peak(table, cell, trainer, stage=stage) == pytest.approx(total)
    found = predict_memory(table, cell, trainer)
    for row, one in enumerate(MANY):
        alone = predict(one, trainer=trainer, model=model)
        for part in ALL_PARTS:
            assert getattr(found, part)[row] == pytest.approx(getattr(alone, part)[0]), part

"""Predicted memory: arithmetic that can be checked by hand, and the order that a proven
out-of-memory relies on.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.physics.memory import (
    MemoryPrediction,
    Peaks,
    Stage,
    predict_memory,
)
from orchestrator.core.physics.traced_memory import TracedBytes, TracedMemory, TracedMode
from orchestrator.core.physics.trainer import (
    MEMORY_CONSTANTS,
    TRAINERS,
    Trainer,
    llama_trainer,
)
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.dominance import needs_at_least
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.llama_rules import refusal
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from tests.examples import examples

LLAMA_8B = PRESETS["llama-3.1-8b"]
PARAMETERS_8B = 8_030_261_248


def predict(
    *layouts: Layout,
    model: ModelShape = LLAMA_8B,
    sequence_length: int = 4096,
    trainer: Trainer | None = None,
) -> MemoryPrediction:
    cell = Cell(
        model=model,
        num_gpus=layouts[0].world_size,
        sequence_length=sequence_length,
        global_batch_size=layouts[0].global_batch_size,
    )
    return predict_memory(LayoutTable.of(layouts), cell, trainer or Trainer())


def states(prediction: MemoryPrediction) -> float:
    return float((prediction.parameters + prediction.gradients + prediction.optimizer)[0])


@pytest.mark.parametrize(
    ("precision", "fp32_accumulation", "bytes_per_parameter"),
    [
        (Precision.FP32, False, 16),
        (Precision.BF16, False, 16),
        (Precision.FP16, False, 16),
        # Only products are in fp8: weights and gradients stay bf16.
        (Precision.FP8, False, 16),
        (Precision.BF16, True, 20),
    ],  # FIELD: 4+4+8; 2+2+4+8; +4
)
def test_states_take_the_bytes_per_parameter_of_the_literature(
    precision: Precision, fp32_accumulation: bool, bytes_per_parameter: int
) -> None:
    prediction = predict(
        Layout(precision=precision),
        trainer=Trainer(gradient_bytes=6.0 if fp32_accumulation else 2.0),
    )
    assert states(prediction) == bytes_per_parameter * PARAMETERS_8B


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"),
    [
        (0, 2 + 2 + 12),
        (1, 2 + 2 + 12 / 8),
        (2, 2 + (2 + 12) / 8),
        (3, (2 + 2 + 12) / 8),
    ],  # Rajbhandari et al. 2020, 8 ranks
)
def test_zero_shards_optimizer_then_gradients_then_parameters(
    zero_stage: int, bytes_per_parameter: float
) -> None:
    prediction = predict(Layout(data_parallel_size=8, zero_stage=zero_stage))
    assert states(prediction) == pytest.approx(bytes_per_parameter * PARAMETERS_8B)


@pytest.mark.parametrize(
    ("precision", "zero_stage", "bytes_per_weight"),
    # 4: gradients widened to fp32. Sharded over 8 ranks that is 1/2, and the gathered weights come
    # on top, in their own dtype: 2 or 4 bytes.
    [
        (Precision.BF16, 0, 4),
        (Precision.FP32, 0, 0),
        (Precision.BF16, 1, 2.5),
        (Precision.FP32, 1, 4),
    ],
)
def test_an_optimizer_step_works_on_a_chunk_of_the_weights(
    precision: Precision, zero_stage: int, bytes_per_weight: float
) -> None:
    layout = Layout(
        data_parallel_size=8,
        precision=precision,
        zero_stage=zero_stage,
        recompute=Recompute.parse("full"),
    )
    few_words = dataclasses.replace(LLAMA_8B, vocab_size=256)
    # So few and so short that the step's end is its peak.
    prediction = predict(layout, model=few_words, sequence_length=1)
    above = float((prediction.activations + prediction.temporaries)[0])
    assert above == bytes_per_weight * (1 << 26) if bytes_per_weight else above < 1 << 26


def test_the_loss_of_a_large_vocabulary_takes_12_bytes_a_logit() -> None:
    # Traced: 11.7 GiB at 8,192 tokens and 128k vocabulary; and the final norm's input and output.
    assert predict(Layout(), sequence_length=8192).temporaries[0] == 8192 * (
        12 * 128_256 + 2 * 2 * 4096 + 4
    )


def test_of_a_short_sequence_the_gradient_of_the_head_is_the_peak() -> None:
    # T (3 e h + e V) + e V h. The gradient is all weights of the head: 1.05 GB in bf16,
    # whatever the tokens.
    above = (2 * 64) * (3 * 4096 + 128_256) + 2 * 128_256 * 4096
    assert predict(Layout(), sequence_length=64).temporaries[0] == above


def test_tied_embeddings_hold_three_gradients_at_the_end_of_the_backward_pass() -> None:
    tied = dataclasses.replace(LLAMA_8B, tied_embeddings=True)
    prediction = predict(Layout(recompute=Recompute.parse("full")), model=tied, sequence_length=64)
    assert (
        float((prediction.activations + prediction.temporaries)[0]) == 3 * 2 * 128_256 * 4096
    )  # the head's, the embedding's, their sum


def test_tied_embeddings_hold_the_head_s_gradient_while_the_last_layer_is_at_its_peak() -> None:
    above = []
    for tied in (False, True):
        few_words = dataclasses.replace(LLAMA_8B, vocab_size=1024, tied_embeddings=tied)
        prediction = predict(Layout(), model=few_words, sequence_length=4096)
        above.append(float((prediction.activations + prediction.temporaries)[0]))
    assert above[1] - above[0] == 2 * 1024 * 4096


@pytest.mark.parametrize(
    (
        "recompute",
        "units",
        # Tokens x hidden bytes per layer, traced with flash attention and fused norms.
    ),
    [("none", 41.03), ("full", 2.00)],
)
def test_activations_kept_per_layer_agree_with_traces(recompute: str, units: float) -> None:
    per_layer = [
        predict(Layout(recompute=Recompute.parse(recompute)), model=_with_layers(n)).activations[0]
        for n in (8, 9)
    ]
    assert (per_layer[1] - per_layer[0]) / (4096 * 4096) == pytest.approx(units, rel=0.01)


def test_recomputing_the_first_layers_lies_between_none_and_all() -> None:
    none, some, full = (
        float(predict(Layout(recompute=Recompute.parse(text))).total[0])
        for text in ("none", "full:16", "full")
    )
    assert full < some < none


def test_eager_attention_adds_the_square_of_the_sequence_and_selective_recomputation_drops_it() -> (
    None
):
    eager = Trainer(eager_attention=True)
    none = predict(Layout(), trainer=eager).activations[0]
    attention = predict(
        Layout(recompute=Recompute.parse("selective_attention")), trainer=eager
    ).activations[0]
    assert attention < 0.3 * none


def _with_layers(num_layers: int) -> ModelShape:
    sizes = {name: getattr(LLAMA_8B, name) for name in LLAMA_8B.__slots__} | {
        "num_layers": num_layers,
        "name": f"cut-{num_layers}",
    }
    return ModelShape(**sizes)


POWERS = st.sampled_from([1, 2, 4, 8])
RECOMPUTES = st.sampled_from(
    ["none", "full", "full:4", "full:16", "selective_ops", "selective_ops:4", "selective_attention"]
).map(Recompute.parse)


@st.composite
def cells_layouts(draw: st.DrawFn) -> list[Layout]:
    """Layouts of one cell on one set of parallel sizes: an out-of-memory can compare them."""
    dp, tp, pp = draw(POWERS), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    return [
        Layout(
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=mbs,
            grad_accum_steps=32 // mbs,
            recompute=draw(RECOMPUTES),
            zero_stage=draw(st.integers(0, 3)),
        )
        for mbs in draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=2, max_size=6))
    ]


@given(
    cells_layouts(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([64, 4096]),
    st.sampled_from(sorted(TRAINERS)),
)
@settings(max_examples=examples(300))
def test_what_a_proof_condemns_is_never_predicted_to_need_less(
    layouts: list[Layout], tied: bool, eager: bool, length: int, trainer: str
) -> None:
    table = LayoutTable.of(layouts)
    model = dataclasses.replace(LLAMA_8B, tied_embeddings=tied)
    chosen = dataclasses.replace(TRAINERS[trainer], eager_attention=eager)
    total = predict(*layouts, model=model, sequence_length=length, trainer=chosen).total
    for row, layout in enumerate(layouts):
        condemned = needs_at_least(table, layout, num_layers=LLAMA_8B.num_layers)
        assert np.all(total[condemned] >= total[row] * (1 - 1e-12))


@given(
    cells_layouts(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([64, 4096]),
    st.fixed_dictionaries(
        {},
        optional={
            "compile": st.booleans(),
            "attention": st.sampled_from(["auto", "eager"]),
            "loss": st.sampled_from(["whole", "chunked:8"]),
            "accumulate": st.sampled_from(["scatter", "last"]),
            "gradient_dtype": st.sampled_from(["bf16", "fp32"]),
            "reduce_dtype": st.sampled_from(["bf16", "fp32"]),
            "replicas": st.sampled_from([1, 2]),
        },
    ),
)
@settings(max_examples=examples(300))
def test_no_layout_of_workload_llama_needs_less_than_one_that_a_proof_puts_below_it(
    layouts: list[Layout], tied: bool, on_gpu: bool, length: int, options: dict[str, object]
) -> None:
    first = layouts[0]
    model = dataclasses.replace(
        LLAMA_8B, tied_embeddings=tied and first.pipeline_parallel_size == 1
    )
    told = LlamaOptions.model_validate(options)
    legal = [
        one
        for one in layouts
        if refusal(one, model=model, sequence_length=length, options=told) is None
    ]
    if not legal:
        return
    table = LayoutTable.of(legal)
    trainer = llama_trainer(options, on_gpu=on_gpu)
    total = predict(*legal, model=model, sequence_length=length, trainer=trainer).total
    for row, layout in enumerate(legal):
        condemned = needs_at_least(
            table, layout, num_layers=LLAMA_8B.num_layers, sums_shards=told.replicas > 1
        )
        assert np.all(total[condemned] >= total[row] * (1 - 1e-12))


# Allocated bytes, from benchmarks/results/gpu-smoke-layouts_h200_2026-11-26.json.
@pytest.mark.parametrize(
    ("precision", "options", "measured"),
    [
        (Precision.BF16, {"attention": "flash", "compile": False}, 1_810_252_800),
        (Precision.BF16, {"attention": "flash", "compile": True}, 1_709_589_504),
        (Precision.BF16, {"compile": True, "gradient_dtype": "fp32"}, 1_941_359_616),
        (Precision.FP16, {"compile": True}, 1_709_592_064),
        # Its kernel has no groups, so keys and values are repeated: 64 MiB more.
        (Precision.FP32, {"compile": False}, 2_560_238_592),
        (Precision.FP32, {"compile": True}, 2_358_912_000),
    ],
)
def test_peaks_are_those_that_the_60m_had_on_a_gpu(
    precision: Precision, options: dict[str, object], measured: int
) -> None:
    layout = Layout(micro_batch_size=2, grad_accum_steps=2, precision=precision)
    trainer = llama_trainer(dict(LlamaOptions.model_validate(options)), on_gpu=True)
    found = predict(layout, model=PRESETS["llama-60m"], sequence_length=2048, trainer=trainer)
    assert found.total[0] == pytest.approx(measured, rel=0.001)


# Allocated bytes, from benchmarks/results/gpu-truth-1b_h200_2026-11-27.json.
@pytest.mark.parametrize(
    ("recompute", "micro_batch_size", "options", "measured"),
    [
        ("none", 16, {"loss": "chunked:8"}, 106_706_561_024),
        ("none", 16, {"loss": "chunked:8", "compile": False}, 123_886_430_208),
        ("selective_ops", 8, {"loss": "whole"}, 86_716_510_208),
        # A compiled layer keeps its product of queries, keys and values: 6 and 3 GiB of 16 layers.
        ("full", 16, {"loss": "chunked:8"}, 37_844_461_568),
        ("full", 16, {"loss": "whole"}, 129_509_924_352),
        ("full", 8, {"loss": "whole"}, 75_911_966_720),
        ("full", 8, {"loss": "chunked:8"}, 30_341_904_896),
        ("full", 8, {"loss": "chunked:8", "compile": False}, 27_120_679_424),
    ],
)
def test_peaks_are_those_that_the_1b_had_on_a_gpu(
    recompute: str, micro_batch_size: int, options: dict[str, object], measured: int
) -> None:
    layout = Layout(
        micro_batch_size=micro_batch_size,
        grad_accum_steps=16 // micro_batch_size,
        precision=Precision.BF16,
        recompute=Recompute.parse(recompute),
    )
    trainer = llama_trainer(dict(LlamaOptions.model_validate(options)), on_gpu=True)
    found = predict(layout, model=PRESETS["llama-3.2-1b"], sequence_length=4096, trainer=trainer)
    assert found.total[0] == pytest.approx(measured, rel=0.001)


def test_keys_are_repeated_by_the_kernel_that_has_no_groups() -> None:
    of_auto, of_efficient = (
        [llama_trainer({"attention": kind}, on_gpu=on_gpu).repeats_keys for on_gpu in (True, False)]
        for kind in ("auto", "efficient")
    )
    assert of_auto == [(Precision.FP32,), ()]
    assert of_efficient[0] == tuple(Precision)


def test_stages_balanced_by_work_put_more_layers_in_the_first_than_in_the_last() -> None:
    layout = Layout(pipeline_parallel_size=8, grad_accum_steps=8)
    cell = Cell(model=LLAMA_8B, num_gpus=8, sequence_length=4096, global_batch_size=8)
    even, by_work = (
        [
            predict_memory(LayoutTable.of([layout]), cell, trainer, stage=stage)
            for stage in (Stage.FIRST, Stage.LAST)
        ]
        for trainer in (Trainer(), Trainer(stages_by_work=True))
    )
    # The head's 525 M weights count as 2.4 layers: 34.4 layers in 8 stages, so 5 instead of 4 in
    # the first, 2 in the last.
    assert by_work[0].activations[0] / even[0].activations[0] == pytest.approx(5 / 4)
    assert by_work[1].activations[0] / even[1].activations[0] == pytest.approx(2 / 4)


def test_a_large_vocabulary_makes_the_last_stage_the_fullest() -> None:
    layout = Layout(
        pipeline_parallel_size=2,
        micro_batch_size=16,
        grad_accum_steps=1,
        recompute=Recompute.parse("full"),
    )
    cell = Cell(model=LLAMA_8B, num_gpus=2, sequence_length=4096, global_batch_size=16)
    first, last, fullest = (
        predict_memory(LayoutTable.of([layout]), cell, Trainer(), stage=stage)
        for stage in (Stage.FIRST, Stage.LAST, Stage.FULLEST)
    )
    assert last.total[0] > first.total[0]
    assert fullest.total[0] == last.total[0]
    assert fullest.loss[0] > 16 * 4096 * 12 * 128_256


def test_a_step_of_one_micro_batch_may_hold_fewer_logits() -> None:
    """Fused losses keep theirs: the share is of whatever a logit takes."""
    one, several = (Layout(micro_batch_size=8, grad_accum_steps=ga) for ga in (1, 2))
    for logit_bytes in (8.0, 1.0):
        trainer = Trainer(logit_bytes=logit_bytes, accumulated_logits=0.5)
        alone, again = (predict(layout, trainer=trainer) for layout in (one, several))
        assert alone.total[0] == predict(one, trainer=Trainer(logit_bytes=logit_bytes)).total[0]
        assert (
            again.total[0]
            == predict(several, trainer=Trainer(logit_bytes=1.5 * logit_bytes)).total[0]
        )


def test_zero_3_gathers_units_but_never_more_than_it_shared_out() -> None:
    layouts = [Layout(data_parallel_size=8, zero_stage=z) for z in (2, 3)]
    for model in (LLAMA_8B, dataclasses.replace(LLAMA_8B, num_layers=1)):
        two, three = predict(*layouts, model=model, trainer=Trainer(gathered_units=50)).total
        assert three <= two


def test_buckets_are_held_only_where_gradients_are_reduced_whole() -> None:
    trainer = Trainer(bucket_bytes=2.0)
    alone, together, sharded = (
        predict(layout, trainer=trainer).gradients[0] / PARAMETERS_8B
        for layout in (
            Layout(),
            Layout(data_parallel_size=8),
            Layout(data_parallel_size=8, zero_stage=1),
        )
    )
    assert (alone, together, sharded) == (2, 4, 2)


def test_a_pipeline_s_buckets_are_held_only_where_it_averages() -> None:
    """After its last micro-batch: two buckets, in half precision and, reduced in fp32, widened."""
    small, large = (llama_trainer({"bucket_megabytes": size}, on_gpu=False) for size in (1, 20_000))
    averages = Layout(data_parallel_size=4, pipeline_parallel_size=2, grad_accum_steps=4)
    sharded = dataclasses.replace(averages, zero_stage=1)
    alone = dataclasses.replace(averages, data_parallel_size=1)

    def more_by_larger_buckets(layout: Layout) -> float:
        one, other = (
            predict(layout, trainer=trainer, sequence_length=64).total[0]
            for trainer in (small, large)
        )
        return float(other - one)

    assert more_by_larger_buckets(averages) > 0
    assert more_by_larger_buckets(sharded) == more_by_larger_buckets(alone) == 0


PLAIN = TracedMode(
    kept=TracedBytes(per_token=1e5),
    backward=TracedBytes(per_token=2e5),
    head=TracedBytes(per_token=1e6),
)
ONE_MODE = TracedMemory(modes=(("none", PLAIN),))
TWO_MODES = TracedMemory(
    modes=(("none", PLAIN), ("full", dataclasses.replace(PLAIN, kept=TracedBytes(per_token=8e3))))
)


@given(
    cells_layouts(),
    st.sampled_from(sorted(TRAINERS)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, ONE_MODE, TWO_MODES]),
)
@settings(max_examples=examples(300))
def test_memory_of_any_trainer_never_falls_when_the_micro_batch_grows_or_recomputation_lessens(
    layouts: list[Layout],
    name: str,
    eager: bool,
    sequence_parallel: bool,
    traced: TracedMemory | None,
) -> None:
    trainer = dataclasses.replace(
        TRAINERS[name], eager_attention=eager, sequence_parallel=sequence_parallel, traced=traced
    )
    table = LayoutTable.of(layouts)
    cell = Cell(
        model=LLAMA_8B,
        num_gpus=layouts[0].world_size,
        sequence_length=4096,
        global_batch_size=layouts[0].global_batch_size,
    )
    total = predict_memory(table, cell, trainer).total
    for row, layout in enumerate(layouts):
        condemned = needs_at_least(table, layout, num_layers=LLAMA_8B.num_layers)
        assert np.all(total[condemned] >= total[row] * (1 - 1e-12))


@pytest.mark.parametrize("trainer", [*TRAINERS.values(), llama_trainer({}, on_gpu=True)])
def test_peaks_for_one_trainer_after_another_are_those_for_each_alone(trainer: Trainer) -> None:
    table = LayoutTable.of(
        Layout(
            data_parallel_size=8 // pp,
            pipeline_parallel_size=pp,
            micro_batch_size=2,
            grad_accum_steps=pp,
            recompute=Recompute.parse(recompute),
            zero_stage=1,
        )
        for pp in (1, 2)
        for recompute in ("none", "full")
    )
    cell = Cell(model=LLAMA_8B, num_gpus=8, sequence_length=4096, global_batch_size=16)
    peaks = Peaks(table, cell, trainer)
    for name in MEMORY_CONSTANTS:
        changed = dataclasses.replace(trainer, **{name: 1.0 + 1.5 * getattr(trainer, name)})
        alone = predict_memory(table, cell, changed).total
        assert np.array_equal(peaks.of(changed), alone)
        assert np.array_equal(peaks.of(trainer), predict_memory(table, cell, trainer).total)

"""Named trainers, and the words of tables that stand for them."""

from __future__ import annotations

import pytest

from orchestrator.core.physics.trainer import (
    TRAINERS,
    Trainer,
    llama_trainer,
    profile_of_words,
    trainer_of_words,
    with_options,
)


@pytest.mark.parametrize(
    ("name", "bytes_per_weight"),
    # FIELD: 16, and 20 with an fp32 copy of the gradients; Megatron's theoretical_memory_usage: 18.
    [
        ("llama", 16),
        ("nanotron", 20),
        ("nanotron-early", 20),
        ("megatron", 18),
        ("fsdp", 16),
        ("bf16-states", 8),
    ],
)
def test_named_trainers_take_the_bytes_per_weight_of_the_literature(
    name: str, bytes_per_weight: int
) -> None:
    trainer = TRAINERS[name]
    assert 2 + trainer.gradient_bytes + trainer.optimizer_bytes == bytes_per_weight


def test_nothing_said_is_our_own_trainer() -> None:
    assert trainer_of_words({}) == Trainer()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"precision": "bf16(fp32 grad accum)", "code_version": "post_pp_fix"}, "nanotron"),
        ({"precision": "bf16(fp32 grad accum)", "code_version": "pre_pp_fix"}, "nanotron-early"),
        ({"sharding": "FULL_SHARD"}, "fsdp"),
        ({"sharding": "megatron-lm"}, "megatron"),
        ({"sharding": "fsdp_full_shard", "peft": "full-ft"}, "bf16-states"),
        ({"sharding": "zero1", "attention_kernel": "flash_attn_2"}, "llama"),
    ],
)
def test_a_table_s_own_words_name_its_trainer(words: dict[str, str], name: str) -> None:
    assert trainer_of_words(words) == TRAINERS[name]


def test_kernels_that_keep_the_scores_are_eager() -> None:
    assert trainer_of_words({"attention_kernel": "megatron_fused_softmax"}).eager_attention
    assert trainer_of_words({"attention_kernel": "naive"}).eager_attention
    assert trainer_of_words({"attention_kernel": "torch"}).eager_attention
    assert not trainer_of_words({"attention_kernel": "flash_attn_2"}).eager_attention
    # What is unknown is not eager, and nor is a word that only contains a known one.
    assert not trainer_of_words({"attention_kernel": "torch_sdpa"}).eager_attention


def test_an_option_of_attention_whose_word_everybody_knows_makes_another_trainer() -> None:
    nanotron = TRAINERS["nanotron"]
    assert with_options(nanotron, {"attn_implementation": "eager", "norm": 1}).eager_attention
    assert with_options(nanotron, {"attention": "flash", "norm": "eager"}) == nanotron
    assert with_options(nanotron, {}) is nanotron


def test_a_fused_loss_keeps_no_logits() -> None:
    words = {"peft": "full-ft", "framework_config": "foak-fast-kernels-liger"}
    assert trainer_of_words(words).logit_bytes < 2 < TRAINERS["bf16-states"].logit_bytes


@pytest.mark.parametrize(
    "words",
    [{"sharding": "Megatron-LM"}, {"sharding": "distopt"}, {"attention_kernel": "megatron_core"}],
)
def test_each_word_of_megatron_is_enough(words: dict[str, str]) -> None:
    assert profile_of_words(words) == "megatron"
    assert profile_of_words({"sharding": "zero1"}) == "llama"


@pytest.mark.parametrize(
    ("options", "on_gpu", "expected"),
    [
        ({}, True, {"reduce_bytes": 4.0, "compiled": True, "loss_chunks": 0, "logit_bytes": 12.0}),
        ({}, False, {"compiled": False, "copied_reductions": 1.0, "has_masks": True}),
        ({}, True, {"copied_reductions": 0.0, "has_masks": False, "replicas": 1}),
        ({"reduce_dtype": "bf16"}, True, {"reduce_bytes": 2.0}),
        ({"reduce_dtype": "fp32"}, True, {"reduce_bytes": 4.0}),
        ({"gradient_dtype": "fp32"}, True, {"gradient_bytes": 6.0}),
        ({"gradient_dtype": "bf16"}, True, {"gradient_bytes": 2.0}),
        ({"loss": "chunked:8"}, True, {"loss_chunks": 8, "logit_bytes": 8.0}),
        ({"loss": "chunked:1"}, True, {"loss_chunks": 1, "logit_bytes": 8.0}),
        ({"attention": "eager"}, True, {"eager_attention": True}),
        ({"attention": "flash"}, True, {"eager_attention": False}),
        ({"accumulate": "last"}, True, {"scatters_each": False}),
        ({"accumulate": "scatter", "replicas": 4}, True, {"scatters_each": True, "replicas": 4}),
        ({"compile": False}, True, {"launch_share": 1.0, "traffic_share": 4.0, "host_share": 1.0}),
        ({"compile": False}, False, {"launch_share": 1.0, "traffic_share": 1.0}),
        ({"compile": True}, False, {"launch_share": 0.3, "traffic_share": 0.4, "host_share": 0.3}),
        ({}, True, {"half_efficiency_share": 0.25}),
        ({"compile": False}, True, {"half_efficiency_share": 0.25}),
        ({}, False, {"half_efficiency_share": 1.0}),
        ({}, True, {"reduction_bucket_bytes": 200 * 2**20}),
        ({}, False, {"reduction_bucket_bytes": 25 * 2**20}),
        ({"bucket_megabytes": 7}, True, {"reduction_bucket_bytes": 7 * 2**20}),
        ({}, True, {"reserve_bytes": 64 * 2**20, "usable_share": 0.98}),
        ({}, False, {"reserve_bytes": 0.0, "usable_share": 1.0}),
        *(
            ({}, on_gpu, dict.fromkeys(("frees_gradients", "pipeline_buffers", "counted"), True))
            for on_gpu in (True, False)
        ),
        ({}, True, {"fully_shards": True, "gathers_context": True}),
    ],
)
def test_options_of_workload_llama_are_constants_of_its_trainer(
    options: dict[str, object], on_gpu: bool, expected: dict[str, object]
) -> None:
    trainer = llama_trainer(options, on_gpu=on_gpu)
    assert {name: getattr(trainer, name) for name in expected} == expected

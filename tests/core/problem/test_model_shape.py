from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.problem.layout import Recompute
from orchestrator.core.problem.model_shape import PRESETS, ModelShape

LLAMA_8B = PRESETS["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # The sums of the tensors in the checkpoints that Meta published (safetensors metadata on
        # Hugging Face).
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-2-7b", 6_738_415_616),
        # Layers of 196,864 and of 3,146,752 weights, two tables of words, and the last norm.
        ("llama-tiny", 4 * 196_864 + 2 * 2048 * 128 + 128),
        ("llama-60m", 8 * 3_146_752 + 2 * 32_000 * 512 + 512),
    ],
)
def test_parameters_are_counted_as_published(name: str, published: int) -> None:
    assert PRESETS[name].num_parameters == published


def test_matmul_parameters_leave_out_norms_and_the_look_up_of_embeddings() -> None:
    embedding = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    norms = (2 * LLAMA_8B.num_layers + 1) * LLAMA_8B.hidden_size
    assert LLAMA_8B.num_matmul_parameters == LLAMA_8B.num_parameters - embedding - norms
    # The head multiplies although it shares its weights with the embedding.
    tied = PRESETS["llama-3.2-1b"]
    assert (
        tied.num_matmul_parameters
        == tied.num_parameters - (2 * tied.num_layers + 1) * tied.hidden_size
    )


def test_flops_per_token_are_six_per_weight_and_twelve_per_layer_width_and_position() -> None:
    assert (
        LLAMA_8B.flops_per_token(8192) == 6 * LLAMA_8B.num_matmul_parameters + 12 * 32 * 4096 * 8192
    )


def test_full_recomputation_is_a_forward_pass_of_the_layers_less_the_last_product_of_each() -> None:
    head = 2.0 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    # W2: its output is not needed again.
    last = 2.0 * LLAMA_8B.num_layers * LLAMA_8B.hidden_size * LLAMA_8B.ffn_hidden_size
    forward = LLAMA_8B.flops_per_token(4096) / 3 - head - last
    assert LLAMA_8B.recomputed_flops_per_token(4096, Recompute.parse("full")) == pytest.approx(
        forward
    )


def test_less_is_recomputed_by_less_recomputation() -> None:
    flops = [
        LLAMA_8B.recomputed_flops_per_token(4096, Recompute.parse(text))
        for text in ("none", "selective_attention", "selective_ops", "full:31", "full")
    ]
    assert flops[0] == 0
    assert flops == sorted(flops)
    assert LLAMA_8B.recomputed_flops_per_token(
        4096, Recompute.parse("full:8")
    ) * 4 == LLAMA_8B.recomputed_flops_per_token(4096, Recompute.parse("full"))


def test_attention_that_is_recomputed_is_its_two_products() -> None:
    attention = LLAMA_8B.recomputed_flops_per_token(4096, Recompute.parse("selective_attention"))
    # Layers x (QK^T and PV) x multiply and add x width x positions.
    assert attention == 32 * 2 * 2 * 4096 * 4096


def test_a_digest_is_of_the_sizes_and_not_of_the_label() -> None:
    assert replace(LLAMA_8B, name="other").digest == LLAMA_8B.digest
    assert len({shape.digest for shape in PRESETS.values()}) == len(PRESETS)
    assert all(
        replace(LLAMA_8B, **{size: getattr(LLAMA_8B, size) * 2}).digest != LLAMA_8B.digest
        for size in ("num_layers", "vocab_size", "ffn_hidden_size")
    )
    assert replace(LLAMA_8B, tied_embeddings=True).digest != LLAMA_8B.digest
    # As stores have it.
    assert LLAMA_8B.digest == "afad45d9525f99cc"


def test_a_preset_is_found_under_its_own_name() -> None:
    assert all(name == shape.name for name, shape in PRESETS.items())


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"hidden_size": 4097}, "hidden_size 4097 is not a multiple of num_attention_heads 32"),
        (
            {"num_key_value_heads": 5},
            "num_attention_heads 32 is not a multiple of num_key_value_heads 5",
        ),
        ({"hidden_size": 96}, "head size 3 is odd"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(LLAMA_8B, **sizes)  # type: ignore[arg-type]


def test_grouped_heads_share_keys_and_values() -> None:
    shape = ModelShape(
        name="x",
        num_layers=1,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        ffn_hidden_size=96,
        vocab_size=100,
    )
    assert (shape.head_dim, shape.kv_size) == (8, 16)
    # q and o 64x64, k and v 64x16, three SwiGLU matrices 64x96, two norms of 64
    assert shape.parameters_per_layer == 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96 + 2 * 64
    assert shape.num_parameters == shape.parameters_per_layer + 2 * 100 * 64 + 64

"""What workload llama holds at each moment of a step, by arithmetic.

Three layers of 100 weights, one product of each has 20; 40 in the embedding, 50 in the head. Over
four shards, gathered in 2 bytes, reduced in 4, copied once more while they are.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from orchestrator.core.physics.step_moments import Moments, Units


def one(value: float) -> np.ndarray:
    return np.array([float(value)])


NO, YES = np.array([False]), np.array([True])
# ZeRO 1 with one micro-batch a step.
UNITS = Units(
    num_layers=one(3),
    layer=one(100),
    embedding=one(40),
    head=one(50),
    product=one(20),
    element_bytes=one(2),
    gradient_bytes=one(2),
    reduced_bytes=one(4),
    copied_bytes=one(4),
    bucket=one(0),
    shards=one(4),
    is_sharded=YES,
    gathers_again=NO,
    is_followed=NO,
    makes_gradients=YES,
    holds_whole_gradients=NO,
    holds_sums=NO,
    chunks_loss=False,
)
SEVERAL = replace(UNITS, is_followed=YES, makes_gradients=NO)
LAST = replace(SEVERAL, holds_whole_gradients=YES)
WHOLE = replace(UNITS, is_sharded=NO)
# While a layer is reduced: 4 + 4 bytes and the result's 1, and a product's gradient in 2.
REDUCING_LAYER, REDUCING_HEAD, REDUCING_EMBEDDING = 940, 550, 440


def flat(found: Moments, row: int = 0) -> list[float]:
    layers = [
        float(part[row])
        for layer in found.layers
        for part in (layer.early, layer.late, layer.reduced)
    ]
    return [
        float(found.head[row]),
        float(found.head_reduced[row]),
        *layers,
        float(found.end[row]),
        float(found.step[row]),
    ]


@pytest.mark.parametrize(
    ("units", "head", "layers", "end", "step"),
    [
        (
            UNITS,
            # All 390 weights are gathered; then all but the head's.
            (780, 680 + REDUCING_HEAD),
            [
                # 340 gathered, the head's input of 4 bytes, its shard, and a product's gradient.
                (680 + 200 + 50 + 40, 680 + 200 + 50 + 200, 480 + 50 + REDUCING_LAYER),
                (480 + 400 + 150 + 40, 480 + 400 + 150 + 200, 280 + 150 + REDUCING_LAYER),
                (280 + 400 + 250 + 40, 280 + 400 + 250 + 200, 80 + 250 + REDUCING_LAYER),
            ],
            # The embedding and its gradient, and the first layer's input.
            80 + 80 + 400 + 350,
            390,
        ),
        (
            SEVERAL,
            (780, 780 + REDUCING_HEAD),
            [
                (780 + 200 + 40, 780 + 200 + 200, 780 + REDUCING_LAYER),
                (780 + 400 + 40, 780 + 400 + 200, 780 + REDUCING_LAYER),
                (780 + 400 + 40, 780 + 400 + 200, 780 + REDUCING_LAYER),
            ],
            780 + 80 + 400,
            0,
        ),
        (
            replace(UNITS, gathers_again=YES),
            # The head, and the last layer that is gathered meanwhile.
            (100 + 200, 200 + REDUCING_HEAD),
            [
                (400 + 200 + 50 + 40, 400 + 200 + 50 + 200, 200 + 50 + REDUCING_LAYER),
                (400 + 400 + 150 + 40, 400 + 400 + 150 + 200, 200 + 150 + REDUCING_LAYER),
                # Next is the embedding.
                (280 + 400 + 250 + 40, 280 + 400 + 250 + 200, 80 + 250 + REDUCING_LAYER),
            ],
            80 + 80 + 400 + 350,
            390,
        ),
        (
            LAST,
            # 1,560 bytes of whole gradients. Those of a unit are the input of its reduction.
            (780 + 1560, 680 + 1560 + REDUCING_HEAD - 200),
            [
                (2340 + 40, 2340 + 200, 480 + 1560 + REDUCING_LAYER - 400),
                (2340 + 40, 2340 + 200, 280 + 1560 + REDUCING_LAYER - 400),
                (2340 + 40, 2340 + 200, 80 + 1560 + REDUCING_LAYER - 400),
            ],
            2340 + 80,
            0,
        ),
        (
            replace(SEVERAL, holds_sums=YES),
            # A shard of all sums.
            (1170, 1170 + REDUCING_HEAD),
            [
                (1170 + 200 + 40, 1170 + 200 + 200, 1170 + REDUCING_LAYER),
                (1170 + 400 + 40, 1170 + 400 + 200, 1170 + REDUCING_LAYER),
                (1170 + 400 + 40, 1170 + 400 + 200, 1170 + REDUCING_LAYER),
            ],
            1170 + 80 + 400,
            390,
        ),
        (
            WHOLE,
            (0, 100),
            [(140, 300, 100), (340, 500, 300), (540, 700, 500)],
            700,
            780,
        ),
        # Gradients that are states, in buckets of 30 that become fp32 for their reduction.
        (
            replace(WHOLE, makes_gradients=NO, bucket=one(30)),
            (0, 0),
            [(0, 0, 0)] * 3,
            120 + 80,
            0,
        ),
        # However small a bucket is, the embedding's gradient is beside it.
        (
            replace(WHOLE, makes_gradients=NO, bucket=one(1)),
            (0, 0),
            [(0, 0, 0)] * 3,
            4 + 80,
            0,
        ),
    ],
)
def test_each_moment_holds_what_is_gathered_made_and_reduced(
    units: Units,
    head: tuple[float, float],
    layers: list[tuple[float, float, float]],
    end: float,
    step: float,
) -> None:
    expected = [*head, *(part for layer in layers for part in layer), end, step]
    assert flat(units.moments()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("units", "more"),
    # The buffer of the head's gather; with whole gradients, nothing is gathered any more.
    [
        (UNITS, 100.0),
        (SEVERAL, 100.0),
        (replace(UNITS, gathers_again=YES), 100.0 - 200.0),
        (LAST, 0.0),
        (WHOLE, 0.0),
    ],
)
def test_a_loss_in_chunks_is_computed_while_the_last_gather_s_buffer_is_held(
    units: Units, more: float
) -> None:
    plain, chunked = units.moments(), replace(units, chunks_loss=True).moments()
    assert chunked.head[0] - plain.head[0] == more
    assert flat(chunked)[1:] == flat(plain)[1:]


def test_a_reduction_begins_with_gradients_and_input() -> None:
    """Without a copy: 2 + 4 bytes, more than 4 and the result's 1."""
    units = replace(UNITS, copied_bytes=one(0))
    found = units.moments()
    assert found.head_reduced[0] == 680 + 6 * 50 + 50
    assert found.layers[0].reduced[0] == 480 + 50 + max(600, 500 + 40)
    # The embedding holds 4 + 1 bytes a weight and the gradient's 2.
    assert replace(units, layer=one(0)).moments().end[0] == 50 + 7 * 40


def test_a_large_embedding_is_reduced_at_the_end() -> None:
    units = replace(UNITS, embedding=one(1000))
    # 9 bytes in reduction, 2 of the gradient; 350 shards of a byte were made before.
    assert units.moments().end[0] == 11 * 1000 + 350


def test_a_single_layer_is_the_last_the_second_and_the_first() -> None:
    found = replace(UNITS, num_layers=one(1)).moments()
    assert [layer.done[0] for layer in found.layers] == [0, 0, 0]
    assert len({layer.early[0] for layer in found.layers}) == 1
    again = replace(UNITS, num_layers=one(1), gathers_again=YES).moments()
    # The layer and the embedding; the head's input, its shard, a product's gradient.
    assert again.layers[2].early[0] == 2 * 140 + 200 + 50 + 40


def test_a_stage_without_embedding_and_head_has_layers_alone() -> None:
    found = replace(UNITS, embedding=one(0), head=one(0)).moments()
    assert found.head[0] == 600
    assert found.end[0] == 400 + 300
    assert found.step[0] == 300


def test_units_in_one_table_hold_what_each_holds_alone() -> None:
    some = [UNITS, SEVERAL, LAST, WHOLE, replace(LAST, gathers_again=YES)]
    # Without a copy, a reduction may begin with more than it ends with.
    some += [replace(one, copied_bytes=np.zeros(1)) for one in some]
    names = [field.name for field in fields(Units) if field.name != "chunks_loss"]
    together = Units(
        **{name: np.concatenate([getattr(one, name) for one in some]) for name in names},
        chunks_loss=False,
    ).moments()
    for row, units in enumerate(some):
        assert flat(together, row) == flat(units.moments())

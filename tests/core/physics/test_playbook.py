"""The Ultra-Scale Playbook's arithmetic of memory, against its own figures.

A GPT of 2-byte activations and eager attention: L s b h (34 + 5 a s / h), selective 34 L s b h,
full 2 L s b h (Korthikanti et al. 2022), and s b h of the embedding; weights (:196)
h V + L (12 h^2 + 13 h) + 2 h, and s h of positions. With flash attention, as in `predict_memory`,
there is no square of the sequence.
"""

from __future__ import annotations

import pytest

# Layers, hidden size, heads.
FIGURE_MODELS = {
    "1B": (16, 2048, 32),
    "3B": (28, 3072, 24),
    "8B": (32, 4096, 32),
    "70B": (80, 8192, 64),
    "405B": (126, 16384, 128),
}
# Figure "memory-recomputation": GiB of activations, batch of 1, at 1024, 2048, 4096, 8192, 16384
# tokens.
FIGURE = [
    ("1B", "none", (3.564453, 12.128906, 44.257812, 168.515625)),
    ("1B", "selective", (1.064453, 2.128906, 4.257812, 8.515625)),
    ("1B", "full", (0.064453, 0.128906, 0.257812, 0.515625)),
    ("3B", "none", (6.073242, 18.708984, 63.667969, 232.335938)),
    ("3B", "selective", (2.791992, 5.583984, 11.167969, 22.335938)),
    ("3B", "full", (0.166992, 0.333984, 0.667969, 1.335938)),
    ("8B", "none", (9.253906, 28.507812, 97.015625, 354.03125, 1348.0625)),
    ("8B", "selective", (4.253906, 8.507812, 17.015625, 34.03125)),
    ("8B", "full", (0.253906, 0.507812, 1.015625, 2.03125)),
    ("70B", "none", (46.257812, 142.515625, 485.03125, 1770.0625, 6740.125)),
    ("70B", "selective", (21.257812, 42.515625, 85.03125, 170.0625)),
    ("70B", "full", (1.257812, 2.515625, 5.03125, 10.0625)),
    ("405B", "none", (145.703125, 448.90625, 1527.8125, 5575.625, 21231.25)),
    ("405B", "selective", (66.953125, 133.90625, 267.8125, 535.625)),
    ("405B", "full", (3.953125, 7.90625, 15.8125, 31.625)),
]


@pytest.mark.parametrize(("model", "recompute", "gib"), FIGURE)
def test_the_playbook_s_formula_gives_its_figure_to_all_digits(
    model: str, recompute: str, gib: tuple[float, ...]
) -> None:
    layers, hidden, heads = FIGURE_MODELS[model]
    for tokens, expected in zip((1024, 2048, 4096, 8192, 16384), gib, strict=False):
        per_layer = {"none": 34 + 5 * heads * tokens / hidden, "selective": 34, "full": 2}[
            recompute
        ]
        found = tokens * hidden * (layers * per_layer + 1)
        assert found / 2**30 == pytest.approx(expected, abs=6e-7)  # the figure's own digits


@pytest.mark.parametrize(
    ("model", "gib"),
    [("1B", 3.98793), ("3B", 13.29618), ("8B", 25.97903), ("70B", 243.97711), ("405B", 1519.99072)],
)
def test_the_playbook_s_weights_give_its_figure_to_all_digits(model: str, gib: float) -> None:
    layers, h, _ = FIGURE_MODELS[model]
    weights = h * 128_256 + layers * (12 * h * h + 13 * h) + 2 * h + 1024 * h
    # fp32; gradients need as much, Adam twice.
    assert 4 * weights / 2**30 == pytest.approx(gib, abs=6e-6)

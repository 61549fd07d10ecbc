"""A model whose sizes can be multiplied in mind, and a machine of round figures.

h = 6, k = 2, f = 10, 3 heads, V = 50, 4 layers: 2*36 + 2*12 + 3*60 + 12 = 288 weights a layer, 300
of the embedding, as many of the head, 6 of the last norm: 1,758.
"""

from __future__ import annotations

from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.model_shape import ModelShape

MODEL = ModelShape(
    name="by hand",
    num_layers=4,
    hidden_size=6,
    num_attention_heads=3,
    num_key_value_heads=1,
    ffn_hidden_size=10,
    vocab_size=50,
)
WEIGHTS = 1_758
MACHINE = Hardware(
    name="by hand",
    memory_bytes=1 << 30,
    memory_bandwidth=1e5,
    intra_node_bandwidth=2e4,
    inter_node_bandwidth=1e4,
    peak_flops={Precision.BF16: 1e6, Precision.FP32: 0.5e6},
)

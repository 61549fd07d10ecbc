"""The sizes of a decoder-only transformer (Llama family): parameters, FLOPs, an identity.

A label is not an identity: two definitions under one name have two digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType

from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy

# PaLM appendix B over the weights that multiply; no causal halving; as torchtitan counts.
MFU_FORMULA = "6*N_matmul+12*L*d_attn*s"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    name: str = field(compare=False)  # a label
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        hidden, heads = self.hidden_size, self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if hidden % heads:
            problem = f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        elif heads % kv_heads:
            problem = (
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        elif self.head_dim % 2:
            problem = f"head size {self.head_dim} is odd; rotary embeddings need an even one"
        else:
            return
        raise ValueError(f"model {self.name}: {problem}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_key_value_heads * self.head_dim

    @property
    def digest(self) -> str:
        """16 hex digits over the sizes alone, not the name."""
        sizes = {k: v for k, v in asdict(self).items() if k != "name"}
        return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def parameters_per_layer(self) -> int:
        h = self.hidden_size
        attention = 2 * h * h + 2 * h * self.kv_size
        # SwiGLU has three matrices; two RMSNorm weights.
        return attention + 3 * h * self.ffn_hidden_size + 2 * h

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * self.parameters_per_layer + self.hidden_size

    @property
    def num_matmul_parameters(self) -> int:
        """Weights of matrix products: layers and output head; the input embedding is a look-up."""
        in_layer = self.parameters_per_layer - 2 * self.hidden_size  # less its norms
        return self.vocab_size * self.hidden_size + self.num_layers * in_layer

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of one token, forward and backward, nothing recomputed (`MFU_FORMULA`)."""
        attention = 12.0 * self.num_layers * self.hidden_size * sequence_length
        return 6.0 * self.num_matmul_parameters + attention

    def recomputed_flops_per_token(self, sequence_length: int, recompute: Recompute) -> float:
        """FLOPs of one token that recomputation adds; with `flops_per_token` they give HFU."""
        num_layers = recompute.layers_of(self.num_layers)
        return num_layers * self._recomputed_layer_flops(sequence_length, recompute)

    def _recomputed_layer_flops(self, sequence_length: int, recompute: Recompute) -> float:
        h, kv, ffn = self.hidden_size, self.kv_size, self.ffn_hidden_size
        # QK^T and PV, 2 FLOPs a multiply-add.
        attention_core = 4.0 * h * sequence_length
        if recompute.mode is RecomputeMode.FULL:
            # Not w2, a layer's last product: recomputation stops once the inputs that the backward
            # pass needs are there again.
            return 2.0 * (2 * h * h + 2 * h * kv + 2 * h * ffn) + attention_core
        if recompute.policy is SelectivePolicy.ATTENTION:
            return attention_core
        if recompute.policy is SelectivePolicy.OPS:
            # torchtitan's policy recomputes every second matmul of a layer in call order
            # wqkv wo w1 w3 w2: wo, w3.
            return 2.0 * (h * h + h * ffn)
        return 0.0


def _llama(name: str, *sizes: int, tied: bool = False) -> ModelShape:
    of_size = [f.name for f in fields(ModelShape) if f.name not in ("name", "tied_embeddings")]
    values = dict(zip(of_size, sizes, strict=True))
    return ModelShape(name=name, **values, tied_embeddings=tied)


# Layers, hidden size, heads, key-value heads, ffn hidden size, vocabulary.
PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            # For CPUs: 1.2 M parameters, a step in milliseconds.
            _llama("llama-tiny", 4, 128, 4, 2, 384, 2048),
            _llama("llama-60m", 8, 512, 8, 4, 1536, 32000),
            _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied=True),
            _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied=True),
            _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
            _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
            _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
            _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
        )
    }
)

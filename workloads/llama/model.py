"""A Llama decoder in plain torch, in torchtitan's vocabulary: RMSNorm, RoPE, GQA, SwiGLU.

Autograd keeps what it would keep of a fused implementation and no more: docs/measuring.md has the
bytes per layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.problem.layout import Recompute, RecomputeMode, SelectivePolicy
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from workloads.llama.attention import Attention
from workloads.llama.context_parallel import ContextParallel
from workloads.llama.head import Head
from workloads.llama.initial_weights import whole_weight
from workloads.llama.recompute import KeptProduct, checkpointed, checkpointed_ops
from workloads.llama.rms_norm import RMSNorm
from workloads.llama.rotary import Rotation, rotation
from workloads.llama.tensor_parallel import ALONE, TensorParallel
from workloads.llama.vocabulary_parallel import Embedding

# Tensor parallelism cuts the rows of these, and the columns of those. It does not cut norms.
_CUT_DIM = {
    **dict.fromkeys(("wqkv", "w1", "w3", "tok_embeddings", "output"), 0),
    **dict.fromkeys(("wo", "w2"), 1),
}

_SHORT = 8


@dataclass(frozen=True, kw_only=True)
class LlamaPart:
    """The layers of a pipeline stage, and whether it has the embedding and the head."""

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @classmethod
    def whole(cls, shape: ModelShape) -> LlamaPart:
        """Return the part that is the whole model."""
        return cls(first_layer=0, num_layers=shape.num_layers, has_embedding=True, has_head=True)


class Llama(nn.Module):
    """A part of a model, the whole by default.

    Takes token ids (b, s), or hidden states (b, s, h) if the part has no embedding. Returns hidden
    states, or the loss for the targets (b, s) if it has the head.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        sequence_length: int,
        attention: AttentionKind,
        recompute: Recompute,
        loss_chunk_tokens: int | None,
        dtype: torch.dtype,
        device: torch.device,
        part: LlamaPart | None = None,
        tensor_parallel: TensorParallel = ALONE,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        """Build a part without memory for its weights: `materialise` gives it that."""
        super().__init__()
        context_parallel = context_parallel or ContextParallel(sequence_length)
        self.shape, self.tensor_parallel = shape, tensor_parallel
        part = part or LlamaPart.whole(shape)
        num_recomputed = recompute.layers_of(shape.num_layers)
        with torch.device("meta"):
            self.tok_embeddings = (
                Embedding(shape.vocab_size, shape.hidden_size, tensor_parallel=tensor_parallel)
                if part.has_embedding
                else None
            )
            self.layers = nn.ModuleDict(
                {
                    str(i): TransformerBlock(
                        shape,
                        attention=attention,
                        recompute=recompute if i < num_recomputed else Recompute(),
                        tensor_parallel=tensor_parallel,
                        context_parallel=context_parallel,
                    )
                    for i in range(part.first_layer, part.first_layer + part.num_layers)
                }
            )
            self.head = (
                Head(shape, tensor_parallel=tensor_parallel, loss_chunk_tokens=loss_chunk_tokens)
                if part.has_head
                else None
            )
        self._tie()
        self.to(dtype)
        # Context parallelism takes whole sequences only.
        self._is_cut = len(context_parallel.positions) < sequence_length
        # Constants, no buffers: they are the same on every rank, and DDP would send buffers around.
        self.rotation = rotation(shape.head_dim, context_parallel.positions.to(device))
        self.causal_mask: Tensor | None = None
        if attention is AttentionKind.EAGER:
            every_pair = torch.ones(
                sequence_length, sequence_length, dtype=torch.bool, device=device
            )
            self.causal_mask = every_pair.triu(1)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, scale: float | Tensor = 1.0
    ) -> Tensor:
        """Return hidden states (b, s / size, h), or the loss times `scale` from the head.

        `x` has token ids (b, s), or hidden states if the part has no embedding; `targets` has ids
        (b, s).
        """
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        length = x.shape[1] * self.tensor_parallel.size
        cos, sin = self.rotation
        for layer in self.layers.values():
            x = layer(x, (cos[:length], sin[:length]), self.causal_mask)
        if self.head is not None:
            x = self.head(x, targets, scale)
        return x

    def constants(self) -> tuple[Tensor, ...]:
        """Return the tensors that are no weights: rotations, and the mask of eager attention."""
        return self.rotation if self.causal_mask is None else (*self.rotation, self.causal_mask)

    @property
    def short_length(self) -> int:
        """The tokens of a short sequence that every rank can take its part of."""
        length = len(self.rotation[0])
        return length if self._is_cut else min(_SHORT * self.tensor_parallel.size, length)

    def units(self) -> Iterator[nn.Module]:
        """Yield the embedding, the layers and the head: what one call computes."""
        yield from (
            unit for unit in (self.tok_embeddings, *self.layers.values(), self.head) if unit
        )

    @torch.no_grad()
    def materialise(
        self, device: torch.device, *, seed: int, unit: nn.Module | None = None
    ) -> None:
        """Make the weights, of one unit or of all: a seed gives the same in every layout."""
        for name, weight in list(self.named_parameters()):
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            if weight.is_meta and (unit is None or module in unit.modules()):
                initial = self._initial(name, weight, device=device, seed=seed)
                setattr(module, leaf, nn.Parameter(initial.to(weight.dtype)))
        self._tie()

    def _initial(self, name: str, weight: Tensor, *, device: torch.device, seed: int) -> Tensor:
        dim, size = _CUT_DIM.get(_module_of(name)), list(weight.shape)
        if dim is not None:
            size[dim] *= self.tensor_parallel.size
        whole = whole_weight(name, tuple(size), shape=self.shape, seed=seed, device=device)
        return self.own_part(name, whole)

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole weight."""
        module, kv = _module_of(name), self.shape.kv_size
        sections = (self.shape.hidden_size, kv, kv) if module == "wqkv" else ()
        return self.tensor_parallel.own(whole, dim=_CUT_DIM.get(module), sections=sections)

    def _tie(self) -> None:
        if self.shape.tied_embeddings and self.tok_embeddings is not None and self.head is not None:
            self.head.output.weight = self.tok_embeddings.weight


def is_uncut(weight: Tensor) -> bool:
    """True for the weight of a norm, which every tensor-parallel rank has, or its gradient."""
    return weight.dim() == 1


def _module_of(name: str) -> str:
    return name.split(".")[-2]


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream.

    Takes and returns this rank's part of the hidden states (b, s / size, h).
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        attention: AttentionKind,
        recompute: Recompute,
        tensor_parallel: TensorParallel,
        context_parallel: ContextParallel,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = RMSNorm(shape.hidden_size)
        self.attention = Attention(
            shape,
            kind=attention,
            policy=recompute.policy,
            tensor_parallel=tensor_parallel,
            context_parallel=context_parallel,
        )
        self.ffn_norm = RMSNorm(shape.hidden_size)
        self.feed_forward = FeedForward(shape, tensor_parallel=tensor_parallel)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        if self.recompute.mode is RecomputeMode.FULL:
            return checkpointed(self._forward, x, rotation, mask)
        if self.recompute.policy is not SelectivePolicy.OPS:
            return self._forward(x, rotation, mask)
        if torch.compiler.is_compiling():
            return checkpointed_ops(self._forward, x, rotation, mask)
        attended = self.attention.attend(checkpointed(self._queries_keys_values, x), rotation, mask)
        return checkpointed(self._rest, x, attended, KeptProduct())

    def _forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        return self._rest(x, self.attention.attend(self._queries_keys_values(x), rotation, mask))

    def _queries_keys_values(self, x: Tensor) -> Tensor:
        return self.attention.queries_keys_values(self.attention_norm(x))

    def _rest(self, x: Tensor, attended: Tensor, kept: KeptProduct | None = None) -> Tensor:
        x = x + self.attention.project(attended)
        added: Tensor = self.feed_forward(self.ffn_norm(x), kept)
        return x + added


class FeedForward(nn.Module):
    """SwiGLU. w1 and w3 are two products: one fused product's gradient would need a copy.

    Takes and returns this rank's part of the hidden states (b, s / size, h).
    """

    def __init__(self, shape: ModelShape, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        width = shape.ffn_hidden_size // tensor_parallel.size
        self.w1 = nn.Linear(shape.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, width, bias=False)

    def forward(self, x: Tensor, kept: KeptProduct | None = None) -> Tensor:
        x = self.tensor_parallel.gather(x)
        gate = self.w1(x) if kept is None else kept(self.w1, x)
        return self.tensor_parallel.scatter(self.w2(F.silu(gate) * self.w3(x)))

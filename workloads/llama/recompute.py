"""Activation recomputation over torch.utils.checkpoint: of a whole function, or of some operations.

The model has no dropout, so no random state is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten

# `ops` keeps the whole attention core: the fused kernel's output, or the eager one's two products.
_KEPT_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten.bmm.default,
    }
)


def checkpointed(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function and keep only its inputs for the backward pass."""
    return cast(Tensor, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False))


def checkpointed_ops(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function; keep its inputs, attention results and every other matrix product.

    This is torchtitan's per-op policy. In a layer's call order wqkv wo w1 w3 w2, the recomputed
    products are wo and w3.
    """
    return cast(
        Tensor,
        checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        ),
    )


def _contexts() -> tuple[Any, Any]:
    return cast(tuple[Any, Any], create_selective_checkpoint_contexts(_EverySecondProduct()))  # type: ignore[no-untyped-call]


class _EverySecondProduct:
    """One layer's policy, which counts the products of a pass and of its recomputation."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if op == _aten.mm.default:
            self._num_products[ctx.is_recompute] += 1
            odd = self._num_products[ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE

"""Activation recomputation over torch.utils.checkpoint: of a function, or of some operations.

The model has no dropout, so no random state is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_T = TypeVar("_T")
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


def checkpointed(function: Callable[..., _T], *args: object) -> _T:
    """Call a function and keep only its inputs for the backward pass; return its result."""
    return cast(_T, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False))


def checkpointed_ops(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Call a function; keep its inputs, attention results and every other matrix product.

    This is torchtitan's per-op policy. In a layer's call order wqkv wo w1 w3 w2, the recomputed
    products are wo and w3. It is for compiled layers: in eager mode, torch would call the policy
    from Python for every operation, for several times the duration of a small layer. Returns the
    function's result.
    """
    return cast(
        Tensor,
        checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        ),
    )


class KeptProduct:
    """A product within a checkpointed function, which recomputation does not compute again."""

    def __init__(self) -> None:
        self._result: Tensor | None = None

    def __call__(self, linear: nn.Linear, x: Tensor) -> Tensor:
        result, self._result = self._result, None
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, linear.weight, result
        )
        if result is None:
            self._result = product.detach()
        return product


class _Product(torch.autograd.Function):
    """x times the transposed weight; the result may be known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, result: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() if result is None else result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        d_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ weight, d_weight, None


def _contexts() -> tuple[Any, Any]:
    contexts: Any = create_selective_checkpoint_contexts  # torch gives it no types
    return cast(tuple[Any, Any], contexts(_EverySecondProduct()))


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

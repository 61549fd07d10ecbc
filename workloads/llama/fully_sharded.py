"""A model whose weights, gradients and optimizer states are sharded by FSDP2: ZeRO 1 to 3.

The shards are fp32 and are the master weights. FSDP gathers them, in the precision of training, for
the time in which they are used: in stages 1 and 2 for a whole step, in stage 3 layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from orchestrator.core.sweepfile.workload_options import Accumulate
from workloads.llama.model import Llama


class Shards:
    """A model of which this rank keeps its shard, with the shard's gradients.

    The mesh has the ranks to shard over; of two dimensions, it replicates over the first. With
    Accumulate.LAST, gradients stay whole until the last micro-batch of a step.
    """

    def __init__(
        self,
        model: Llama,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        seed: int,
        zero_stage: int,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        accumulate: Accumulate,
        frees_gradients: bool,
    ) -> None:
        self.model = model
        self._zero_stage, self._accumulate = zero_stage, accumulate
        self._frees_gradients = frees_gradients
        self._replicates = mesh.ndim == 2
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,  # rotations stay fp32
        )

        def shard(module: nn.Module, *, gathers_again: bool) -> None:
            fully_shard(module, mesh=mesh, reshard_after_forward=gathers_again, mp_policy=policy)

        # Unit by unit, so that one unsharded unit exists at a time.
        for unit in model.units():
            model.materialise(device, seed=seed, unit=unit)
            # Tied weights belong to two units: the model itself shards these.
            if unit in model.layers.values() or not model.shape.tied_embeddings:
                # Its backward pass follows at once, so the head stays gathered.
                shard(unit, gathers_again=zero_stage == 3 and unit is not model.head)
        shard(model, gathers_again=False)
        self._weights = [w for w in model.parameters() if _local(w).numel()]
        if not frees_gradients:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shards of the weights, which the optimizer steps."""
        return [_local(weight) for weight in self._weights]

    def gradients(self) -> list[Tensor]:
        """Return the gradients for the optimizer, one per weight."""
        return [_gradient(weight) for weight in self._weights]

    def lasting_gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that keep their memory from step to step."""
        return () if self._frees_gradients else tuple(self.gradients())

    def step_gradients(
        self,
        micro_batches: list[tuple[Tensor, Tensor]],
        *,
        loss_scale: float | Tensor = 1.0,
        after_forward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Set the gradients to the mean over all ranks, times a scale; return this rank's loss."""
        losses = []
        for i, (tokens, targets) in enumerate(micro_batches):
            self.expect_backward(last=i == len(micro_batches) - 1)
            loss = self.model(tokens, targets, loss_scale / len(micro_batches))
            after_forward()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum() / loss_scale

    def average(self) -> None:
        """Do nothing: FSDP has averaged them in the backward pass."""

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Free the gradients of the step that is over, or set them to zero."""
        if not self._frees_gradients:
            torch._foreach_zero_(self.gradients())
            return
        for weight in self._weights:
            weight.grad = None

    def expect_backward(self, *, last: bool) -> None:
        """Say what the next backward pass does with gradients and gathered weights."""
        assert isinstance(self.model, FSDPModule)
        if self._accumulate is Accumulate.LAST:
            self.model.set_requires_gradient_sync(last)
        elif self._replicates:
            self.model.set_requires_all_reduce(last)
        if self._zero_stage < 3:
            self.model.set_reshard_after_backward(last)


@torch.no_grad()
def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None  # between backward pass and optimizer step
    return _local(weight.grad)

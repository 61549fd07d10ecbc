"""One replica of the model and its gradients, which DDP averages once per optimizer step.

Gradients keep their memory from step to step, so that the first micro-batch of a step needs as much
as the last.
"""

# No postponed annotations here: DDP checks those of its hook, and wants the classes themselves.
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workloads.llama.model import Llama

_PRIMING_TOKENS = 8


class Replica:
    """A model with its gradients; a mean over all replicas after the last micro-batch of a step.

    With `accumulate_in_fp32`, each micro-batch's bf16 gradients are added to fp32 sums, which are
    then averaged.
    """

    def __init__(self, model: Llama, *, accumulate_in_fp32: bool) -> None:
        self.model = model
        self._weights = [w for w in model.parameters() if w.requires_grad]
        self._accumulate = accumulate_in_fp32 and self._weights[0].dtype != torch.float32
        self._module: nn.Module = model
        self._buckets: dict[int, list[Tensor]] = {}
        self._flat_sums: list[Tensor] = []
        self._sums: dict[Tensor, Tensor] = {}
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._prime_buckets()
        else:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)
            self._buckets = {0: list(self._weights)}
        if self._accumulate:
            self._make_sums()

    @property
    def weights(self) -> list[Tensor]:
        return list(self._weights)

    def gradients(self) -> list[Tensor]:
        """What the optimizer steps with, one per weight."""
        return [self._sums[w] if self._accumulate else _gradient(w) for w in self._weights]

    def all_gradient_tensors(self) -> tuple[Tensor, ...]:
        return (*(_gradient(w) for w in self._weights), *self._flat_sums)

    def step_gradients(
        self,
        micro_batches: list[tuple[Tensor, Tensor]],
        *,
        after_forward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Set the gradients to the mean over all replicas; returns the mean loss of this one."""
        self._zero()
        losses = []
        for i, (tokens, targets) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last or self._module is self.model else self._module.no_sync():  # type: ignore[operator]
                loss = self._module(tokens, targets, 1.0 / len(micro_batches))
                after_forward()
                loss.backward()
            losses.append(loss.detach())
            if self._accumulate and not (last and self._module is not self.model):
                self._add_to_sums()
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _zero(self) -> None:
        torch._foreach_zero_([_gradient(w) for w in self._weights])
        if self._accumulate:
            torch._foreach_zero_(self._flat_sums)

    def _prime_buckets(self) -> None:
        """Run DDP until its buckets are final: after its first backward pass it orders them by the
        arrival of gradients.

        From the second pass on, a weight's gradient is a view of its bucket for good, also between
        synchronisations.
        """
        self._module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if self._accumulate:
            self._module.register_comm_hook(None, self._average_sums)
        tokens = torch.zeros(
            1,
            min(_PRIMING_TOKENS, len(self.model.rotation[0])),
            dtype=torch.int64,
            device=self._weights[0].device,
        )
        for _ in range(2):
            for weight in self._weights:
                weight.grad = None
            self._module(tokens, tokens).backward()

    def _make_sums(self) -> None:
        for index in sorted(self._buckets):
            weights = self._buckets[index]
            flat = torch.zeros(
                sum(w.numel() for w in weights), dtype=torch.float32, device=weights[0].device
            )
            self._flat_sums.append(flat)
            for weight, part in zip(
                weights, torch.split(flat, [w.numel() for w in weights]), strict=True
            ):
                self._sums[weight] = part.view_as(weight)

    @torch.no_grad()
    def _add_to_sums(self) -> None:
        gradients = [_gradient(w) for w in self._weights]
        torch._foreach_add_([self._sums[w] for w in self._weights], gradients)
        torch._foreach_zero_(gradients)

    def _average_sums(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """DDP's hook for a bucket of the last micro-batch: add it to its sums, and average them."""
        buffer = bucket.buffer()
        if not self._flat_sums:  # priming
            self._buckets[bucket.index()] = list(bucket.parameters())
            averaged = buffer
        else:
            averaged = self._flat_sums[bucket.index()].add_(buffer)
        work = dist.all_reduce(averaged.div_(dist.get_world_size()), async_op=True)
        assert work is not None  # None: outside the group
        averaged_buffer: torch.futures.Future[Tensor] = work.get_future().then(lambda _: buffer)
        return averaged_buffer


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None  # since Replica.__init__
    return weight.grad

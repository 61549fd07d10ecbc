"""One replica of the model and its gradients, which DDP averages once per optimizer step.

Alone, and with one micro-batch a step, the gradients exist from the backward pass to the optimizer
step. Else they keep their memory: the first micro-batch of a step needs as much as the last.
"""

# No postponed annotations here: DDP checks those of its hook, and wants the classes themselves.
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from workloads.llama.model import Llama


class Replica:
    """A model with its gradients; a mean over the group after the last micro-batch of a step.

    With `accumulate_in_fp32`, each micro-batch's gradients in half precision are added to fp32
    sums, which are then averaged. Others are averaged in `reduce_dtype`.
    """

    def __init__(
        self,
        model: Llama,
        *,
        group: dist.ProcessGroup | None = None,
        accumulate_in_fp32: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        bucket_megabytes: int = 25,
        frees_gradients: bool = False,
    ) -> None:
        self.model = model
        self._weights = [w for w in model.parameters() if w.requires_grad]
        dtype = self._weights[0].dtype
        self._accumulate = accumulate_in_fp32 and dtype != torch.float32
        self._is_widened = reduce_dtype == torch.float32 != dtype
        self._group = group
        self._frees_gradients = frees_gradients and group is None and not self._accumulate
        self._module: nn.Module = model
        self._buckets: dict[int, list[Tensor]] = {}
        self._flat_sums: list[Tensor] = []
        self._sums: dict[Tensor, Tensor] = {}
        if group is not None:
            self._prime_buckets(bucket_megabytes)
        else:
            self._buckets = {0: list(self._weights)}
        if self._accumulate:
            self._make_sums()
        if not self._frees_gradients and group is None:
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)

    @property
    def weights(self) -> list[Tensor]:
        """The weights that the optimizer steps."""
        return list(self._weights)

    def gradients(self) -> list[Tensor]:
        """Return the gradients for the optimizer, one per weight."""
        return [self._sums[w] if self._accumulate else _gradient(w) for w in self._weights]

    def lasting_gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that keep their memory from step to step."""
        if self._frees_gradients:
            return ()
        return (*(_gradient(w) for w in self._weights), *self._flat_sums)

    def step_gradients(
        self,
        micro_batches: list[tuple[Tensor, Tensor]],
        *,
        loss_scale: float | Tensor = 1.0,
        after_forward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Set the gradients to the mean over all replicas, times a scale; return the mean loss."""
        losses = []
        for i, (tokens, targets) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            is_reduced = last or self._module is self.model
            with nullcontext() if is_reduced else self._module.no_sync():  # type: ignore[operator]
                loss = self._module(tokens, targets, loss_scale / len(micro_batches))
                after_forward()
                loss.backward()
            losses.append(loss.detach())
            if self._accumulate and not (last and self._module is not self.model):
                self._add_to_sums()
        return torch.stack(losses).sum() / loss_scale

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Free the gradients of the step that is over, or set them to zero."""
        if self._frees_gradients:
            for weight in self._weights:
                weight.grad = None
            return
        torch._foreach_zero_([_gradient(w) for w in self._weights])
        if self._accumulate:
            torch._foreach_zero_(self._flat_sums)

    def _prime_buckets(self, bucket_megabytes: int) -> None:
        """Run DDP until its buckets are final: after its first backward pass it orders them by the
        arrival of gradients.

        From the second pass on, a weight's gradient is a view of its bucket for good, also between
        synchronisations.
        """
        self._module = DistributedDataParallel(
            self.model,
            process_group=self._group,
            bucket_cap_mb=bucket_megabytes,
            gradient_as_bucket_view=True,
            init_sync=False,  # every rank draws the same weights
        )
        if self._accumulate:
            self._module.register_comm_hook(None, self._average_sums)
        elif self._is_widened:
            self._module.register_comm_hook(None, self._average_in_fp32)
        tokens = torch.zeros(
            1,
            self.model.short_length,
            dtype=torch.int64,
            device=self._weights[0].device,
        )
        # Layers are compiled for the tokens of a micro-batch alone.
        with torch.compiler.set_stance("force_eager"):
            for _ in range(2):
                for weight in self._weights:
                    weight.grad = None
                self._module(tokens, tokens).backward()
        torch._foreach_zero_([_gradient(w) for w in self._weights])

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

    def _average_sums(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook for a bucket of the last micro-batch: add it to its sums, and average them."""
        buffer = bucket.buffer()
        if not self._flat_sums:  # priming
            self._buckets[bucket.index()] = list(bucket.parameters())
            averaged = buffer
        else:
            averaged = self._flat_sums[bucket.index()].add_(buffer)
        return self._average(averaged).then(lambda _: buffer)

    def _average_in_fp32(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook for a bucket in half precision."""
        buffer, wide = bucket.buffer(), bucket.buffer().float()
        return self._average(wide).then(lambda _: buffer.copy_(wide))

    def _average(self, buffer: Tensor) -> torch.futures.Future[list[Tensor]]:
        buffer.div_(dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None  # None: outside the group
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None  # between backward pass and optimizer step
    return weight.grad

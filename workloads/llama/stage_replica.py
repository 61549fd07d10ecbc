"""A pipeline stage that each replica holds as a whole (ZeRO stage 0), with its gradients."""

# No postponed annotations: as in data_parallel.py.
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.llama.model import Llama


class StageReplica:
    """A stage with gradients that keep their memory, averaged after a step's last micro-batch.

    DDP expects one backward pass after each forward pass, which a pipeline does not keep to. With
    `accumulate_in_fp32`, each micro-batch's gradients in half precision are added to fp32 sums.
    """

    def __init__(
        self,
        model: Llama,
        *,
        group: dist.ProcessGroup | None,
        accumulate_in_fp32: bool,
        reduce_dtype: torch.dtype,
        bucket_megabytes: int,
    ) -> None:
        self.model = model
        self._group, self._reduce_dtype = group, reduce_dtype
        self._bucket_bytes = bucket_megabytes << 20
        self._weights = list(model.parameters())
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        self._sums: dict[Tensor, Tensor] = {}
        if accumulate_in_fp32 and self._weights[0].dtype != torch.float32:
            for weight in self._weights:
                self._sums[weight] = torch.zeros_like(weight, dtype=torch.float32)
                weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._add_to_sum
                )

    @property
    def weights(self) -> list[Tensor]:
        """The weights that the optimizer steps."""
        return list(self._weights)

    def gradients(self) -> list[Tensor]:
        """Return the gradients for the optimizer, one per weight."""
        return list(self._sums.values()) if self._sums else self._own_gradients()

    def lasting_gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that keep their memory from step to step."""
        return (*self._own_gradients(), *self._sums.values())

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Set the gradients of the step that is over to zero."""
        torch._foreach_zero_(self.gradients())

    def expect_backward(self, *, last: bool) -> None:
        """Do nothing: no backward pass here differs from the others."""

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients over the replicas, a bucket while the next one is copied."""
        if self._group is None:
            return
        size, under_way = dist.get_world_size(self._group), None
        for bucket in self._buckets():
            flat = torch.cat([gradient.flatten() for gradient in bucket]).to(self._reduce_dtype)
            work = dist.all_reduce(flat.div_(size), group=self._group, async_op=True)
            if under_way is not None:
                _finish(*under_way)
            under_way = bucket, flat, work
        if under_way is not None:
            _finish(*under_way)

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        for gradient in self.gradients():
            bucket.append(gradient)
            if sum(gradient.nbytes for gradient in bucket) >= self._bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _own_gradients(self) -> list[Tensor]:
        found = [weight.grad for weight in self._weights]
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def _add_to_sum(self, weight: Tensor) -> None:
        assert weight.grad is not None  # has just been accumulated
        self._sums[weight].add_(weight.grad)
        weight.grad.zero_()


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    """Wait for a bucket's averages, and put them in place."""
    assert work is not None  # None: outside the group
    work.wait()
    averages = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, average in zip(bucket, averages, strict=True):
        gradient.copy_(average.view_as(gradient))

"""The stages of a rank in a pipeline, stepped by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from orchestrator.core.problem.pipeline_schedule import PipelineSchedule, ScheduleKind
from workloads.llama.mesh import Line
from workloads.llama.model import LlamaPart

_SCHEDULES: Mapping[ScheduleKind, Any] = MappingProxyType(
    {
        ScheduleKind.GPIPE: ScheduleGPipe,
        ScheduleKind.ONE_F_ONE_B: Schedule1F1B,
        ScheduleKind.INTERLEAVED: ScheduleInterleaved1F1B,
    }
)


def parts_of_rank(
    num_layers: int, *, schedule: PipelineSchedule, num_ranks: int, rank: int
) -> list[LlamaPart]:
    """The layers of each stage of a rank: stages `rank`, `rank + num_ranks` and so on.

    If the layers do not divide by the stages, the first stages have one more: the last has the
    head.
    """
    num_stages = num_ranks * schedule.virtual_stages
    each, more = divmod(num_layers, num_stages)
    return [
        LlamaPart(
            first_layer=stage * each + min(stage, more),
            num_layers=each + (stage < more),
            has_embedding=stage == 0,
            has_head=stage == num_stages - 1,
        )
        for stage in range(rank, num_stages, num_ranks)
    ]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The sizes of what a stage takes and hands on: this rank's parts of the sequences."""

    tokens: tuple[int, int]  # (b, s)
    hidden_states: tuple[int, int, int]  # (b, s, h)
    dtype: torch.dtype

    def input(self, *, is_first: bool) -> Tensor:
        if is_first:
            return torch.empty(self.tokens, dtype=torch.int64, device="meta")
        return self._hidden_states()

    def output(self, *, is_last: bool) -> Tensor:
        if is_last:
            return torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return self._hidden_states()

    def _hidden_states(self) -> Tensor:
        return torch.empty(self.hidden_states, dtype=self.dtype, device="meta", requires_grad=True)


class Pipeline:
    """A rank's stages, each a part of the model that takes (x, targets, scale)."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        schedule: PipelineSchedule,
        line: Line,
        num_micro_batches: int,
        micro_batch: MicroBatch,
        device: torch.device,
    ) -> None:
        assert line.group is not None
        self._num_micro_batches, self._device = num_micro_batches, device
        num_stages = line.size * schedule.virtual_stages
        self._stages = [_Stage(stage, num_micro_batches) for stage in stages]
        placed = [
            PipelineStage(
                stage,
                index,
                num_stages,
                device,
                # Without examples, torch would run a micro-batch to see the sizes.
                input_args=micro_batch.input(is_first=index == 0),
                output_args=micro_batch.output(is_last=index == num_stages - 1),
                group=line.group,
            )
            for index, stage in zip(
                range(line.index, num_stages, line.size), self._stages, strict=True
            )
        ]
        self._is_first, self._is_last = placed[0].is_first, placed[-1].is_last
        is_interleaved = schedule.kind is ScheduleKind.INTERLEAVED
        self._schedule = _SCHEDULES[schedule.kind](
            placed if is_interleaved else placed[0],
            n_microbatches=num_micro_batches,
            loss_fn=_loss_of,
            scale_grads=False,
        )

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        *,
        after_forward: Callable[[], None] = lambda: None,
        before_last_backward: Callable[[nn.Module], None] = lambda _: None,
    ) -> Tensor:
        """Add the gradients of the mean loss of micro-batches; return that loss.

        Only the last stage knows it: other ranks return 0. `before_last_backward` is told of each
        stage when the backward pass of its last micro-batch begins.
        """
        tokens, targets = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        for stage in self._stages:
            stage.begin(after_forward, before_last_backward)
        losses: list[Tensor] = []
        inputs = [tokens] if self._is_first else []
        # Once for the last stage itself, and once for the schedule, which asks for it.
        outputs = {"targets": targets, "target": targets} if self._is_last else {}
        self._schedule.step(*inputs, **outputs, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class _Stage(nn.Module):
    """A part of the model that scales its loss, and tells when its last backward pass begins.

    Torch's schedules would handle a part of FSDP themselves, and reduce its gradients only after
    all micro-batches; they do not see it through this module.
    """

    def __init__(self, part: nn.Module, num_micro_batches: int) -> None:
        super().__init__()
        self.part, self._num_micro_batches = part, num_micro_batches
        self._num_backward = 0
        self.begin(lambda: None, lambda _: None)

    def begin(
        self, after_forward: Callable[[], None], before_last_backward: Callable[[nn.Module], None]
    ) -> None:
        self._num_backward = 0
        self._after_forward, self._before_last_backward = after_forward, before_last_backward

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        out: Tensor = self.part(x, targets, 1.0 / self._num_micro_batches)
        out.register_hook(self._count)  # type: ignore[no-untyped-call]
        self._after_forward()
        return out

    def _count(self, _: Tensor) -> None:
        self._num_backward += 1
        if self._num_backward == self._num_micro_batches:
            self._before_last_backward(self.part)


def _loss_of(output: Tensor, _: Tensor) -> Tensor:
    """The last stage computes its loss itself."""
    return output

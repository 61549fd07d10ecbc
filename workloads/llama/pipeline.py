"""The stages of a rank in a pipeline, stepped by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
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
from workloads.llama.fully_sharded import Shards
from workloads.llama.mesh import Line
from workloads.llama.model import Llama, LlamaPart
from workloads.llama.stage_replica import StageReplica

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
    """Return the layers of each stage of a rank: stages `rank`, `rank + num_ranks` and so on.

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
        """Return an example of what a stage takes, without memory."""
        if is_first:
            return torch.empty(self.tokens, dtype=torch.int64, device="meta")
        return self._hidden_states()

    def output(self, *, is_last: bool) -> Tensor:
        """Return an example of what a stage hands on, without memory."""
        if is_last:
            return torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return self._hidden_states()

    def _hidden_states(self) -> Tensor:
        return torch.empty(self.hidden_states, dtype=self.dtype, device="meta", requires_grad=True)


class Pipeline:
    """A rank's stages as one: the weights and gradients of all, and a step through the schedule."""

    def __init__(
        self,
        stages: Sequence[StageReplica | Shards],
        *,
        schedule: PipelineSchedule,
        line: Line,
        num_micro_batches: int,
        micro_batch: MicroBatch,
        device: torch.device,
    ) -> None:
        assert line.group is not None
        self._stages, self._device = stages, device
        self._num_micro_batches, self._num_ranks = num_micro_batches, line.size
        num_stages = line.size * schedule.virtual_stages
        self._modules = [_Module(stage, num_micro_batches) for stage in stages]
        placed = [
            PipelineStage(
                module,
                index,
                num_stages,
                device,
                # Without examples, torch would run a micro-batch to see the sizes.
                input_args=micro_batch.input(is_first=index == 0),
                output_args=micro_batch.output(is_last=index == num_stages - 1),
                group=line.group,
            )
            for index, module in zip(
                range(line.index, num_stages, line.size), self._modules, strict=True
            )
        ]
        self._placed, self._is_first = placed, placed[0].is_first
        self._is_last = placed[-1].is_last
        is_interleaved = schedule.kind is ScheduleKind.INTERLEAVED
        # Older versions of torch keep the losses that they would return.
        has_choice = "return_outputs" in signature(_SCHEDULES[schedule.kind].step).parameters
        self._no_outputs = {"return_outputs": False} if has_choice else {}
        self._schedule = _SCHEDULES[schedule.kind](
            placed if is_interleaved else placed[0],
            n_microbatches=num_micro_batches,
            loss_fn=_loss_of,
            scale_grads=False,
        )

    @property
    def models(self) -> list[Llama]:
        """The models of this rank's stages."""
        return [stage.model for stage in self._stages]

    @property
    def weights(self) -> list[Tensor]:
        """The weights of all stages, which the optimizer steps."""
        return [weight for stage in self._stages for weight in stage.weights]

    def gradients(self) -> list[Tensor]:
        """Return the gradients for the optimizer, one per weight."""
        return [gradient for stage in self._stages for gradient in stage.gradients()]

    def lasting_gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients that keep their memory from step to step."""
        return tuple(each for stage in self._stages for each in stage.lasting_gradients())

    def receive_buffers(self) -> list[Tensor]:
        """Return the buffers that torch keeps from the first step on.

        There is one for each micro-batch and direction.
        """
        received = [
            info
            for stage in self._placed
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
        ]
        buffers = [getattr(info, "buffer", None) for info in received]
        return [buffer for buffer in buffers if buffer is not None]

    def clear_gradients(self) -> None:
        """Free the gradients of the step that is over, or set them to zero."""
        for stage in self._stages:
            stage.clear_gradients()

    def step_gradients(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        *,
        loss_scale: float | Tensor = 1.0,
        after_forward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Set the gradients of the mean loss of a step's micro-batches, times a scale.

        Return the ranks' share of the loss: all of it from the last stage, times the ranks of the
        pipeline, and 0 from the others. So the mean over all ranks is the loss.
        """
        tokens, targets = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        for stage, module in zip(self._stages, self._modules, strict=True):
            stage.expect_backward(last=False)
            module.begin(loss_scale, after_forward)
        losses: list[Tensor] = []
        inputs = [tokens] if self._is_first else []
        # Once for the last stage itself, and once for the schedule, which asks for it.
        outputs = {"targets": targets, "target": targets} if self._is_last else {}
        self._schedule.step(*inputs, **outputs, losses=losses, **self._no_outputs)
        for stage in self._stages:
            stage.average()
        if not losses:
            return torch.zeros((), device=self._device)
        total = torch.stack([loss.detach() for loss in losses]).sum()
        return total * self._num_ranks / loss_scale


class _Module(nn.Module):
    """A stage that scales its loss, and tells when its last backward pass of a step begins.

    Torch's schedules would handle a module of FSDP themselves, and reduce its gradients only after
    all micro-batches; they do not see it through this module.
    """

    def __init__(self, stage: StageReplica | Shards, num_micro_batches: int) -> None:
        super().__init__()
        self.model, self._stage = stage.model, stage
        self._num_micro_batches = num_micro_batches
        self.begin(1.0, lambda: None)

    def begin(self, loss_scale: float | Tensor, after_forward: Callable[[], None]) -> None:
        self._scale, self._after_forward = loss_scale / self._num_micro_batches, after_forward
        self._num_backward = 0

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        out: Tensor = self.model(x, targets, self._scale)
        out.register_hook(self._count)  # type: ignore[no-untyped-call]
        self._after_forward()
        return out

    def _count(self, _: Tensor) -> None:
        self._num_backward += 1
        if self._num_backward == self._num_micro_batches:
            self._stage.expect_backward(last=True)


def _loss_of(output: Tensor, _: Tensor) -> Tensor:
    """The last stage computes its loss itself."""
    return output

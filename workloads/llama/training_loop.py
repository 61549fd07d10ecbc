"""The training of one rank: its part of the model, and optimizer steps on the tokens of a seed.

It knows nothing of trials: what is timed or counted, and where results go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.core.problem.layout import Precision
from orchestrator.core.sweepfile.workload_options import Accumulate, LlamaOptions
from orchestrator.core.trial.protocol import TrialRequest
from workloads.llama.attention_kernel import SeenKernels, choose_attention, pinned
from workloads.llama.data import Tokens
from workloads.llama.gradient_norm import gradient_norm
from workloads.llama.loss_scale import LossScale
from workloads.llama.memory import States
from workloads.llama.mesh import Groups, RankPlace
from workloads.llama.model import Llama, is_uncut
from workloads.llama.optimizer import AdamW
from workloads.llama.pipeline import Pipeline
from workloads.llama.trained_part import DTYPES, PartBuilder
from workloads.rank import Rank


def training_loop(rank: Rank, options: LlamaOptions, *, device: torch.device) -> TrainingLoop:
    """Build this rank's part of the training."""
    place = Groups().place(rank.request.layout, replicas=options.replicas)
    return TrainingLoop(rank.request, options, device=device, place=place)


class TrainingLoop:
    """Model, gradients, optimizer and data of one rank."""

    def __init__(
        self,
        request: TrialRequest,
        options: LlamaOptions,
        *,
        device: torch.device,
        place: RankPlace | None = None,
        compile_backend: str = "inductor",
    ) -> None:
        self._layout, self._device, self._options = request.layout, device, options
        self._place = place or RankPlace()
        self._attention = choose_attention(options.attention, device, request.layout.precision)
        self._builder = PartBuilder(
            request=request,
            options=options,
            attention=self._attention,
            place=self._place,
            device=device,
            compile_backend=compile_backend,
        )
        self.replica = self._builder.build()
        self.optimizer = AdamW(self.replica.weights, learning_rate=options.learning_rate)
        is_fp16 = request.layout.precision is Precision.FP16
        self._loss_scale = LossScale(device) if is_fp16 else None
        self._norm: Tensor | None = None
        self._positions = self._builder.context_parallel.positions.numpy()
        self._tokens = Tokens(
            vocab_size=request.model.vocab_size,
            sequence_length=request.sequence_length,
            seed=request.seed,
            token_file=Path(options.token_file) if options.token_file is not None else None,
            dtype=options.token_dtype,
        )

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of this rank's micro-batches of a step."""
        return self._tokens.micro_batches(
            step=step,
            layout=self._layout,
            data_parallel_rank=self._place.dp.index,
            device=self._device,
            positions=self._positions,
        )

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Take an optimizer step; return the mean loss of this rank's micro-batches."""
        return self._step(micro_batches, after_forward=lambda: None)

    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradients, before they were clipped.

        Before the first step, it is that of a backward pass over the tokens of step 0.
        """
        if self._norm is None:
            self._gradients(self.micro_batches(0), lambda: None)
            self._norm = self._find_norm()
            self.replica.clear_gradients()
        return float(self._norm)

    def untimed_step(self, after_forward: Callable[[], None]) -> None:
        """Take a step to measure memory: every micro-batch needs the same.

        But with gradients that stay whole, the second needs more; and a pipeline holds several.
        """
        if isinstance(self.replica, Pipeline):
            self._step(self.micro_batches(0), after_forward=after_forward)
            return
        keeps_whole = self._options.accumulate is Accumulate.LAST and self._builder.is_sharded
        probes = iter([after_forward])
        micro_batches = self.micro_batches(0)[: 2 if keeps_whole else 1]
        self._step(micro_batches, after_forward=lambda: next(probes, lambda: None)())

    def attention_kernel(self) -> str:
        """Run one layer forward, and return the name of the kernel of attention that it called."""
        model, kernels = self.models[0], SeenKernels()
        x = torch.zeros(
            self._layout.micro_batch_size,
            len(model.rotation[0]) // model.tensor_parallel.size,
            model.shape.hidden_size,
            dtype=DTYPES[self._layout.precision],
            device=self._device,
        )
        # A mode sees operations in eager mode only.
        with pinned(self._attention), torch.compiler.set_stance("force_eager"), kernels:
            next(iter(model.layers.values()))(x, model.rotation, model.causal_mask)
        return kernels.summary(self._attention)

    def states(self) -> States:
        """Return the tensors that live from step to step."""
        return States(
            parameters=tuple(self.replica.weights),
            gradients=self.replica.lasting_gradients(),
            optimizer=self.optimizer.tensors(),
            constants=(
                *(each for model in self.models for each in model.constants()),
                *self._receive_buffers,
            ),
        )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's weights, or its parts of them, by their names in the whole model."""
        for model in self.models:
            yield from model.named_parameters()

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole weight, if it is not sharded."""
        return self.models[0].own_part(name, whole)

    @property
    def _receive_buffers(self) -> list[Tensor]:
        return self.replica.receive_buffers() if isinstance(self.replica, Pipeline) else []

    @property
    def models(self) -> list[Llama]:
        """The whole model, or those of this rank's stages."""
        part = self.replica
        return part.models if isinstance(part, Pipeline) else [part.model]

    def _step(
        self, micro_batches: list[tuple[Tensor, Tensor]], *, after_forward: Callable[[], None]
    ) -> Tensor:
        loss = self._gradients(micro_batches, after_forward)
        self._update()
        self.replica.clear_gradients()
        return loss

    def _gradients(
        self, micro_batches: list[tuple[Tensor, Tensor]], after_forward: Callable[[], None]
    ) -> Tensor:
        scale = self._loss_scale.value if self._loss_scale is not None else 1.0
        with pinned(self._attention):
            loss = self.replica.step_gradients(
                micro_batches, loss_scale=scale, after_forward=after_forward
            )
        self._builder.tensor_parallel.sum_gradients(
            [gradient for gradient in self.replica.gradients() if is_uncut(gradient)]
        )
        return loss

    def _update(self) -> None:
        """Step the optimizer: with clipped gradients, and not if they overflow in fp16."""
        gradients, clip = self.replica.gradients(), self._options.clip_gradients
        if not clip and self._loss_scale is None:
            self.optimizer.step(gradients)
            return
        self._norm = self._find_norm()
        divisor = (self._norm / clip).clamp(min=1.0) if clip else torch.ones_like(self._norm)
        if self._loss_scale is None:
            self.optimizer.step(gradients, divisor=divisor)
            return
        overflows = self._norm.isfinite().logical_not().float()
        self.optimizer.step(
            gradients, divisor=divisor * self._loss_scale.value, overflows=overflows
        )
        self._loss_scale.update(overflows)

    def _find_norm(self) -> Tensor:
        """The norm of the gradients of the step, without the loss scale."""
        place, gradients = self._place, self.replica.gradients()
        shards = [place.shards.group] if self._builder.is_sharded else []
        copies = [each for each in gradients if is_uncut(each)] if place.tp.size > 1 else []
        norm = gradient_norm(
            [each for each in gradients if not (copies and is_uncut(each))],
            [*shards, place.tp.group, place.pp.group],
            copies=copies,
            num_copies=place.tp.size,
        )
        return norm if self._loss_scale is None else norm / self._loss_scale.value

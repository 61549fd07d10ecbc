"""One rank of one trial: build the model for its layout, train until its speed is known, report."""

from __future__ import annotations

import gc
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

# AdamW, DDP and checkpointing import it when first used: over a second, here before the fork.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.problem.layout import Precision
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.llama_rules import refusal as llama_refusal
from orchestrator.core.sweepfile.workload_options import (
    Accumulate,
    LlamaOptions,
)
from orchestrator.core.trial.measurement import hardware_flops_per_token
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from workloads.llama.attention_kernel import (
    SeenKernels,
    check_attention,
    choose_attention,
    pinned,
)
from workloads.llama.data import Tokens
from workloads.llama.gradient_norm import gradient_norm
from workloads.llama.loss_scale import LossScale
from workloads.llama.memory import DeviceMemory, LiveMemory, MemoryReport, States
from workloads.llama.mesh import Groups, RankPlace
from workloads.llama.model import Llama, is_uncut
from workloads.llama.optimizer import AdamW
from workloads.llama.peak_flops import PeakFlops, listed_peak, trial_peak
from workloads.llama.pipeline import Pipeline
from workloads.llama.stack import describe_stack
from workloads.llama.timing import TimedSteps, time_steps
from workloads.llama.trained_part import DTYPES, PartBuilder
from workloads.options import parse_options
from workloads.rank import ConfigRejected, NotFinite, Rank, seconds_since_process_start
from workloads.rendezvous import join_gang

# Of activations and, without sharding, weights.
_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP8: torch.bfloat16,
}


def train(rank: Rank) -> RankResult:
    """Measure the layout of a rank's request. Raises ConfigRejected if it cannot run here."""
    start_seconds = seconds_since_process_start()
    begin = time.perf_counter()
    rank.heartbeat(Phase.RENDEZVOUS)
    request = rank.request
    options = check(request)
    device = open_device(rank, options)
    if rank.world_size > 1:
        join_gang(rank, device)
    stack = describe_stack(device)
    tokens = request.layout.global_batch_size * request.sequence_length

    def result_of(
        timed: TimedSteps, report: MemoryReport, *, peak: PeakFlops | None, kernel: str | None
    ) -> RankResult:
        phases = {
            **({Phase.START: start_seconds} if start_seconds is not None else {}),
            Phase.RENDEZVOUS: timed.began_at - begin,
            Phase.FIRST_STEP: timed.first_step_seconds,
            Phase.STEADY: timed.steady_seconds,
        }
        return RankResult(
            step_seconds=timed.step_seconds,
            warmup_seconds=timed.warmup_seconds,
            step_seconds_bound=timed.step_seconds_bound,
            tokens_per_step=tokens,
            phase_seconds=rank.with_teardown(phases),
            peak_memory_allocated_bytes=report.peak_allocated_bytes,
            peak_memory_reserved_bytes=report.peak_reserved_bytes,
            peak_memory_active_bytes=report.peak_active_bytes,
            inactive_split_bytes=report.inactive_split_bytes,
            device_used_bytes=report.device_used_bytes,
            memory_bytes_by_part=report.bytes_by_part,
            device_memory_bytes=report.device_bytes,
            allocator_retries=report.allocator_retries,
            allocator_ooms=report.allocator_ooms,
            peak_flops=peak.flops if peak is not None else None,
            peak_flops_source=peak.source if peak is not None else None,
            loss_first=timed.loss_first,
            loss_last=timed.loss_last,
            attention_kernel=kernel,
            stack=stack,
        )

    handed_over: list[RankResult] = []

    def hand_over(timed: TimedSteps, peaks: MemoryReport) -> None:
        peak = listed_peak(device, request.layout.precision)
        handed_over.append(result_of(timed, peaks, peak=peak, kernel=None))
        rank.finish(handed_over[0])

    timed, report, kernel = _train_and_measure(rank, options, device=device, hand_over=hand_over)
    # The model: a measured peak needs memory.
    gc.collect()
    peak = trial_peak(
        request,
        node=socket.gethostname(),  # as the launcher names its node
        device=device,
        device_name=stack.device_name,
        achieved_flops=_achieved_flops(
            request, tokens_per_second=tokens / timed.slowest_median_seconds
        ),
    )
    result = result_of(timed, report, peak=peak, kernel=kernel)
    if handed_over:
        # Since then its launcher counts the teardown.
        phases = handed_over[0].phase_seconds
        result = result.model_copy(update={"phase_seconds": phases})
    # First: a hang in the end of the process group then changes nothing.
    rank.finish(result)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _achieved_flops(request: TrialRequest, *, tokens_per_second: float) -> float:
    """FLOP/s of each device, recomputation included."""
    per_token = hardware_flops_per_token(
        request.model, sequence_length=request.sequence_length, layout=request.layout
    )
    return tokens_per_second / request.layout.world_size * per_token


def _train_and_measure(
    rank: Rank,
    options: LlamaOptions,
    *,
    device: torch.device,
    hand_over: Callable[[TimedSteps, MemoryReport], None],
) -> tuple[TimedSteps, MemoryReport, str]:
    """Timed steps, memory, and the kernel of attention; frees the model.

    `hand_over` gets what is known before the look at the memory by part, whatever happens there.
    """
    request = rank.request
    trainer = training_loop(rank, options, device=device)
    memory = (
        DeviceMemory(trainer.states(), device=device)
        if device.type == "cuda"
        else LiveMemory(trainer.states(), limit_bytes=options.memory_limit_bytes)
    )

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        with memory.first_step() if rank.phase is Phase.FIRST_STEP else nullcontext():
            return trainer.step(micro_batches)

    timed = time_steps(
        trainer.micro_batches,
        step,
        plan=request.measurement,
        device=device,
        before_step=lambda number, timed: rank.heartbeat(
            Phase.STEADY if number else Phase.FIRST_STEP, number, timed=timed
        ),
        after_first_step=memory.after_first_step,
    )
    rank.heartbeat(Phase.STEADY, rank.step)  # what follows is not timed
    norm = trainer.gradient_norm()
    if not math.isfinite(norm):
        raise NotFinite.of("gradient norm", norm, step=rank.step + 1)
    # A pipeline has made its receive buffers.
    memory.states = trainer.states()
    peaks = memory.peaks()
    if peaks is not None:
        hand_over(timed, peaks)
    report = memory.report(trainer.untimed_step)
    return timed, report, trainer.attention_kernel()


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
        """The norm of the last step's gradients, before they were clipped."""
        if self._norm is None:
            self._gradients(self.micro_batches(0), lambda: None)
            self._norm = self._find_norm()
            self.replica.clear_gradients()
        return float(self._norm)

    def untimed_step(self, after_forward: Callable[[], None]) -> None:
        """A step to measure memory: every micro-batch needs the same.

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
        model, kernels = self._models[0], SeenKernels()
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
        return States(
            parameters=tuple(self.replica.weights),
            gradients=self.replica.lasting_gradients(),
            optimizer=self.optimizer.tensors(),
            constants=(
                *(each for model in self._models for each in model.constants()),
                *self._receive_buffers,
            ),
        )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights, or its parts of them, by their names in the whole model."""
        for model in self._models:
            yield from model.named_parameters()

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole weight, if it is not sharded."""
        return self._models[0].own_part(name, whole)

    @property
    def _receive_buffers(self) -> list[Tensor]:
        return self.replica.receive_buffers() if isinstance(self.replica, Pipeline) else []

    @property
    def _models(self) -> list[Llama]:
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


def check(request: TrialRequest) -> LlamaOptions:
    """Return the options. Raises ConfigRejected, with the field and what is possible."""
    refusal = CAPABILITIES["llama"].refusal(request.layout)
    if refusal is not None:
        raise ConfigRejected(f"workload llama cannot run {request.layout.key}: {refusal}")
    options = parse_options(LlamaOptions, request.options)
    check_attention(options.attention, request.device, request.layout.precision)
    refusal = llama_refusal(
        request.layout,
        model=request.model,
        sequence_length=request.sequence_length,
        options=options,
    )
    if refusal is not None:
        raise ConfigRejected(f"workload llama cannot run {request.layout.key}: {refusal}")
    _check_fp8(request, options)
    if options.memory_limit_bytes is not None and request.device is not Device.CPU:
        raise ConfigRejected(
            "workload.options: memory_limit_bytes is for device cpu; a GPU has a limit of its own"
        )
    return options


def _check_fp8(request: TrialRequest, options: LlamaOptions) -> None:
    if request.layout.precision is not Precision.FP8:
        return
    if request.device is Device.CPU:
        raise ConfigRejected("precision fp8 needs a GPU; a CPU has no fp8 products")
    if options.compile is False:
        raise ConfigRejected(
            "workload.options.compile: false with precision fp8 would time the conversions of each "
            "product, which compiling fuses"
        )


def open_device(rank: Rank, options: LlamaOptions) -> torch.device:
    if rank.request.device is Device.CPU:
        torch.set_num_threads(options.num_threads)
        return torch.device("cpu")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if rank.local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"LOCAL_RANK {rank.local_rank} has no device: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} of CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}, which has to name one for each rank of "
            "this node"
        )
    device = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32, as core/hardware's fp32 peaks assume
    return device

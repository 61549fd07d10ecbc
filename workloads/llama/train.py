"""One rank of one trial: build the model for its layout, train until its speed is known, report."""

from __future__ import annotations

import gc
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

# AdamW, DDP and checkpointing import it when first used: over a second, here before the fork.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.problem.layout import Precision
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.workload_options import GradientDtype, LlamaOptions
from orchestrator.core.trial.measurement import hardware_flops_per_token
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from workloads.llama.data import Tokens
from workloads.llama.data_parallel import Replica
from workloads.llama.memory import DeviceMemory, LiveMemory, MemoryReport, States
from workloads.llama.model import Llama
from workloads.llama.optimizer import AdamW
from workloads.llama.peak_flops import trial_peak
from workloads.llama.stack import describe_stack
from workloads.llama.timing import TimedSteps, time_steps
from workloads.options import parse_options
from workloads.rank import ConfigRejected, NotFinite, Rank, seconds_since_process_start
from workloads.rendezvous import join_gang

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def train(rank: Rank) -> RankResult:
    """Measure the layout of a rank's request. Raises ConfigRejected if it cannot run here."""
    start_seconds = seconds_since_process_start()
    begin = time.perf_counter()
    rank.heartbeat(Phase.RENDEZVOUS)
    request = rank.request
    options = check(request)
    device = _open_device(rank, options)
    if rank.world_size > 1:
        join_gang(rank, device)
    timed, report, rendezvous_seconds = _train_and_measure(
        rank, options, device=device, begin=begin
    )
    # The model: a measured peak needs memory.
    gc.collect()
    stack = describe_stack(device)
    tokens = request.layout.global_batch_size * request.sequence_length
    peak = trial_peak(
        request,
        node=socket.gethostname(),  # as the launcher names its node
        device=device,
        device_name=stack.device_name,
        achieved_flops=_achieved_flops(
            request, tokens_per_second=tokens / timed.slowest_median_seconds
        ),
    )
    phases = {
        **({Phase.START: start_seconds} if start_seconds is not None else {}),
        Phase.RENDEZVOUS: rendezvous_seconds,
        Phase.FIRST_STEP: timed.first_step_seconds,
        Phase.STEADY: timed.steady_seconds,
    }
    result = RankResult(
        step_seconds=timed.step_seconds,
        warmup_seconds=timed.warmup_seconds,
        tokens_per_step=tokens,
        phase_seconds=rank.with_teardown(phases),
        peak_memory_allocated_bytes=report.peak_allocated_bytes,
        peak_memory_reserved_bytes=report.peak_reserved_bytes,
        memory_bytes_by_part=report.bytes_by_part,
        device_memory_bytes=report.device_bytes,
        allocator_retries=report.allocator_retries,
        peak_flops=peak.flops if peak is not None else None,
        peak_flops_source=peak.source if peak is not None else None,
        loss_first=timed.loss_first,
        loss_last=timed.loss_last,
        stack=stack,
    )
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
    rank: Rank, options: LlamaOptions, *, device: torch.device, begin: float
) -> tuple[TimedSteps, MemoryReport, float]:
    """Timed steps, memory, and the seconds until the model was built; frees the model."""
    request = rank.request
    trainer = TrainingLoop(request, options, device=device, data_parallel_rank=rank.rank)
    memory = (
        DeviceMemory(trainer.states(), device=device)
        if device.type == "cuda"
        else LiveMemory(trainer.states(), limit_bytes=options.memory_limit_bytes)
    )
    rendezvous_seconds = time.perf_counter() - begin

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        with memory.first_step() if rank.phase is Phase.FIRST_STEP else nullcontext():
            return trainer.step(micro_batches)

    timed = time_steps(
        trainer.micro_batches,
        step,
        plan=request.measurement,
        device=device,
        before_step=lambda number: rank.heartbeat(
            Phase.STEADY if number else Phase.FIRST_STEP,
            number,
            timed=number >= request.measurement.warmup_steps,
        ),
        after_first_step=memory.after_first_step,
    )
    rank.heartbeat(Phase.STEADY, rank.step)  # what follows is not timed
    norm = trainer.gradient_norm()
    if not math.isfinite(norm):
        raise NotFinite.of("gradient norm", norm, step=rank.step + 1)
    return timed, memory.report(trainer.untimed_step), rendezvous_seconds


class TrainingLoop:
    """Model, gradients, optimizer and data of one rank."""

    def __init__(
        self,
        request: TrialRequest,
        options: LlamaOptions,
        *,
        device: torch.device,
        data_parallel_rank: int,
    ) -> None:
        self._layout, self._device = request.layout, device
        self._data_parallel_rank = data_parallel_rank
        model = Llama(
            request.model,
            sequence_length=request.sequence_length,
            attention=options.attention,
            recompute=request.layout.recompute,
            dtype=_DTYPES[request.layout.precision],
            device=device,
        )
        model.materialise(device, seed=request.seed)
        self.replica = Replica(
            model, accumulate_in_fp32=options.gradient_dtype is GradientDtype.FP32
        )
        self.optimizer = AdamW(
            self.replica.weights,
            self.replica.gradients(),
            learning_rate=options.learning_rate,
            num_shards=self._layout.data_parallel_size if self._layout.zero_stage == 1 else 1,
            shard=data_parallel_rank if self._layout.zero_stage == 1 else 0,
        )
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
            data_parallel_rank=self._data_parallel_rank,
            device=self._device,
        )

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        loss = self.replica.step_gradients(micro_batches)
        self.optimizer.step()
        return loss

    def gradient_norm(self) -> float:
        """The norm of the last step's gradients."""
        norms = torch.stack(torch._foreach_norm(self.replica.gradients())).float()
        return float(torch.linalg.vector_norm(norms))

    def untimed_step(self, after_forward: Callable[[], None]) -> None:
        """A step of one micro-batch, to measure memory: every micro-batch needs the same."""
        self.replica.step_gradients(self.micro_batches(0)[:1], after_forward=after_forward)
        self.optimizer.step()

    def states(self) -> States:
        return States(
            parameters=tuple(self.replica.weights),
            gradients=self.replica.all_gradient_tensors(),
            optimizer=self.optimizer.tensors(),
            constants=self.replica.model.constants(),
        )


def check(request: TrialRequest) -> LlamaOptions:
    """Return the options. Raises ConfigRejected, with the field and what is possible."""
    refusal = CAPABILITIES["llama"].refusal(request.layout)
    if refusal is not None:
        raise ConfigRejected(f"workload llama cannot run {request.layout.key}: {refusal}")
    options = parse_options(LlamaOptions, request.options)
    if options.memory_limit_bytes is not None and request.device is not Device.CPU:
        raise ConfigRejected(
            "workload.options: memory_limit_bytes is for device cpu; a GPU has a limit of its own"
        )
    return options


def _open_device(rank: Rank, options: LlamaOptions) -> torch.device:
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

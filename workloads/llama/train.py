"""One rank of one trial: build the model for its layout, train until its speed is known, report."""

from __future__ import annotations

import gc
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

# AdamW, DDP and checkpointing import it when first used: over a second, here before the fork.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.measurement import hardware_flops_per_token
from orchestrator.core.trial.protocol import Device, Phase, RankResult, TrialRequest
from workloads.llama.compile_time import timed_compilations
from workloads.llama.memory import DeviceMemory, LiveMemory, MemoryReport
from workloads.llama.peak_flops import PeakFlops, listed_peak, trial_peak
from workloads.llama.refusals import check
from workloads.llama.stack import describe_stack
from workloads.llama.timing import TimedSteps, time_steps
from workloads.llama.training_loop import training_loop
from workloads.rank import NotFinite, Rank, seconds_since_process_start
from workloads.rendezvous import join_gang


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
            compile_seconds=compilations.seconds,
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

    with timed_compilations() as compilations:
        timed, report, kernel = _train_and_measure(
            rank, options, device=device, hand_over=hand_over
        )
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

    `hand_over` gets the result before memory by part is measured, which may fail.
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


def open_device(rank: Rank, options: LlamaOptions) -> torch.device:
    """Return this rank's device, and make it torch's.

    Raises RuntimeError if the rank has no GPU of its own.
    """
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

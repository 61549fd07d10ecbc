"""Times optimizer steps: first a warm-up, then steps until their median is known well enough.

Every rank times its own steps. All ranks stop after the same one: all decide by the slowest rank's
samples. See docs/measuring.md.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.trial.measurement import enough
from orchestrator.core.trial.protocol import MeasurementPlan
from workloads.rank import NotFinite


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    warmup_seconds: list[float]
    step_seconds: list[float]  # this rank's
    # The median of the slowest rank's time in each timed step: the same on every rank.
    slowest_median_seconds: float
    first_step_seconds: float  # wall time until its end
    steady_seconds: float
    loss_first: float  # of the global batch
    loss_last: float


def time_steps(
    prepare: Callable[[int], list[tuple[Tensor, Tensor]]],
    step: Callable[[list[tuple[Tensor, Tensor]]], Tensor],
    *,
    plan: MeasurementPlan,
    device: torch.device,
    before_step: Callable[[int], None],
    after_first_step: Callable[[], None],
) -> TimedSteps:
    """Run optimizer steps, beginning with the warm-up. Raises NotFinite for a loss that is not
    finite.

    `prepare` makes a step's micro-batches outside of the timing, `step` trains on them and returns
    the loss, `before_step` gets each step's number. Losses stay on the device, and are read at the
    end of the warm-up and of the timing.
    """
    begin = time.perf_counter()
    warmup: list[float] = []
    own: list[float] = []
    slowest: list[float] = []
    losses = torch.zeros(plan.warmup_steps + plan.max_steps, device=device)

    def run_step(number: int) -> float:
        before_step(number)
        micro_batches = prepare(number)
        synchronize(device)
        start = time.perf_counter()
        loss = step(micro_batches)
        synchronize(device)
        seconds = time.perf_counter() - start
        losses[number] = loss
        return seconds

    warmup.append(run_step(0))
    first_step_seconds = time.perf_counter() - begin
    after_first_step()
    for number in range(1, plan.warmup_steps):
        warmup.append(run_step(number))
    _check_finite(losses[: len(warmup)], first_step=1)
    with _no_garbage_collection():
        while not (slowest and enough(slowest, plan)):
            own.append(run_step(plan.warmup_steps + len(own)))
            slowest.append(_over_ranks(own[-1:], dist.ReduceOp.MAX, device)[0])
            gc.collect()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    _check_finite(losses[len(warmup) :][: len(own)], first_step=len(warmup) + 1)
    first_and_last = [losses[0].item(), losses[len(warmup) + len(own) - 1].item()]
    loss_first, loss_last = (
        total / world_size for total in _over_ranks(first_and_last, dist.ReduceOp.SUM, device)
    )
    return TimedSteps(
        warmup_seconds=warmup,
        step_seconds=own,
        slowest_median_seconds=statistics.median(slowest),
        first_step_seconds=first_step_seconds,
        steady_seconds=time.perf_counter() - begin - first_step_seconds,
        loss_first=loss_first,
        loss_last=loss_last,
    )


def _check_finite(losses: Tensor, *, first_step: int) -> None:
    for number, loss in enumerate(losses.tolist()):
        if not math.isfinite(loss):
            raise NotFinite.of("loss", loss, step=first_step + number)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Leave it to the caller to collect between steps, and only what is new since now."""
    # Not the oldest generation, from imports: to search it takes longer than many steps.
    gc.collect(1)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _over_ranks(
    values: list[float], reduction: dist.ReduceOp.RedOpType, device: torch.device
) -> list[float]:
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=reduction)
    return [float(value) for value in tensor.tolist()]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

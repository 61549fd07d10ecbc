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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.trial.protocol import MAX_SAMPLES, MeasurementPlan
from orchestrator.core.trial.stopping import advance_timing, begin
from workloads.rank import NotFinite

# So many steps at most does the host enqueue before the device has run them: enough to keep it
# busy, and few enough that heartbeats tell where it is.
STEPS_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """The times of a rank's steps in seconds, and the first and the last loss."""

    warmup_seconds: list[float]
    step_seconds: list[float]  # this rank's
    # The median of the slowest rank's time in each timed step: the same on every rank.
    slowest_median_seconds: float
    # The bound of a layout that cannot be the best, and was ended early. None: it was not.
    step_seconds_bound: float | None
    began_at: float  # by time.perf_counter
    first_step_seconds: float  # wall time until its end
    steady_seconds: float
    loss_first: float  # of the global batch
    loss_last: float


class StepClock(Protocol):
    """Times steps one after the other, each between `start` and `stop`."""

    # True if `read` waits for the device: then it is asked only when its answer is needed.
    is_asynchronous: bool

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def read(self) -> list[float]:
        """Return the seconds of the steps since the last call."""


class HostClock:
    """Times the steps of a CPU, which has done a step when the call returns."""

    is_asynchronous = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began = clock, 0.0
        self._seconds: list[float] = []

    def start(self) -> None:
        self._began = self._clock()

    def stop(self) -> None:
        self._seconds.append(self._clock() - self._began)

    def read(self) -> list[float]:
        seconds, self._seconds = self._seconds, []
        return seconds


class Event(Protocol):
    """A mark in the device's queue, as torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    # Any: torch's own events take and return it.
    def elapsed_time(self, end_event: Any) -> Any: ...


class DeviceClock:
    """Times a GPU's steps by events in its queue, which never runs empty for it.

    A step counts from when the device takes it up, after the step before, to its end. What the host
    does between two steps counts only if the device waits for it during a step.
    """

    is_asynchronous = True

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._steps: list[tuple[Event, Event]] = []

    def start(self) -> None:
        if len(self._steps) >= STEPS_AHEAD:
            self._steps[-STEPS_AHEAD][1].synchronize()
        start, end = self._new_event(), self._new_event()
        start.record()
        self._steps.append((start, end))

    def stop(self) -> None:
        self._steps[-1][1].record()

    def read(self) -> list[float]:
        steps, self._steps = self._steps, []
        if steps:
            steps[-1][1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in steps]


def clock_of(device: torch.device) -> StepClock:
    """Return the clock for the steps of a device."""
    if device.type != "cuda":
        return HostClock()
    # Blocking: a host that waits leaves its core to others.
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    )


def time_steps(
    prepare: Callable[[int], list[tuple[Tensor, Tensor]]],
    step: Callable[[list[tuple[Tensor, Tensor]]], Tensor],
    *,
    plan: MeasurementPlan,
    device: torch.device,
    before_step: Callable[[int, bool], None],
    after_first_step: Callable[[], None],
    clock: StepClock | None = None,
) -> TimedSteps:
    """Run optimizer steps, beginning with the warm-up. Raises NotFinite for a loss that is not
    finite.

    `prepare` makes a step's micro-batches outside of the timing, `step` trains on them and returns
    the loss, `before_step` gets each step's number and whether it is timed. Losses stay on the
    device, and are read at the end of the warm-up and of the timing.
    """
    begun = time.perf_counter()
    clock = clock_of(device) if clock is None else clock
    own: list[float] = []
    slowest: list[float] = []
    losses = torch.zeros(2 * MAX_SAMPLES, device=device)
    num_steps, num_checked, timing = 0, 0, begin(plan)

    def run_step() -> None:
        before_step(num_steps, timing.is_timed)
        micro_batches = prepare(num_steps)
        clock.start()
        loss = step(micro_batches)
        clock.stop()
        losses[num_steps] = loss

    def exchange() -> None:
        seconds = clock.read()
        own.extend(seconds)
        slowest.extend(_over_ranks(seconds, dist.ReduceOp.MAX, device))

    run_step()
    num_steps = 1
    exchange()
    first_step_seconds = time.perf_counter() - begun
    after_first_step()
    timing = advance_timing(timing, slowest, plan)
    with _no_garbage_collection():
        while not timing.is_enough:
            if timing.is_timed and not num_checked:
                _check_finite(losses[:num_steps], first_step=1)
                num_checked = num_steps
            run_step()
            num_steps += 1
            if not clock.is_asynchronous or num_steps >= timing.next_check:
                exchange()
                timing = advance_timing(timing, slowest, plan)
            gc.collect(1)
    _check_finite(losses[num_checked:num_steps], first_step=num_checked + 1)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    first_and_last = [losses[0].item(), losses[num_steps - 1].item()]
    loss_first, loss_last = (
        total / world_size for total in _over_ranks(first_and_last, dist.ReduceOp.SUM, device)
    )
    num_warmup = timing.num_warmup or 0
    return TimedSteps(
        warmup_seconds=own[:num_warmup],
        step_seconds=own[num_warmup:],
        slowest_median_seconds=statistics.median(slowest[num_warmup:]),
        step_seconds_bound=timing.bound,
        began_at=begun,
        first_step_seconds=first_step_seconds,
        steady_seconds=time.perf_counter() - begun - first_step_seconds,
        loss_first=loss_first,
        loss_last=loss_last,
    )


def _check_finite(losses: Tensor, *, first_step: int) -> None:
    for number, loss in enumerate(losses.tolist()):
        if not math.isfinite(loss):
            raise NotFinite.of("loss", loss, step=first_step + number)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Leave it to the caller to collect the younger generations between steps.

    What is there now gets old at once. To search that takes longer than many steps, and what a step
    leaves behind does not outlive the next one.
    """
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _over_ranks(
    values: list[float], reduction: dist.ReduceOp.RedOpType, device: torch.device
) -> list[float]:
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=reduction)
    return [float(value) for value in tensor.tolist()]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that is enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

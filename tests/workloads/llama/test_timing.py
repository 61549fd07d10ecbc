"""Timing with a device that is not there: events in a queue that a fake device works off."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from orchestrator.core.trial.protocol import MeasurementPlan
from workloads.llama.timing import STEPS_AHEAD, DeviceClock, HostClock, TimedSteps, time_steps
from workloads.rank import NotFinite

CPU = torch.device("cpu")
PLAN = MeasurementPlan(warmup_steps=3, min_steps=5, max_steps=12, relative_confidence=0.02)


@dataclass(eq=False)
class Queue:
    """A device that runs what the host enqueues, in order. Both have a clock in seconds."""

    host: float = 0.0
    # When all that is enqueued is done.
    device: float = 0.0
    waits: list[float] = field(default_factory=list)  # of the host for the device

    def enqueue(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def event(self) -> FakeEvent:
        return FakeEvent(self)


@dataclass(eq=False)
class FakeEvent:
    queue: Queue
    at: float | None = None

    def record(self) -> None:
        self.at = max(self.queue.device, self.queue.host)

    def synchronize(self) -> None:
        assert self.at is not None, "recorded before"
        self.queue.waits.append(max(0.0, self.at - self.queue.host))
        self.queue.host = max(self.queue.host, self.at)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at is not None
        assert end_event.at is not None
        assert self.queue.host >= end_event.at, "read before it has happened"
        return (end_event.at - self.at) * 1000


def run(
    queue: Queue,
    *,
    plan: MeasurementPlan = PLAN,
    launch: float = 0.001,
    work: float = 0.06,
    tokens: float = 0.002,
    lag: list[float] | None = None,
    beats: list[bool] | None = None,
) -> TimedSteps:
    """Time steps that take the host `launch` seconds and the device `work`; between two of them the
    host makes tokens.
    """

    def prepare(number: int) -> list[tuple[Tensor, Tensor]]:
        queue.host += tokens
        return []

    def step(_: list[tuple[Tensor, Tensor]]) -> Tensor:
        if lag is not None:
            lag.append(queue.device - queue.host)
        # The kernels of a step come one by one.
        for _kernel in range(10):
            queue.host += launch / 10
            queue.enqueue(work / 10)
        return torch.ones(())

    return time_steps(
        prepare,
        step,
        plan=plan,
        device=CPU,
        before_step=lambda number, timed: beats.append(timed) if beats is not None else None,
        after_first_step=lambda: None,
        clock=DeviceClock(queue.event),
    )


def test_a_step_of_a_busy_device_is_as_long_as_its_work() -> None:
    timed = run(Queue())
    # The first one after a look begins with the launch of its first kernel.
    assert timed.step_seconds == pytest.approx([0.0601, *[0.06] * 7])
    assert len(timed.warmup_seconds) == 3
    assert timed.slowest_median_seconds == pytest.approx(0.06)


def test_a_host_that_is_too_slow_is_part_of_the_step_and_making_tokens_is_not() -> None:
    timed = run(Queue(), launch=0.1, work=0.01, tokens=0.05)
    # From the step's beginning to the end of its last kernel.
    assert timed.step_seconds == pytest.approx([0.1 + 0.001] * 8, rel=0.02)


def test_the_queue_never_runs_empty_between_two_looks() -> None:
    queue, lag = Queue(), list[float]()
    run(queue, lag=lag)
    # After the first step, and where samples are exchanged (after the warm-up and 8 timed steps),
    # the device has nothing to do.
    idle = [place for place, left in enumerate(lag) if left <= 0]
    assert idle == [0, 1, 3]
    assert all(left > 0.05 for place, left in enumerate(lag) if place > 4)


def test_the_host_is_never_further_ahead_than_its_heartbeats_may_be() -> None:
    lag: list[float] = []
    run(Queue(), plan=PLAN.model_copy(update={"min_seconds": 10.0}), launch=1e-6, lag=lag)
    assert len(lag) > 100
    assert max(lag) <= STEPS_AHEAD * 0.06 + 1e-9


def test_a_plan_of_seconds_times_a_gpu_for_so_long_and_says_when() -> None:
    beats: list[bool] = []
    plan = PLAN.model_copy(update={"warmup_seconds": 2.0, "min_seconds": 5.0})
    timed = run(Queue(), plan=plan, beats=beats)
    assert sum(timed.warmup_seconds[1:]) >= 2.0
    assert 5.0 <= sum(timed.step_seconds) < 7.6
    assert beats.index(True) == len(timed.warmup_seconds)
    assert all(beats[beats.index(True) :])


def test_a_host_clock_times_each_call_by_itself() -> None:
    now = iter([1.0, 1.5, 4.0, 4.25])
    clock = HostClock(lambda: next(now))
    for _ in range(2):
        clock.start()
        clock.stop()
    assert clock.read() == [0.5, 0.25]
    assert clock.read() == []


@pytest.mark.parametrize("bad_step", [1, 2, 5, 10])
def test_a_loss_that_is_not_finite_is_found_without_reading_each(bad_step: int) -> None:
    queue, done = Queue(), list[int]()

    def step(_: list[tuple[Tensor, Tensor]]) -> Tensor:
        queue.enqueue(0.06)
        done.append(1)
        return torch.tensor(float("nan") if len(done) == bad_step else 1.0)

    with pytest.raises(NotFinite, match=f"loss of step {bad_step} is nan"):
        time_steps(
            lambda _: [],
            step,
            plan=PLAN,
            device=CPU,
            before_step=lambda *_: None,
            after_first_step=lambda: None,
            clock=DeviceClock(queue.event),
        )


class Cycle:
    """Freed by the garbage collector alone."""

    def __init__(self) -> None:
        self.itself = self


def test_what_steps_leave_behind_is_collected_between_them_and_what_was_frozen_stays_so() -> None:
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    seen: list[tuple[int, bool]] = []

    def step(_: list[tuple[Tensor, Tensor]]) -> Tensor:
        seen.append((len(alive), gc.isenabled()))
        alive.add(Cycle())
        return torch.zeros(())

    gc.freeze()
    try:
        time_steps(
            lambda _: [],
            step,
            plan=PLAN,
            device=CPU,
            before_step=lambda _, __: None,
            after_first_step=lambda: None,
        )
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert seen[2:] == [(0, False)] * (len(seen) - 2)
    assert gc.isenabled()

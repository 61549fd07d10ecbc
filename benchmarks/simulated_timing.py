"""Simulates programs that tell the times of their steps, rightly or wrongly, and their rank.

No clock runs: a program is the times at which its steps end and its lines are written, and its rank
reads new lines as workload command does, ends it by the same rule, and judges what it told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.line_count import (
    MORE_LINES,
    counting_plan,
    next_line_patience_seconds,
)
from orchestrator.core.trial.line_plan import LinePlan
from orchestrator.core.trial.measurement import ImplausibleMeasurement
from orchestrator.core.trial.plausibility import judge_groups, judge_run
from orchestrator.core.trial.protocol import (
    CountedLines,
    LinesRead,
    MeasurementPlan,
    ProgramSeen,
    RankResult,
)
from orchestrator.core.trial.stopping import advance_timing, begin
from workloads.command.stop import end_patience_seconds

SEQUENCE_LENGTH = 4096
# The defaults of a sweep file.
CPU = MeasurementPlan(warmup_steps=3, min_steps=5, max_steps=50, relative_confidence=0.02)
GPU = CPU.model_copy(update={"warmup_seconds": 2.0, "min_seconds": 5.0})
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a program: when it is written, in seconds since the start, and what it tells."""

    written_at: float
    told: float


@dataclass(frozen=True, kw_only=True)
class Told:
    """A program that runs to its own end: its lines, and when it is over."""

    lines: Sequence[Line]
    ended_at: float
    accumulated: int
    names_num_steps: bool = True
    every: int = 1
    steps_per_line: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A program that trains: how long its parts take, and how it tells of them. Seconds."""

    step: float
    noise: float  # of the logarithm
    accumulated: int = 1
    start: float = 5.0
    first_step: float = 0.0  # more than a step
    # After every so many steps, outside of the clock.
    pause_every: int = 0
    pause: float = 0.0
    # In the clock: a share of the steps takes so much more, in the mean.
    stalls: float = 0.0
    stall: float = 0.0
    collects_every: int = 0
    collecting: float = 0.0
    # Lines are written so many at a time.
    buffered: int = 1
    # A line is the mean of so many steps, and the sweep file says so.
    every: int = 1
    one_more: bool = False
    names_num_steps: bool = True
    teardown: float = 0.5

    @property
    def pause_share(self) -> float:
        """The share of its time in pauses and in stalls of single steps, in the mean."""
        pausing = self.stalls * self.stall
        pausing += self.pause / self.pause_every if self.pause_every else 0.0
        return pausing / (pausing + self.step)

    def steps(self, num: int, random: Random) -> list[float]:
        found = []
        for number in range(num):
            seconds = self.step * random.lognormvariate(0, self.noise)
            seconds += self.first_step if number == 0 else 0.0
            if random.random() < self.stalls:
                seconds += self.stall * random.expovariate(1.0)
            if self.collects_every and number % self.collects_every == 0:
                seconds += self.collecting
            found.append(seconds)
        return found

    def ends(self, seconds: Sequence[float]) -> list[float]:
        """Return when the steps of so many seconds end, one after the other, with the pauses."""
        now, found = self.start, []
        for number, one in enumerate(seconds, start=1):
            now += one
            found.append(now)
            if self.pause_every and number % self.pause_every == 0:
                now += self.pause
        return found

    def run(self, num_asked: int, random: Random) -> Told:
        """Train so many steps, or without an end, and tell of each step as it was."""
        num = num_asked + self.one_more if self.names_num_steps else 20 * num_asked
        steps = self.steps(num, random)
        ends = self.ends(steps)
        groups = range(self.every, num + 1, self.every)
        told = [statistics.fmean(steps[last - self.every : last]) for last in groups]
        return self.tells(told, [ends[last - 1] for last in groups], every=self.every)

    def tells(self, told: Sequence[float], ends: Sequence[float], *, every: int = 1) -> Told:
        """Return what it tells, written some lines at a time."""
        last, size = len(told) - 1, self.buffered
        written = [ends[min(last, (i // size + 1) * size - 1)] for i in range(len(told))]
        return Told(
            lines=[Line(written_at=at, told=one) for at, one in zip(written, told, strict=True)],
            ended_at=ends[-1] + self.teardown,
            accumulated=self.accumulated,
            names_num_steps=self.names_num_steps,
            every=every,
        )


def judged(
    program: Trainer,
    random: Random,
    *,
    plan: MeasurementPlan = CPU,
    counts_lines: bool,
    run: str = "run",
) -> str | None:
    """Return why a trial of this program is refused or marked; None: it is believed.

    `counts_lines`: it is the first of its cell. `run` names the method that runs the program.
    """
    if counts_lines:
        predicted = program.step * random.lognormvariate(0, 0.4)
        plan = counting_plan(plan, predicted_seconds=predicted, steps_per_line=program.every)
    told: Told = getattr(program, run)(plan.warmup_steps + plan.max_steps, random)
    result = _Reader(told, plan, random).read()
    if result is None:
        return "too few lines"
    layout = Layout(grad_accum_steps=told.accumulated)
    try:
        reason = judge_run(result, layout=layout, sequence_length=SEQUENCE_LENGTH, plan=CPU)
        return reason or judge_groups(result)
    except ImplausibleMeasurement as refused:
        return str(refused)


class _Reader:
    """The rank of a program: it reads lines, and ends the program once they are enough."""

    def __init__(self, told: Told, plan: MeasurementPlan, random: Random) -> None:
        self._told, self._random = told, random
        self._plan = LinePlan.of(
            plan,
            steps_per_line=told.every,
            counts_lines=plan.counts_lines and told.names_num_steps,
        )
        self._timing = begin(self._plan.timing)
        self._reads: list[LinesRead] = []
        self._num_counted: int | None = None

    def read(self) -> RankResult | None:
        """Return the result; None: the lines are too few."""
        ended_itself, at = self._follow()
        seconds = [line.told for line in self._told.lines]
        num_read = self._reads[-1].num_steps if self._reads else 0
        num = self._num_counted if self._num_counted is not None else num_read
        num_warmup = self._plan.num_warmup(self._timing)
        if num <= num_warmup:
            return None
        counted = CountedLines(num_asked=self._plan.num_asked, num_written=num_read)
        seen = ProgramSeen(
            seconds=at,
            reads=self._reads,
            later_seconds=seconds[num:num_read],
            ended_itself=ended_itself,
            knows_num_steps=self._told.names_num_steps,
            steps_per_line=self._told.steps_per_line,
            every=self._told.every,
            counted=counted if self._plan.counts_lines else None,
        )
        return RankResult(
            warmup_seconds=seconds[:num_warmup], step_seconds=seconds[num_warmup:num], seen=seen
        )

    def _follow(self) -> tuple[bool, float]:
        """Read lines until the program ends or is ended; return which, and when."""
        at = previous_at = self._random.uniform(0, _POLL_SECONDS)
        until = math.inf
        while at < self._told.ended_at and at < until:
            self._read_lines(previous_at, at)
            if self._num_counted is not None and until == math.inf and not self._awaits_more(at):
                until = at + end_patience_seconds(self._seconds(self._num_counted))
            previous_at, at = at, at + self._poll()
            if self._num_counted is None:
                # Skip the polls that would read no line.
                shift = max(0.0, self._next_at() - at - _POLL_SECONDS * self._random.random())
                previous_at, at = previous_at + shift, at + shift
        at = min(at, self._told.ended_at, until)
        self._read_lines(previous_at, max(at, previous_at))
        return self._num_counted is None, at

    def _next_at(self) -> float:
        num = self._reads[-1].num_steps if self._reads else 0
        lines = self._told.lines
        return lines[num].written_at if num < len(lines) else self._told.ended_at

    def _poll(self) -> float:
        """Return the seconds until the next read: sometimes another process has the core."""
        is_busy = self._random.random() < 0.005
        return _POLL_SECONDS + (self._random.expovariate(5.0) if is_busy else 0.002)

    def _read_lines(self, previous_at: float, at: float) -> None:
        """Read the lines that were written since the previous read."""
        before = self._reads[-1].num_steps if self._reads else 0
        lines, num = self._told.lines, before
        while num < len(lines) and lines[num].written_at <= at:
            num += 1
        if num == before:
            return
        self._reads.append(LinesRead(after=previous_at, at=at, num_steps=num))
        if self._num_counted is None:
            counted = min(num, self._plan.num_asked)
            if self._has_enough(counted):
                self._num_counted = counted

    def _has_enough(self, num: int) -> bool:
        seconds = self._seconds(num)
        self._timing = advance_timing(self._timing, seconds, self._plan.timing)
        return self._plan.are_enough(seconds, self._timing)

    def _awaits_more(self, at: float) -> bool:
        num = self._reads[-1].num_steps
        if not self._plan.counts_lines or self._told.accumulated == 1:
            return False
        if num >= MORE_LINES * self._plan.num_asked:
            return False
        patience = next_line_patience_seconds(self._seconds(self._num_counted or 0))
        return at - self._reads[-1].at < patience

    def _seconds(self, num: int) -> list[float]:
        return [line.told for line in self._told.lines[:num]]


@dataclass(frozen=True, kw_only=True)
class WrongTrainer(Trainer):
    """A trainer that times its steps wrongly. Each method is a mistake."""

    # The part of a step that the clock sees.
    part: float = 0.2
    # Steps of a line, or from one that waits for the device to the next.
    distance: int = 5

    def micro_batches(self, num_asked: int, random: Random) -> Told:
        """A line for each micro-batch, with its time."""
        one = replace(self, step=self.step / self.accumulated)
        told = one.steps(num_asked * self.accumulated, random)
        return self.tells(told, self.ends(told))

    def numbered_micro_batches(self, num_asked: int, random: Random) -> Told:
        """The same, with a number that counts them."""
        return replace(self.micro_batches(num_asked, random), steps_per_line=1.0)

    def one_micro_batch(self, num_asked: int, random: Random) -> Told:
        """A line for each step, with the time of its last micro-batch."""
        steps = self.steps(num_asked, random)
        return self.tells([one / self.accumulated for one in steps], self.ends(steps))

    def several_steps(self, num_asked: int, random: Random) -> Told:
        """A line for several steps, with the time of all of them."""
        steps, size = self.steps(num_asked, random), self.distance
        ends = self.ends(steps)[size - 1 :: size]
        told = [sum(steps[i * size : (i + 1) * size]) for i in range(len(ends))]
        return self.tells(told, ends)

    def mean_of_several(self, num_asked: int, random: Random) -> Told:
        """A line for several steps, with their mean, and without `metrics.every`."""
        told = self.several_steps(num_asked, random)
        lines = [replace(line, told=line.told / self.distance) for line in told.lines]
        return replace(told, lines=lines)

    def not_synchronised(self, num_asked: int, random: Random) -> Told:
        """The clock sees a part of each step, and lines are written `buffered` at a time."""
        steps = self.steps(num_asked, random)
        told = [one * self.part * random.lognormvariate(0, 0.05) for one in steps]
        return self.tells(told, self.ends(steps))

    def synchronised_now_and_then(self, num_asked: int, random: Random) -> Told:
        """The clock sees a part of each step, and all that is left of them in every so many."""
        steps, told, left = self.steps(num_asked, random), [], 0.0
        for number, seconds in enumerate(steps, start=1):
            seen = seconds * self.part
            left += seconds - seen
            if number % self.distance == 0:
                seen, left = seen + left, 0.0
            told.append(seen)
        return self.tells(told, self.ends(told))

    def milliseconds(self, num_asked: int, random: Random) -> Told:
        """Milliseconds for seconds."""
        steps = self.steps(num_asked, random)
        return self.tells([1000 * one for one in steps], self.ends(steps))

    def since_the_start(self, num_asked: int, random: Random) -> Told:
        """The time since the first step began."""
        ends = self.ends(self.steps(num_asked, random))
        return self.tells([end - self.start for end in ends], ends)

    def mean_so_far(self, num_asked: int, random: Random) -> Told:
        """The mean of all steps so far, with a first one that compiles."""
        ends = self.ends(self.steps(num_asked, random))
        told = [(end - self.start) / number for number, end in enumerate(ends, start=1)]
        return self.tells(told, ends)

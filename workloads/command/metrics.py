"""The numbers that the user's program writes while it runs: JSON lines, one per optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.core.trial.line_count import MORE_LINES, next_line_patience_seconds
from orchestrator.core.trial.line_plan import LinePlan
from orchestrator.core.trial.protocol import (
    MAX_SECONDS,
    CountedLines,
    LinesRead,
    Phase,
    ProgramSeen,
)
from orchestrator.core.trial.stopping import advance_timing, begin
from workloads.command.appended_lines import AppendedLines
from workloads.command.divergence import Divergence
from workloads.command.printed import PrintedMetrics
from workloads.command.step_numbers import StepNumbers, step_number
from workloads.command.told_fields import ToldFields
from workloads.rank import NotFinite, Rank

# Lines that are kept once the steps are enough: the pace of a program needs no more.
_MOST_LATER = 1000
# In a longer run, every second read is forgotten, again and again.
_MOST_READS = 1000
# Lines without a step time: how many of their fields are named, and characters of a name.
_NAMES_SHOWN, _NAME_SHOWN = 8, 40


class _Metric(BaseModel):
    """One line of the metrics file. Other keys are memory, or the program's own."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    step_seconds: Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS)] | None = None
    step: Any = None
    iteration: Any = None
    loss: Any = None
    gradient_norm: Any = None
    grad_norm: Any = None  # the name in torchtitan and others

    @property
    def number(self) -> Any:
        """The number that the program gives the step."""
        return self.step if self.step is not None else self.iteration


class Metrics:
    """The JSON lines that a program appends, read as they come."""

    def __init__(
        self,
        path: Path,
        rank: Rank,
        *,
        printed: PrintedMetrics | None = None,
        steps_per_line: int = 1,
        names_num_steps: bool | None = None,
        began: float,
    ) -> None:
        """`printed` adds lines to the file. Each line tells the mean of `steps_per_line` steps.

        `names_num_steps`: the program is told how many steps are asked for; None: that cannot be
        seen. `began`: when the program was started, monotonic.
        """
        self.file = AppendedLines(path)
        self.printed = printed
        self.fields = ToldFields()
        self._rank = rank
        plan = rank.request.measurement
        self._steps_per_line = steps_per_line
        self.names_num_steps = names_num_steps
        self._plan = LinePlan.of(
            plan,
            steps_per_line=steps_per_line,
            counts_lines=plan.counts_lines and names_num_steps is True,
        )
        self.step_seconds: list[float] = []
        # The times of lines after the last one that counts.
        self._later_seconds: list[float] = []
        # Lines with a step, also those after the last one that counts.
        self.num_steps_told = 0
        self._timing = begin(self._plan.timing)
        self._has_enough = False
        # When the last line that counts was written, monotonic.
        self._last_at: float | None = None
        # From the writing of the first line to its reading.
        self._first_waited = 0.0
        # The last line after those that count, monotonic.
        self._last_later_at = began
        self.num_unread, self.first_unread = 0, ""  # lines that are no metric
        # Metrics without a step time, and the names of their fields.
        self._num_without_step = 0
        self._names_without_step: dict[str, None] = {}
        # The first line whose step time cannot be one, and why.
        self.bad_step: str | None = None
        self._num_lines = 0
        # Monotonic; all that was written before `_read_until` has been read.
        self._began = self._read_until = began
        self._reads: list[LinesRead] = []
        self._accumulated = rank.request.layout.grad_accum_steps
        self._numbers = StepNumbers(grad_accum_steps=self._accumulated)
        self._divergence = Divergence()

    @property
    def diverged(self) -> NotFinite | None:
        """The name of a value that is not finite, once that is sure."""
        return self._divergence.found

    @property
    def num_steps_asked(self) -> int:
        """Lines that are asked for, those of the warm-up among them."""
        return self._plan.num_asked

    @property
    def num_warmup(self) -> int:
        """Lines of the warm-up, by what has come until now."""
        return self._plan.num_warmup(self._timing)

    @property
    def step_seconds_bound(self) -> float | None:
        """The fastest step, if it shows that the layout cannot be the best."""
        return self._timing.bound

    @property
    def times_steps(self) -> bool:
        """True once the warm-up is over."""
        return len(self.step_seconds) >= self.num_warmup

    @property
    def has_enough(self) -> bool:
        """True if the program may end: its steps are enough, and the last norm is finite."""
        is_whole = self.file.lost is None and self.bad_step is None
        return self._has_enough and is_whole and not self._divergence.is_possible

    @property
    def awaits_more(self) -> bool:
        """True while more lines than were asked for may come: then a line is no step."""
        if not self._plan.counts_lines or self._accumulated == 1:
            return False
        if self.num_steps_told >= MORE_LINES * self.num_steps_asked:
            return False
        patience = next_line_patience_seconds(self.step_seconds)
        return time.monotonic() - max(self._last_at or 0.0, self._last_later_at) < patience

    def read(self) -> None:
        """Read the new lines, and skip those that are no metric.

        Raises ConfigRejected for a pattern that is too slow.
        """
        read_at = time.monotonic()
        if self.printed is not None:
            self.printed.read()
        self._read_file(read_at)

    def read_later(self) -> None:
        """Read the lines that come once the steps are enough: they show the pace of the program."""
        self._read_file(time.monotonic())

    def _read_file(self, read_at: float) -> None:
        lines, are_all = self.file.read()
        self._take(lines)
        if are_all:
            self._read_until = read_at

    def read_to_the_end(self) -> None:
        """Read what is left of a program that has ended. Raises ConfigRejected as `read` does."""
        if self.printed is not None:
            self.printed.finish()
        read_at = time.monotonic()
        self._take(self.file.read_to_the_end())
        self._read_until = read_at

    def phase_seconds(self) -> dict[Phase, float]:
        """Seconds in each phase of a program that has ended.

        `first_step` lasts from its start to its first line, teardown from its last line on. Lines
        are read some time after they were written, on a busy machine several at once.
        """
        phases = self._rank.phase_seconds()
        if self._last_at is None:
            return {phase: seconds for phase, seconds in phases.items() if phase is Phase.START}
        after = time.monotonic() - self._last_at
        return {
            **phases,
            Phase.FIRST_STEP: max(phases[Phase.FIRST_STEP] - self._first_waited, 0.0),
            Phase.STEADY: max(phases[Phase.STEADY] + self._first_waited - after, 0.0),
            Phase.TEARDOWN: after,
        }

    def seen(self, *, ended_itself: bool) -> ProgramSeen:
        """Return what was seen of the program until now."""
        counted = CountedLines(num_asked=self.num_steps_asked, num_written=self.num_steps_told)
        return ProgramSeen(
            seconds=time.monotonic() - self._began,
            reads=self._reads,
            later_seconds=self._later_seconds,
            ended_itself=ended_itself,
            knows_num_steps=self.names_num_steps is not False,
            steps_per_line=self._numbers.per_line,
            every=self._steps_per_line,
            counted=counted if self._plan.counts_lines else None,
        )

    def why_no_steps(self) -> str | None:
        """Return what the lines have instead of a step time; None if some have one, or none came.

        So a wrong name of the field is seen.
        """
        if self.num_steps_told or not self._num_without_step:
            return None
        num, names = self._num_without_step, list(self._names_without_step)[:_NAMES_SHOWN]
        came = "1 line came, without" if num == 1 else f"{num} lines came, none has"
        has = "it has" if num == 1 else "they have"
        return f"{came} step_seconds; {has}: {', '.join(names) or 'no field'}"

    def _take(self, lines: Sequence[bytes]) -> None:
        before, at = len(self.step_seconds), time.monotonic()
        num_later = len(self._later_seconds)
        for line in lines:
            self._num_lines += 1
            is_metric = True
            try:
                metric = _Metric.model_validate_json(line)
            except ValidationError as exc:
                metric, is_metric = _Metric(), False
                self._note_bad_step(exc)
            if metric.step_seconds is not None:
                self.num_steps_told += 1
                if not self._counts_next:
                    self._check_finite(metric, loss=None)
                    if len(self._later_seconds) < _MOST_LATER:
                        self._later_seconds.append(metric.step_seconds)
                    continue
                self.step_seconds.append(metric.step_seconds)
                self._numbers.note(len(self.step_seconds), metric.number)
            elif line.strip() and not is_metric:
                self.num_unread += 1
                self.first_unread = self.first_unread or line[:200].decode(errors="replace")
            told = metric.model_dump(exclude_none=True)
            if is_metric and metric.step_seconds is None and line.strip():
                self._note_without_step(told)
            self.fields.take(told)
            self._check_finite(metric, loss=metric.loss)
        if len(self.step_seconds) > before or len(self._later_seconds) > num_later:
            self._note_read(at)
        if len(self._later_seconds) > num_later:
            self._last_later_at = at
            if self.awaits_more:
                # They are progress, and are not timed.
                self._rank.heartbeat(Phase.STEADY, self.num_steps_told)
        if len(self.step_seconds) > before:
            self._last_at = self._written_at(at)
            if not before:
                since_first = math.fsum(self.step_seconds[1:]) * self._steps_per_line
                self._first_waited = at - max(self._read_until, self._last_at - since_first)
            self._note_enough()
            done = len(self.step_seconds)
            self._rank.heartbeat(Phase.STEADY, done, timed=self.times_steps)

    def _written_at(self, read_at: float) -> float:
        """Return when the lines read last were written: since the read before, or at it."""
        ago = (time.time_ns() - self.file.written_at_ns) / 1e9
        return min(max(read_at - ago, self._read_until), read_at)

    def _note_read(self, at: float) -> None:
        if len(self._reads) >= _MOST_READS:
            del self._reads[1::2]
        self._reads.append(
            LinesRead(
                after=self._read_until - self._began,
                at=at - self._began,
                num_steps=len(self.step_seconds) + len(self._later_seconds),
            )
        )

    def _note_without_step(self, told: Mapping[str, Any]) -> None:
        """Note the fields of a line that has no step time."""
        self._num_without_step += 1
        if len(self._names_without_step) < _NAMES_SHOWN:
            names = (" ".join(name.split())[:_NAME_SHOWN] for name in told)
            self._names_without_step |= dict.fromkeys(names)

    def _note_bad_step(self, exc: ValidationError) -> None:
        """Note the first step time that is none: a program that writes one has a wrong clock."""
        for error in exc.errors(include_url=False) if self.bad_step is None else ():
            if error["loc"] and error["loc"][0] == "step_seconds":
                said = f"step_seconds is {repr(error['input'])[:80]}"
                self.bad_step = f"line {self._num_lines}: {said}: {_why_bad(error['input'])}"

    def _note_enough(self) -> None:
        """Note whether the timed steps are enough."""
        self._timing = advance_timing(self._timing, self.step_seconds, self._plan.timing)
        self._has_enough = self._plan.are_enough(self.step_seconds, self._timing)

    @property
    def _counts_next(self) -> bool:
        """False if the steps are enough: those that come until the program ends are left out."""
        return not self._has_enough and len(self.step_seconds) < self.num_steps_asked

    def _check_finite(self, metric: _Metric, *, loss: Any) -> None:
        """Note the loss and the gradient norm of a line. The norm of the last step counts."""
        norm = metric.gradient_norm if metric.gradient_norm is not None else metric.grad_norm
        number = step_number(metric.number)
        step = max(1, self.num_steps_told) if number is None else number
        self._divergence.note(loss=loss, norm=norm, step=step)
        if norm is not None and self.num_steps_told >= self.num_steps_asked:
            self._divergence.judge_norm()

    def ends_diverged(self, *, well: bool) -> bool:
        """True if the program diverged; its gradient norm counts only if it ended `well`."""
        self.read_to_the_end()
        if well:
            self._divergence.judge_norm()
        return self.diverged is not None


def _why_bad(value: Any) -> str:
    """Why a step time is none, with the fix."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "the number itself is wanted, as 0.52"
    if math.isnan(value):
        return "a number of seconds is wanted"
    if value > MAX_SECONDS:
        return "seconds are wanted, and no step takes months"
    return (
        "a step takes more than 0 s; measure it by a clock that is never set (time.perf_counter(), "
        "not time.time())"
    )

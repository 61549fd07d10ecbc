"""Judges whether the numbers that a program tells can be true, by what its rank saw of it.

Numbers that nothing can produce are refused (ImplausibleMeasurement). Numbers that contradict what
was seen, or each other, are implausible: they are stored with the reason, and never win. Each
reason ends in its cure. A program that writes all its lines at its end has no pace: then only the
time that it ran bounds what it tells.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.measurement import FEWEST_STEPS, ImplausibleMeasurement
from orchestrator.core.trial.protocol import LinesRead, MeasurementPlan, ProgramSeen, RankResult

# What lines tell may differ from their pace by this factor.
PACE_FACTOR = 1.5
# A pace counts if it was seen so often: a pause for a checkpoint is one window, and the median of
# five does not see two.
FEWEST_WINDOWS = 5
# The two bounds of a window's time differ by at most such a factor: the first that gives enough
# windows. Short ones are blurred, and long ones few.
SHARP, LESS_SHARP, BLURRED = 1.3, 1.6, 3.0
# The slower and the faster windows of a program without pauses differ by at most this factor.
EVEN_FACTOR = 2.0
# Seconds, and a relative part, that steps may add up to beyond the time that the program ran:
# clocks differ, and the rank begins to watch just after the start.
WALL_SECONDS, WALL_SHARE = 0.2, 0.02
# The first and the last third of the timed steps may differ by this factor.
TREND_FACTOR = 3.0
FEWEST_FOR_TREND = 12
# A target is one token shorter than its sequence, so programs count `sequence_length - 1` tokens.
TOKENS_SHARE = 0.02
# A number with so many significant digits was not rounded by hand: two equal ones are no accident.
FINE_DIGITS = 5
# So many layouts with the same number, or a step time in proportion to the micro-batch, are none.
FEWEST_ALIKE = 3
ALIKE_SHARE = 1e-9
LEAST_SPREAD = 4.0  # of the micro-batch sizes
LEAST_SLOPE = 0.75  # of log step time over log micro-batch size

_UNITS = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}
_SYNCHRONISE = (
    "On a GPU call torch.cuda.synchronize() before you read the clock. Time from the end of a step "
    "to the end of the next, so that what every step waits for (data, logging) counts"
)


def judge_run(
    result: RankResult, *, layout: Layout, sequence_length: int, plan: MeasurementPlan
) -> str | None:
    """Return why the numbers of a program cannot be true, with the cure; None: nothing shows it.

    Raises ImplausibleMeasurement for steps that add up to more than the time that the program ran.
    A result of which nothing was seen is not judged.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    told = _ToldSteps.of(result, seen)
    pace = _Pace.of(seen, told)
    _check_wall(told, seen, pace, layout)
    found = (
        _pace_reason(told, pace, layout),
        _count_reason(told, seen, plan),
        _tokens_reason(result, layout, sequence_length),
        _constant_reason(result, plan, layout.global_batch_size * sequence_length),
        _trend_reason(result),
    )
    return next((reason for reason in found if reason is not None), None)


@dataclass(frozen=True, kw_only=True)
class JudgedPace:
    """The time between the first and the last line of a program, and what the lines tell of it."""

    num_steps: int
    told_seconds: float
    passed_seconds: float
    reason: str | None  # why both cannot be true, with the cure; None: they agree


def judge_pace(result: RankResult, *, layout: Layout) -> JudgedPace | None:
    """Compare the pace of lines with what they tell, as `judge_run` does.

    None: too few lines came one by one.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    told = _ToldSteps.of(result, seen)
    pace = _Pace.of(seen, told)
    if pace.step_seconds is None:
        return None
    try:
        _check_wall(told, seen, pace, layout)
        reason = _pace_reason(told, pace, layout)
    except ImplausibleMeasurement as refused:
        reason = str(refused)
    first, last = seen.reads[0], seen.reads[-1]
    return JudgedPace(
        num_steps=told.every * (last.num_steps - first.num_steps),
        told_seconds=told.between(first.num_steps, last.num_steps),
        passed_seconds=last.at - first.at,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class ToldLayout:
    """What a program told of a layout."""

    layout: Layout
    seconds: float  # of a step


def judge_cell(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    """Return the trials of a cell whose numbers cannot be true beside those of the others, and why.

    The same step time to the last digit in several layouts, or one in proportion to the
    micro-batch: each global batch is the same work.
    """
    return _identical(told) | _in_proportion(told)


# --- what was told, and what was seen -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ToldSteps:
    """The steps that a program told of, with the warm-up and lines after the last that counts."""

    seconds: Sequence[float]
    median: float  # of the timed ones
    # True if each of them is a line, in order.
    are_lines: bool
    every: int  # steps that a line covers

    @classmethod
    def of(cls, result: RankResult, seen: ProgramSeen) -> _ToldSteps:
        counted = [*result.warmup_seconds, *result.step_seconds]
        lines = [*counted, *seen.later_seconds]
        are_lines = bool(seen.reads) and seen.reads[-1].num_steps == len(lines)
        return cls(
            seconds=lines if are_lines else counted,
            median=statistics.median(result.step_seconds),
            are_lines=are_lines,
            every=seen.every,
        )

    def between(self, first: int, last: int) -> float:
        """Return the seconds of the lines after the first so many, up to the last."""
        if self.are_lines:
            return self.every * sum(self.seconds[first:last])
        return self.every * (last - first) * self.median


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The time between two reads of lines, against what the lines tell of it."""

    num_steps: int
    least: float  # seconds
    most: float
    told: float  # seconds

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """How fast lines came, by the medians of windows. None: too little was seen."""

    # Time over told time: at least, and at most.
    least: float | None = None
    most: float | None = None
    step_seconds: float | None = None  # between two lines, for each step of a line
    is_sharp: bool = False

    @classmethod
    def of(cls, seen: ProgramSeen, told: _ToldSteps) -> _Pace:
        windows = [_windows(seen.reads, told, one) for one in (SHARP, LESS_SHARP, BLURRED)]
        best = next((some for some in windows if len(some) >= FEWEST_WINDOWS), None)
        blurred = windows[-1]
        if best is None:
            return cls()
        is_sharp = best is not blurred
        # A pause makes a long window slow. If no window differs from the others, there is none.
        factors = [(one.middle / one.told, one.num_steps) for one in blurred]
        is_even = _quantile(factors, 0.75) <= EVEN_FACTOR * _quantile(factors, 0.25)
        unpaused = best if is_even else blurred
        return cls(
            least=_quantile(((one.least / one.told, one.num_steps) for one in unpaused), 0.5),
            most=_quantile(((one.most / one.told, one.num_steps) for one in best), 0.5),
            step_seconds=_quantile(
                ((one.middle / one.num_steps / told.every, one.num_steps) for one in best), 0.5
            ),
            is_sharp=is_sharp,
        )


def _windows(reads: Sequence[LinesRead], told: _ToldSteps, factor: float) -> list[_Window]:
    """Divide the reads into windows that are long against the time between two reads.

    A long time without lines is a window of its own, so that it spoils no other. If it is longer
    than the lines after it tell, it may be a pause: then only the first of them waited for it, and
    when the others were written is known less well.
    """
    found: list[_Window] = []

    def close(first: LinesRead, last: LinesRead, *, after: int, to: int, is_known: bool) -> None:
        if to > after:
            window = _Window(
                num_steps=to - after,
                least=max(last.after - first.at, 0.0) if is_known else 0.0,
                most=last.at - first.after,
                told=told.between(after, to),
            )
            found.append(window)

    first = reads[0] if reads else None
    for before, read in pairwise(reads):
        assert first is not None, "there are reads"
        begun, ended = first.num_steps, read.num_steps
        if _is_sharp(before, read, factor):
            paused = before.num_steps
            close(first, before, after=begun, to=paused, is_known=True)
            all_told = told.between(paused, ended)
            is_pause = read.after - before.at > PACE_FACTOR * all_told
            late = paused + 1 if is_pause else ended
            close(before, read, after=paused, to=late, is_known=True)
            close(before, read, after=late, to=ended, is_known=False)
            first = read
        elif _is_sharp(first, read, factor):
            close(first, read, after=begun, to=ended, is_known=True)
            first = read
    if first is not None and found:
        close(first, reads[-1], after=first.num_steps, to=reads[-1].num_steps, is_known=True)
    return found


def _is_sharp(first: LinesRead, last: LinesRead, factor: float) -> bool:
    """Return whether the time between two reads of lines is known to such a factor."""
    return last.at - first.after <= factor * (last.after - first.at)


def _quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """Return the value with this share of the weight at or below it."""
    ordered = sorted(weighted)
    wanted, passed = share * sum(weight for _, weight in ordered), 0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted:
            return value
    raise ValueError("no values")


# --- one run --------------------------------------------------------------------------------------


def _check_wall(told: _ToldSteps, seen: ProgramSeen, pace: _Pace, layout: Layout) -> None:
    """Raise ImplausibleMeasurement if the steps took longer than the program."""
    ends = [(read.at, read.num_steps) for read in seen.reads] if told.are_lines else []
    for at, num_steps in [(seen.seconds, len(told.seconds)), *ends]:
        total = sum(told.seconds[:num_steps]) * (told.every if told.are_lines else 1)
        if total <= at * (1 + WALL_SHARE) + WALL_SECONDS:
            continue
        ratio = 1 / pace.most if pace.most is not None else total / at
        if pace.is_sharp:
            ratio = told.median / (pace.step_seconds or told.median)
        raise ImplausibleMeasurement(
            f"{num_steps} {'steps are' if num_steps > 1 else 'step is'} said to have taken "
            f"{_seconds(total)}, and the program had run for {_seconds(at)}: "
            f"{_why_too_long(told, ratio, layout, is_exact=pace.is_sharp)}"
        )


def _pace_reason(told: _ToldSteps, pace: _Pace, layout: Layout) -> str | None:
    if pace.least is None or pace.most is None or pace.step_seconds is None:
        return None
    comes = f"its lines came every {_seconds(pace.step_seconds * told.every)}, and say that "
    comes += "a step takes " if told.every == 1 else f"each of {told.every} steps takes "
    comes += f"{_seconds(told.median)}"
    if pace.least > PACE_FACTOR:
        return f"{comes}: {_why_too_short(pace.step_seconds / told.median, layout)}"
    if pace.most * PACE_FACTOR < 1:
        ratio = told.median / pace.step_seconds
        return f"{comes}: {_why_too_long(told, ratio, layout, is_exact=pace.is_sharp)}"
    return None


def _why_too_long(told: _ToldSteps, ratio: float, layout: Layout, *, is_exact: bool) -> str:
    """Say what makes a program tell `ratio` times as much; if not exact, at least so much."""
    wanted = "the seconds of one optimizer step are wanted"
    steps = told.seconds
    if (
        len(steps) > 2
        and all(one < two for one, two in pairwise(steps))
        and steps[-1] > 2 * steps[0]
    ):
        return f"the time since the start? They rise from step to step; {wanted}"
    near = [unit for unit in _UNITS if 0.7 < ratio / unit < 1.4]
    if near or (not is_exact and ratio > 30):
        return f"{_UNITS[near[0] if near else 1e3]}? Seconds are wanted"
    if is_exact and 2 <= round(ratio) <= 100 and abs(ratio / round(ratio) - 1) < 0.1:
        num = round(ratio)
        by_ranks = layout.world_size % num == 0
        what = f"{num} steps, or lines that {num} ranks write" if by_ranks else f"{num} steps"
        return f"the time of {what}? {wanted[0].upper()}{wanted[1:]}"
    return f"{wanted}, by a clock that is read once a step and never set (time.perf_counter())"


def _why_too_short(ratio: float, layout: Layout) -> str:
    """Say what makes a program tell a part of a step."""
    accumulated = layout.grad_accum_steps
    if 0.7 < ratio / 1000 < 1.4:
        return "a unit that is 1,000 times too large? Seconds are wanted"
    if accumulated > 1 and 0.75 < ratio / accumulated < 1.3:
        return (
            f"the time of one micro-batch? A step has {accumulated} of them here, and the update; "
            "one number for all of it is wanted"
        )
    return f"{ratio:.2g} times less. {_SYNCHRONISE}"


def _count_reason(told: _ToldSteps, seen: ProgramSeen, plan: MeasurementPlan) -> str | None:
    """Return why a line is not a step: by the numbers in the lines, else by how many there are."""
    num, asked = len(told.seconds), plan.warmup_steps + plan.max_steps
    if (each := seen.steps_per_line) is not None:
        if abs(each / seen.every - 1) < 0.1:
            return None
        what = f"the step numbers in its lines rise by {each:.3g} a line"
        if seen.every > 1:
            return f"{what}, and workload.options.metrics.every is {seen.every}: write {each:.3g}"
        return f"{what}: one line for each optimizer step is wanted, with the time of that step"
    is_part = any(num == asked // every for every in range(2, asked + 1))
    is_its_choice = seen.ended_itself and seen.knows_num_steps
    if not (told.are_lines and is_its_choice and is_part and seen.every == 1):
        return None
    if num < plan.warmup_steps + FEWEST_STEPS:
        return None  # too few to be sure of, and said so
    every = asked // num
    return (
        f"it was asked for {asked} steps, and wrote {num} lines: one line for {every} steps? "
        "One for each is wanted. If it ran no more, let it run {num_steps}, or give its lines a "
        'field "step"'
    )


def _tokens_reason(result: RankResult, layout: Layout, sequence_length: int) -> str | None:
    tokens, batch = result.tokens_per_step, layout.global_batch_size
    expected = batch * sequence_length
    if tokens is None or abs(tokens / expected - 1) <= TOKENS_SHARE:
        return None
    parts = {
        layout.data_parallel_size: "those of one rank? All ranks' are wanted",
        layout.grad_accum_steps: "those of one micro-batch? Those of the step are wanted",
        layout.data_parallel_size * layout.grad_accum_steps: (
            "those of one rank and one micro-batch? Those of the step, of all ranks, are wanted"
        ),
    }
    guess = next(
        (
            what
            for part, what in parts.items()
            if part > 1 and abs(tokens * part / expected - 1) <= TOKENS_SHARE
        ),
        "does it train this layout? If padding is what it leaves out, leave out tokens_per_step",
    )
    return (
        f"tokens_per_step is {tokens:,}, and the layout has {expected:,} "
        f"({batch:,} sequences x {sequence_length:,}): {guess}"
    )


def _constant_reason(result: RankResult, plan: MeasurementPlan, tokens: int) -> str | None:
    steps = result.step_seconds
    if len(steps) < FEWEST_STEPS or len(set(steps)) > 1:
        return None
    all_took = f"all {len(steps)} timed steps are said to take exactly {steps[0]:.12g} s"
    if _is_fine(steps[0], tokens):
        return f"{all_took}, and no clock shows that: an average, or a fixed number?"
    rounded = 0.5 * 10.0 ** -_decimals(steps[0]) / steps[0]
    if rounded <= plan.relative_confidence:
        return None
    return f"{all_took}, rounded to {rounded:.0%}: write more digits"


def _trend_reason(result: RankResult) -> str | None:
    steps = result.step_seconds
    if len(steps) < FEWEST_FOR_TREND:
        return None
    third = len(steps) // 3
    first, last = statistics.median(steps[:third]), statistics.median(steps[-third:])
    if 1 / TREND_FACTOR <= first / last <= TREND_FACTOR:
        return None
    if first > last:
        why = (
            "raise measurement.warmup_steps, so that compilation and warm-up are over; "
            "if each is a mean of all steps so far, tell the time of each step"
        )
    else:
        why = f"may the clock be read before the device is done? {_SYNCHRONISE}"
    change = f"from {_seconds(first)} to {_seconds(last)} a step"
    return f"its steps went {change} while they were timed: {why}"


# --- one cell -------------------------------------------------------------------------------------


def _identical(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    found: dict[int, str] = {}
    by_seconds = sorted(told, key=lambda key: told[key].seconds)
    group: list[int] = []
    for key in [*by_seconds, None]:
        is_same = (
            key is not None
            and group
            and told[key].seconds <= told[group[0]].seconds * (1 + ALIKE_SHARE)
        )
        if key is not None and (is_same or not group):
            group.append(key)
            continue
        first = told[group[0]].seconds if group else 0.0
        if len(group) >= FEWEST_ALIKE and _is_fine(first, told[group[0]].layout.global_batch_size):
            text = (
                f"{len(group)} layouts are said to take exactly {first:.12g} s a step: does the "
                "program use its arguments, and write its file anew?"
            )
            found |= dict.fromkeys(group, text)
        group = [key] if key is not None else []
    return found


def _in_proportion(told: Mapping[int, ToldLayout]) -> dict[int, str]:
    groups: dict[Layout, list[int]] = defaultdict(list)
    for key, one in told.items():
        if one.layout.pipeline_parallel_size == 1:  # a pipeline needs many micro-batches
            sequences = one.layout.micro_batch_size * one.layout.grad_accum_steps
            alike = replace(one.layout, micro_batch_size=1, grad_accum_steps=sequences)
            groups[alike].append(key)
    found: dict[int, str] = {}
    for group in groups.values():
        group.sort(key=lambda key: told[key].layout.micro_batch_size)
        sizes = [told[key].layout.micro_batch_size for key in group]
        if len(set(sizes)) < FEWEST_ALIKE or sizes[-1] < LEAST_SPREAD * sizes[0]:
            continue
        slopes = [
            math.log(told[two].seconds / told[one].seconds) / math.log(larger / smaller)
            for (one, smaller), (two, larger) in pairwise(zip(group, sizes, strict=True))
            if larger > smaller
        ]
        if min(slopes) >= LEAST_SLOPE:
            text = (
                "step times grow with the micro-batch, though every step has the same global "
                "batch: the time of one micro-batch? One number for all "
                "of a step's micro-batches and its update is wanted"
            )
            found |= dict.fromkeys(group, text)
    return found


# --- digits ---------------------------------------------------------------------------------------


def _is_fine(seconds: float, tokens: int) -> bool:
    """True if a step time was not computed from a number of few digits: a time, or a rate."""
    return min(_digits(one) for one in (seconds, 1 / seconds, tokens / seconds)) >= FINE_DIGITS


def _digits(value: float) -> int:
    """The significant digits of a number, of twelve at most."""
    mantissa = f"{value:.11e}".partition("e")[0].replace(".", "").rstrip("0")
    return max(1, len(mantissa))


def _decimals(value: float) -> int:
    """The digits of a number behind its point; negative: it ends in zeros before it."""
    exponent = int(f"{value:.11e}".partition("e")[2])
    return _digits(value) - 1 - exponent


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:,.4g} s"

"""Judges whether a program's numbers can be true, by the observations of its rank.

Numbers that nothing can produce are refused (ImplausibleMeasurement). Numbers that contradict what
was seen, or each other, are implausible: they are stored with the reason, and never win. Each
reason ends in its fix. For a program without a pace only the time that it ran bounds what it
tells.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from math import log

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.digits import decimals, is_fine
from orchestrator.core.trial.line_count import FEWEST_COUNTED, MORE_LINES, RUN_AS_ASKED
from orchestrator.core.trial.line_groups import LineGroups
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad, most_slowdown
from orchestrator.core.trial.measurement import FEWEST_STEPS, ImplausibleMeasurement
from orchestrator.core.trial.pace import PACE_FACTOR, Pace, StepPace, ToldSteps
from orchestrator.core.trial.protocol import (
    CountedLines,
    MeasurementPlan,
    ProgramSeen,
    RankResult,
)
from orchestrator.core.trial.step_period import period_of

# Seconds, and a relative part, that steps may add up to beyond the time that the program ran:
# clocks differ, and the rank begins to watch just after the start.
CLOCK_SECONDS, CLOCK_SHARE = 0.2, 0.02
# The first and the last third of the timed steps may differ by this factor.
TREND_FACTOR = 3.0
FEWEST_FOR_TREND = 12
# A target is one token shorter than its sequence, so programs count `sequence_length - 1` tokens.
TOKENS_SHARE = 0.02

_UNITS = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}
_FROM_END_TO_END = (
    "Time from the end of a step to the end of the next, so that what every step waits for (data, "
    "logging) counts"
)
_SYNCHRONISE = (
    "On a GPU call torch.cuda.synchronize() before you read the clock. " + _FROM_END_TO_END
)


def judge_run(
    result: RankResult,
    *,
    layout: Layout,
    sequence_length: int,
    plan: MeasurementPlan,
    load: MachineLoad = NO_LOAD,
) -> str | None:
    """Return why the numbers of a program cannot be true, with the fix; None: nothing shows it.

    `load`: of the machine meanwhile. Steps may have changed by as much as it explains.
    Raises ImplausibleMeasurement for steps that add up to more than the time that the program ran.
    A result without anything seen of its program is not judged.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    told = ToldSteps.of(result, seen)
    pace = Pace.of(seen, told)
    _check_total(told, seen, pace, layout)
    found = (
        _pace_reason(told, pace, layout),
        _count_reason(told, seen, plan, layout.grad_accum_steps),
        _tokens_reason(result, layout, sequence_length),
        _constant_reason(result, plan, layout.global_batch_size * sequence_length),
        _trend_reason(result, most_slowdown(load)),
        _period_reason(told),
        _sum_reason(told, seen, layout),
    )
    return next((reason for reason in found if reason is not None), None)


@dataclass(frozen=True, kw_only=True)
class JudgedPace:
    """The time between the first and the last line of a program, and the sum that lines report."""

    num_steps: int
    told_seconds: float
    passed_seconds: float
    # Why both cannot be true, with the fix; None: they agree.
    reason: str | None


def judge_pace(result: RankResult, *, layout: Layout) -> JudgedPace | None:
    """Compare the pace of lines with the times they report, as `judge_run` does.

    None: too few lines came one by one.
    """
    seen = result.seen
    if seen is None or not result.step_seconds:
        return None
    told = ToldSteps.of(result, seen)
    pace = Pace.of(seen, told)
    if pace is None:
        return None
    try:
        _check_total(told, seen, pace, layout)
        reason = _pace_reason(told, pace, layout) or _sum_reason(told, seen, layout)
    except ImplausibleMeasurement as refused:
        reason = str(refused)
    first, last = seen.reads[0], seen.reads[-1]
    return JudgedPace(
        num_steps=told.every * (last.num_steps - first.num_steps),
        told_seconds=told.between(first.num_steps, last.num_steps),
        passed_seconds=last.at - first.at,
        reason=reason,
    )


def without_gpus(reason: str) -> str:
    """Return a reason without the advice that applies only to GPUs."""
    return reason.replace(_SYNCHRONISE, _FROM_END_TO_END)


def _check_total(told: ToldSteps, seen: ProgramSeen, pace: Pace | None, layout: Layout) -> None:
    """Raise ImplausibleMeasurement if the steps took longer than the program."""
    ends = [(read.at, read.num_steps) for read in seen.reads] if told.are_lines else []
    for at, num_steps in [(seen.seconds, len(told.seconds)), *ends]:
        total = sum(told.seconds[:num_steps]) * (told.every if told.are_lines else 1)
        if total <= at * (1 + CLOCK_SHARE) + CLOCK_SECONDS:
            continue
        ratio = _too_long_by(pace) if pace is not None else total / at
        raise ImplausibleMeasurement(
            f"{num_steps} {'steps are' if num_steps > 1 else 'step is'} said to have taken "
            f"{_seconds(total)}, and the program had run for {_seconds(at)}: "
            f"{_why_too_long(told, ratio, layout, is_exact=pace is not None and pace.is_sharp)}"
        )


def judge_groups(result: RankResult) -> str | None:
    """Return why lines that come in groups tell too little of the time between these.

    The same may be seen of lines that are held back, if each group of them has a pause. So this is
    apart from `judge_run`, which believes every program with pauses.
    """
    groups = LineGroups.of(result)
    if groups is None or groups.every is None:
        return None
    return (
        f"its lines came {groups.num_lines:.3g} at a time, every {_seconds(groups.every)}, and say"
        f" {_seconds(groups.told)} together: {_times(groups.every / groups.told)} less."
        f" {_SYNCHRONISE}. If the program pauses for something else, flush each line when its step"
        " has ended"
    )


def _sum_reason(told: ToldSteps, seen: ProgramSeen, layout: Layout) -> str | None:
    """Return why the lines after the first one took longer than the time in which they came.

    A mean of all steps so far is too long by little: the pace of single lines does not show it, and
    the start of the program hides it from the sum of all.
    """
    if not told.are_lines:
        return None
    first = seen.reads[0]
    for read in seen.reads:
        # They were written after the last look that found nothing.
        num, seconds = read.num_steps - first.num_steps, read.at - first.after
        total = told.between(first.num_steps, read.num_steps)
        if total > seconds * (1 + CLOCK_SHARE) + CLOCK_SECONDS:
            why = _why_too_long(told, total / seconds, layout, is_exact=False)
            return (
                f"{num} lines came within {_seconds(seconds)}, and say {_seconds(total)} together:"
                f" {why}"
            )
    return None


def _pace_reason(told: ToldSteps, pace: Pace | None, layout: Layout) -> str | None:
    if pace is None:
        return None
    # On a busy machine lines are read late, and only the sum of many windows is known well.
    half = pace.faster_half
    if pace.least > PACE_FACTOR or half.real > PACE_FACTOR * half.told:
        slow = pace.slow if pace.least > PACE_FACTOR else half
        why = _why_too_short(slow.real / slow.told, layout)
        return f"{_comes_text(slow, every=told.every)}: {why}"
    if pace.most * PACE_FACTOR < 1:
        why = _why_too_long(told, _too_long_by(pace), layout, is_exact=pace.is_sharp)
        return f"{_comes_text(pace.fast, every=told.every)}: {why}"
    return None


def _too_long_by(pace: Pace) -> float:
    """Return by which factor lines report too much: at least, if the pace is not sharp."""
    return pace.fast.told / pace.fast.real if pace.is_sharp else 1 / pace.most


def _comes_text(step: StepPace, *, every: int) -> str:
    """Say how often lines come, and what they report of a step, with `every` of them in a line."""
    steps = "a step takes" if every == 1 else f"each of {every} steps takes"
    comes = f"its lines came every {_seconds(step.real * every)}"
    return f"{comes}, and say that {steps} {_seconds(step.told)}"


def _why_too_long(told: ToldSteps, ratio: float, layout: Layout, *, is_exact: bool) -> str:
    """Say why a program may report `ratio` times as much; if not exact, at least as much."""
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
        unit = _UNITS[near[0] if near else min(_UNITS, key=lambda unit: abs(log(ratio / unit)))]
        return (
            f"{unit}? Seconds are wanted; `metrics.unit` names another unit of what a pattern reads"
        )
    if is_exact and 2 <= round(ratio) <= 100 and abs(ratio / round(ratio) - 1) < 0.1:
        num = round(ratio)
        by_ranks = layout.world_size % num == 0
        what = f"{num} steps, or lines that {num} ranks write" if by_ranks else f"{num} steps"
        return f"the time of {what}? {wanted[0].upper()}{wanted[1:]}"
    by_clock = f"{wanted}, by a clock that is read once a step and never set (time.perf_counter())"
    return by_clock if layout.world_size == 1 else f"{by_clock}, and from one rank alone"


def _why_too_short(ratio: float, layout: Layout) -> str:
    """Say why a program may report a part of a step."""
    accumulated = layout.grad_accum_steps
    if 0.7 < ratio / 1000 < 1.4:
        return "a unit that is 1,000 times too large? Seconds are wanted"
    if accumulated > 1 and 0.75 < ratio / accumulated < 1.3:
        return (
            f"the time of one micro-batch? A step has {accumulated} of them here, and the update; "
            "one number for all of it is wanted"
        )
    return f"{_times(ratio)} less. {_SYNCHRONISE}"


def _count_reason(
    told: ToldSteps, seen: ProgramSeen, plan: MeasurementPlan, accumulated: int
) -> str | None:
    """Return why a time is not that of a step: by the numbers in lines, else by how many there are.

    A step has `accumulated` micro-batches.
    """
    counted = seen.counted
    num, asked = len(told.seconds), plan.warmup_steps + plan.max_steps
    if counted is not None:
        asked = counted.num_asked
        if accumulated > 1 and counted.num_written >= MORE_LINES * asked:
            return _more_than_asked(seen, counted, accumulated)
    if (each := seen.steps_per_line) is not None:
        if abs(each / seen.every - 1) < 0.1:
            return None
        what = f"the step numbers in its lines rise by {each:.3g} a line"
        if seen.every > 1:
            return f"{what}, and workload.options.metrics.every is {seen.every}: write {each:.3g}"
        return f"{what}: one line for each optimizer step is wanted, with the time of that step"
    is_its_choice = seen.ended_itself and seen.knows_num_steps
    # The program's result file may leave out the warm-up, in steps or in micro-batches.
    by_micro_batch = accumulated * asked
    each_micro_batch = (
        by_micro_batch,
        by_micro_batch - plan.warmup_steps,
        by_micro_batch - accumulated * plan.warmup_steps,
    )
    if accumulated > 1 and is_its_choice and seen.every == 1 and num in each_micro_batch:
        return _for_each_micro_batch(asked, num, accumulated)
    parts = {asked // every for every in range(2, asked + 1)}
    if counted is not None and asked >= FEWEST_COUNTED:
        # One at step 0 or at the end may be one more. Of ten steps, six may be those that ran.
        parts |= {one + 1 for one in parts}
    is_part = num in parts
    if not (told.are_lines and is_its_choice and is_part and seen.every == 1):
        return None
    if num < plan.warmup_steps + FEWEST_STEPS and counted is None:
        # Too few to be sure of, and said so.
        return None
    every = round(asked / num)
    return (
        f"it was asked for {asked} steps, and wrote {num} lines: one line for {every} steps? "
        f"One for each is wanted. If it ran no more, {RUN_AS_ASKED}, or give its lines a "
        'field "step"'
    )


def _more_than_asked(seen: ProgramSeen, counted: CountedLines, accumulated: int) -> str:
    """Return why so many lines came: there is one for each micro-batch, or for further steps.

    Numbers that follow one another name steps. `for step, batch in enumerate(loader)` numbers
    micro-batches in the same way, so the reason says what a step is.
    """
    asked, num, each = counted.num_asked, counted.num_written, seen.steps_per_line
    follow = each is not None and abs(each / seen.every - 1) < 0.1
    if not follow or (seen.ended_itself and num == accumulated * asked):
        return _for_each_micro_batch(asked, num, accumulated)
    return (
        f"it was asked for {asked * seen.every} steps, and its lines number {num * seen.every}, one"
        f" after the other. If it went on past the steps that it was asked for, {RUN_AS_ASKED}. If"
        f" these are micro-batches, write one line after all {accumulated} of a step: a step is one"
        " update of the weights"
    )


def _for_each_micro_batch(asked: int, num: int, accumulated: int) -> str:
    return (
        f"it was asked for {asked} steps, and reported {num} times: one for each of the "
        f"{accumulated} micro-batches of a step? One for all of them and the update is wanted. "
        f"If it ran more steps, {RUN_AS_ASKED}; a program that trains until it is ended takes no "
        "{num_steps} at all"
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
        (what for part, what in parts.items() if abs(tokens * part / expected - 1) <= TOKENS_SHARE),
        "does it train this layout? If padding is what it leaves out, leave out tokens_per_step",
    )
    return (
        f"tokens_per_step is {tokens:,}, and the layout has {expected:,} "
        f"({batch:,} sequences x {sequence_length:,}): {guess}"
    )


def _constant_reason(result: RankResult, plan: MeasurementPlan, tokens: int) -> str | None:
    num, distinct = len(result.step_seconds), set(result.step_seconds)
    if num < FEWEST_STEPS or len(distinct) > 1:
        return None
    (each,) = distinct
    all_took = f"all {num} timed steps are reported as exactly {each:.12g} s"
    if is_fine(each, tokens):
        return f"{all_took}, and no clock shows that: an average, or a fixed number?"
    rounded = 0.5 * 10.0 ** -decimals(each) / each
    if rounded <= plan.relative_confidence:
        return None
    return f"{all_took}, rounded to {rounded:.0%}: write more digits; or is it a fixed number?"


def _trend_reason(result: RankResult, slowdown: float) -> str | None:
    steps = result.step_seconds
    if len(steps) < FEWEST_FOR_TREND:
        return None
    third = len(steps) // 3
    first, last = statistics.median(steps[:third]), statistics.median(steps[-third:])
    usual = max(TREND_FACTOR, slowdown)
    if 1 / usual <= first / last <= usual:
        return None
    if first > last:
        why = (
            "raise measurement.warmup_steps, so that compilation and warm-up are over; "
            "if each is a mean of all steps so far, report the time of each step; "
            "or the machine's speed changed, then measure it again"
        )
    else:
        why = (
            f"may the clock be read before the device is done? {_SYNCHRONISE}. Or the machine's"
            " speed changed: then measure it again"
        )
    return (
        f"its steps went from {_seconds(first)} (the median of the first third of the timed steps)"
        f" to {_seconds(last)} (of the last third): {why}"
    )


def _period_reason(told: ToldSteps) -> str | None:
    period = period_of(told.seconds)
    if period is None:
        return None
    return (
        f"one of {period.num_steps} steps takes {_seconds(period.long)}, and the others"
        f" {_seconds(period.usual)}: does the clock wait for the device only then? {_SYNCHRONISE}."
        " If such a step does something else (a checkpoint, an evaluation, waiting for data), leave"
        " that out of its time"
    )


def _seconds(value: float) -> str:
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:,.4g} s" if value < 9_999.5 else f"{value:,.0f} s"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio < 99.5 else f"{ratio:,.0f} times"

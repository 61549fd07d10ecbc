"""What can be true of a program's numbers, judged by what was seen of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.line_count import FEWEST_COUNTED
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.measurement import FEWEST_STEPS, ImplausibleMeasurement
from orchestrator.core.trial.plausibility import judge_pace, judge_run
from orchestrator.core.trial.protocol import (
    CountedLines,
    LinesRead,
    MeasurementPlan,
    ProgramSeen,
    RankResult,
)
from tests.examples import examples
from workloads.command.polling import poll_seconds

POLL_SECONDS = 0.05
PLAN = MeasurementPlan(warmup_steps=2, min_steps=8, max_steps=50, relative_confidence=0.02)
LAYOUT = Layout(data_parallel_size=2, micro_batch_size=2, grad_accum_steps=4)
SEQUENCE_LENGTH = 1024
TOKENS = LAYOUT.global_batch_size * SEQUENCE_LENGTH


@dataclass(frozen=True, kw_only=True)
class Run:
    """A program as it was: when each step ended, and what its line says. Seconds from its start."""

    told: Sequence[float]
    ends: Sequence[float]
    written: Sequence[float]  # when each line could be read
    teardown: float = 0.5
    poll_seconds: float = POLL_SECONDS

    def result(self, **known: Any) -> RankResult:
        known_of_it = {
            key: known.pop(key) for key in tuple(known) if key in ProgramSeen.model_fields
        }
        return RankResult(
            warmup_seconds=list(self.told[: PLAN.warmup_steps]),
            step_seconds=list(self.told[PLAN.warmup_steps :]),
            seen=ProgramSeen(
                seconds=max(self.ends[-1], self.written[-1]) + self.teardown,
                reads=self._reads(),
                **known_of_it,
            ),
            **known,
        )

    def _reads(self) -> list[LinesRead]:
        """Read the lines as the rank does: all that were written since the last look."""
        reads: list[LinesRead] = []
        num, looked_at = 0, 0.0
        last = max(self.written[-1], self.ends[-1])
        in_order = sorted(self.written)
        while num < len(self.written):
            at = min(looked_at + self.poll_seconds, last + self.teardown)
            found = bisect_right(in_order, at)
            if found > num:
                reads.append(LinesRead(after=looked_at, at=at, num_steps=found))
                num = found
            looked_at = at
        return reads


def run(
    steps: Sequence[float],
    *,
    told: Sequence[float] | None = None,
    start: float = 2.0,
    pauses: Sequence[float] | None = None,
    buffered: int = 1,
    **how: Any,
) -> Run:
    """A program whose steps take so long, with `pauses` between them that no line tells of.

    `buffered`: so many lines are written at once.
    """
    ends, now = [], start
    for step, pause in zip(steps, pauses or [0.0] * len(steps), strict=True):
        now += step
        ends.append(now)
        now += pause
    last = len(steps) - 1
    written = [ends[min(last, (i // buffered + 1) * buffered - 1)] for i in range(len(steps))]
    return Run(told=told or steps, ends=ends, written=written, **how)


def judge(
    result: RankResult, *, layout: Layout = LAYOUT, load: MachineLoad = NO_LOAD
) -> str | None:
    return judge_run(result, layout=layout, sequence_length=SEQUENCE_LENGTH, plan=PLAN, load=load)


def noisy(seconds: float, num: int = 52, *, noise: float = 0.02, seed: int = 1) -> list[float]:
    random = Random(seed)
    return [seconds * random.lognormvariate(0, noise) for _ in range(num)]


# --- the twelve mistakes, as they look from outside ---------------------------------------------


@pytest.mark.parametrize("seconds", [0.03, 0.12, 0.5, 2.0, 40.0])
def test_milliseconds_are_not_taken_for_seconds(seconds: float) -> None:
    steps = noisy(seconds)
    with pytest.raises(ImplausibleMeasurement, match=r"had run for .*: milliseconds\? Seconds are"):
        judge(run(steps, told=[step * 1000 for step in steps]).result())


def test_milliseconds_that_are_told_at_the_end_are_found_by_the_time_that_the_program_ran() -> None:
    steps = noisy(0.2)
    told = [step * 1000 for step in steps]
    with pytest.raises(ImplausibleMeasurement, match=r"milliseconds\? .* of what a pattern reads$"):
        judge(run(steps, told=told, buffered=1000).result())


@pytest.mark.parametrize(
    ("seconds", "num", "buffered", "factor", "unit"),
    [
        # Line by line, several lines a look, and all at the end.
        (0.3, 52, 1, 1e3, "milliseconds"),
        (0.3, 52, 1, 1e6, "microseconds"),
        (0.008, 300, 1, 1e3, "milliseconds"),
        (0.008, 300, 1, 1e6, "microseconds"),
        (0.008, 300, 1, 1e9, "nanoseconds"),
        (0.008, 300, 1000, 1e6, "microseconds"),
        (0.008, 300, 1000, 1e9, "nanoseconds"),
        # The pace of few steps shows the factor within a half.
        (0.008, 60, 1, 1e6, "microseconds"),
    ],
)
def test_the_unit_of_too_large_numbers_is_named(
    seconds: float, num: int, buffered: int, factor: float, unit: str
) -> None:
    steps = noisy(seconds, num)
    told = [step * factor for step in steps]
    with pytest.raises(ImplausibleMeasurement, match=rf": {unit}\? Seconds are wanted"):
        judge(run(steps, told=told, start=0.2, teardown=0.1, buffered=buffered).result())


@pytest.mark.parametrize(
    ("seconds", "num", "buffered", "factor", "named"),
    [
        # The pace shows another factor.
        (0.3, 52, 1, 500.0, False),
        (0.3, 52, 1, 2000.0, False),
        # It shows the factor within a half: few lines came, several a look.
        (0.008, 60, 1, 30.0, False),
        (0.008, 60, 1, 1000.0, True),
        # There is no pace.
        (0.3, 52, 1000, 500.0, True),
        (0.3, 52, 1000, 2000.0, True),
    ],
)
def test_milliseconds_are_named_if_the_pace_allows_for_their_factor(
    seconds: float, num: int, buffered: int, factor: float, named: bool
) -> None:
    steps = noisy(seconds, num)
    told = [step * factor for step in steps]
    with pytest.raises(ImplausibleMeasurement) as caught:
        judge(run(steps, told=told, start=0.2, teardown=0.1, buffered=buffered).result())
    assert ("milliseconds? Seconds" in str(caught.value)) is named


@pytest.mark.parametrize("factor", [0.75, 1.0, 1.35])
def test_kiloseconds_are_not_taken_for_seconds(factor: float) -> None:
    steps = noisy(2.0)
    reason = judge(run(steps, told=[step / (1000 * factor) for step in steps]).result())
    assert reason is not None and "1,000 times too large" in reason


def test_the_time_since_the_start_is_no_step_time() -> None:
    one = run(steps := noisy(0.2))
    told = [end - one.ends[0] + steps[0] for end in one.ends]
    with pytest.raises(ImplausibleMeasurement, match=r"the time since the start\?"):
        judge(run(steps, told=told).result())


@pytest.mark.parametrize(
    ("steps", "rise"),
    [
        ([5.0, 8.0, 11.0], True),
        ([5.0, 11.0], False),
        ([5.0, 5.0, 11.0], False),
        ([5.0, 12.0, 11.0], False),
        ([5.0, 8.0, 10.0], False),
    ],
    ids=["three", "only two", "two alike", "one falls", "no more than twice the first"],
)
def test_times_since_the_start_rise_from_step_to_step(steps: list[float], rise: bool) -> None:
    with pytest.raises(ImplausibleMeasurement) as caught:
        judge(RankResult(step_seconds=steps, seen=ProgramSeen(seconds=1.0)))
    assert ("the time since the start?" in str(caught.value)) is rise


def test_the_mean_of_all_steps_so_far_with_the_first_one_is_no_step_time() -> None:
    steps = [30.0, *noisy(0.2, 51)]
    told = [sum(steps[: i + 1]) / (i + 1) for i in range(len(steps))]
    with pytest.raises(ImplausibleMeasurement, match="one optimizer step"):
        judge(run(steps, told=told).result())


@pytest.mark.parametrize("seconds", [0.1, 0.5, 3.0])
def test_a_clock_that_stops_before_the_device_is_done_is_found_by_the_pace(seconds: float) -> None:
    reason = judge(run(noisy(seconds), told=noisy(0.005, seed=2)).result())
    assert reason is not None
    assert "and say that a step takes 5" in reason and "torch.cuda.synchronize()" in reason


def test_the_time_of_one_micro_batch_is_found_by_the_pace() -> None:
    steps = noisy(0.8)
    reason = judge(run(steps, told=[step / 4 for step in steps]).result())
    assert reason is not None and "the time of one micro-batch? A step has 4" in reason


@pytest.mark.parametrize(
    ("micro_batches", "ratio", "named"),
    [(4, 4.0, True), (2, 2.0, True), (4, 2.0, False), (4, 8.0, False)],
)
def test_micro_batches_are_named_if_a_step_takes_as_often_as_long_as_there_are(
    micro_batches: int, ratio: float, named: bool
) -> None:
    steps = noisy(0.8)
    told = run(steps, told=[step / ratio for step in steps]).result()
    reason = judge(told, layout=replace(LAYOUT, grad_accum_steps=micro_batches))
    assert reason is not None and ("micro-batch?" in reason) is named


def test_a_step_of_one_micro_batch_is_not_told_of_it() -> None:
    """Five of nine lines are true, and the others say too little: only the median is true."""
    steps = noisy(0.05, 300, noise=0.001)
    told = [step if i % 9 % 2 == 0 else 0.05 * step for i, step in enumerate(steps)]
    reason = judge(run(steps, told=told).result(), layout=Layout(micro_batch_size=16))
    assert reason is not None and "its lines came every" in reason
    assert "micro-batch" not in reason


def test_kiloseconds_are_not_named_where_a_line_says_half_of_them() -> None:
    steps = noisy(2.0)
    reason = judge(run(steps, told=[step / 2000 for step in steps]).result())
    assert reason is not None and "1 ms: 1,999 times less" in reason


def test_the_time_of_several_steps_in_every_line_is_found_by_the_pace() -> None:
    steps = noisy(0.3)
    reason = judge(run(steps, told=[2 * step for step in steps], start=60.0).result())
    assert reason is not None and "the time of 2 steps" in reason


def test_a_line_for_several_steps_is_found_by_the_number_of_lines() -> None:
    steps = noisy(1.5, 26)
    reason = judge(run(steps).result())
    assert reason is not None and "one line for 2 steps?" in reason
    assert judge(run(steps).result(steps_per_line=1.0)) is None
    assert judge(run(steps).result(ended_itself=False)) is None
    assert judge(run(steps).result(knows_num_steps=False)) is None


@pytest.mark.parametrize("num", [4 * 52, 4 * 50, 4 * 52 - 2])
def test_a_time_for_each_micro_batch_is_found_by_the_number_of_times(num: int) -> None:
    times = noisy(0.5, num)
    reason = judge(run(times).result())
    assert reason is not None and f"and reported {num} times: one for each of the 4 micro" in reason
    assert judge(run([*times, 0.5]).result()) is None
    assert judge(run(times).result(steps_per_line=1.0)) is None
    assert judge(run(times).result(ended_itself=False)) is None


# What was seen of a program that was not ended before it could write more lines.
def counted(num: int, *, asked: int = 52) -> dict[str, Any]:
    return {"counted": CountedLines(num_asked=asked, num_written=num), "ended_itself": False}


@pytest.mark.parametrize("numbers", [None, 0.25])
def test_more_lines_than_steps_that_were_asked_for_are_of_micro_batches(
    numbers: float | None,
) -> None:
    steps = noisy(0.1)
    seen = run(steps).result(**counted(78), steps_per_line=numbers)
    reason = judge(seen)
    assert reason is not None
    assert reason.startswith(
        "it was asked for 52 steps, and reported 78 times: one for each of the 4"
    )
    assert judge(run(steps).result(**counted(77), steps_per_line=1.0)) is None
    of_two = judge(seen, layout=replace(LAYOUT, grad_accum_steps=2))
    assert of_two is not None and "one for each of the 2 micro-batches" in of_two
    # One micro-batch is a step: it runs more of them.
    alone = judge(run(steps).result(**counted(400)), layout=Layout(micro_batch_size=16))
    assert alone is None


def test_steps_whose_numbers_go_on_past_those_asked_for_are_not_taken_for_micro_batches() -> None:
    steps = noisy(0.1)
    reason = judge(run(steps).result(**counted(78), steps_per_line=1.0))
    assert reason is not None and "?" not in reason
    assert reason.startswith(
        "it was asked for 52 steps, and its lines number 78, one after the other. If it went on"
        " past the steps that it was asked for, have it run as many as it is asked for"
    )
    assert reason.endswith(
        "If these are micro-batches, write one line after all 4 of a step: a step is one update of"
        " the weights"
    )
    # It ended by itself, but not where its micro-batches do.
    of_its_own = counted(78) | {"ended_itself": True}
    assert judge(run(steps).result(**of_its_own, steps_per_line=1.0)) == reason
    # This one ended where it was asked to, by its micro-batches.
    by_itself = counted(4 * 52) | {"ended_itself": True}
    reason = judge(run(steps).result(**by_itself, steps_per_line=1.0))
    assert reason is not None and "one for each of the 4 micro-batches of a step?" in reason


@pytest.mark.parametrize(
    ("numbers", "follow"), [(0.89, False), (0.93, True), (1.07, True), (1.11, False)]
)
def test_numbers_follow_one_another_if_they_rise_by_a_step_a_line_within_a_tenth(
    numbers: float, *, follow: bool
) -> None:
    reason = judge(run(noisy(0.1)).result(**counted(78), steps_per_line=numbers))
    assert reason is not None and ("one after the other" in reason) is follow
    # Lines for two steps each: 78 of them number 156 steps, of 104.
    told = noisy(0.1)
    of_two = run([2 * one for one in told], told=told)
    reason = judge(of_two.result(**counted(78), every=2, steps_per_line=2 * numbers))
    assert reason is not None
    assert ("asked for 104 steps, and its lines number 156, one after" in reason) is follow


@pytest.mark.parametrize(("num", "every"), [(26, 2), (27, 2), (17, 3), (6, 9), (5, 10)])
def test_few_lines_of_a_program_that_was_counted_cover_several_steps(num: int, every: int) -> None:
    seen = run(noisy(0.5, num)).result(**counted(num) | {"ended_itself": True})
    reason = judge(seen)
    assert reason is not None and f"one line for {every} steps?" in reason
    numbered = run(noisy(0.5, num)).result(
        **counted(num) | {"ended_itself": True}, steps_per_line=1.0
    )
    assert judge(numbered) is None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_as_many_times_as_micro_batches_are_no_steps_unless_a_step_has_one(
    micro_batches: int,
) -> None:
    layout = replace(LAYOUT, grad_accum_steps=micro_batches)
    reason = judge(run(noisy(0.5, micro_batches * 52)).result(), layout=layout)
    assert (reason is not None and "one for each of the 2 micro" in reason) is (micro_batches > 1)
    assert (reason is None) is (micro_batches == 1)


@pytest.mark.parametrize("num", [7, 8])
def test_too_few_lines_show_nothing_of_how_many_steps_they_are(num: int) -> None:
    """Lines for every seventh and every sixth of 52 steps, of which two are warm-up."""
    reason = judge(run(noisy(0.5, num)).result())
    assert (reason is not None and "one line for" in reason) is (num >= 2 + FEWEST_STEPS)


def test_a_program_that_was_asked_for_few_steps_may_have_run_half_of_them_and_one() -> None:
    for asked in (FEWEST_COUNTED - 1, FEWEST_COUNTED):
        num = asked // 2 + 1
        seen = run(noisy(0.5, num)).result(**counted(num, asked=asked) | {"ended_itself": True})
        assert (judge(seen) is not None) is (asked == FEWEST_COUNTED)


def test_a_program_writes_as_many_lines_as_it_was_asked_for_or_one_more() -> None:
    for num in (50, 52, 53):
        seen = run(noisy(0.5, num)).result(**counted(num) | {"ended_itself": True})
        assert judge(seen) is None
    # Fewer steps are asked for in a trial whose lines are counted than in others.
    fewer = run(noisy(0.5, 20)).result(**counted(20, asked=20) | {"ended_itself": True})
    assert judge(fewer) is None
    # Six of ten steps may be those that ran, and no line at step 0 and for every second step.
    six = run(noisy(0.5, 6)).result(**counted(6, asked=10) | {"ended_itself": True})
    assert judge(six) is None


def test_a_clock_that_waits_for_the_device_now_and_then_is_found_by_its_period() -> None:
    steps = [step * (50 if number % 5 == 4 else 1) for number, step in enumerate(noisy(0.01))]
    reason = judge(run(steps).result())
    assert reason is not None and "one of 5 steps takes 501" in reason
    assert "the others 10" in reason and "torch.cuda.synchronize()" in reason


@pytest.mark.parametrize(("each", "said"), [(10.0, "rise by 10 a line"), (0.25, "by 0.25 a line")])
def test_the_numbers_in_the_lines_show_that_a_line_is_no_step(each: float, said: str) -> None:
    reason = judge(run(noisy(0.5)).result(steps_per_line=each))
    assert reason is not None and said in reason
    assert "one line for each optimizer step is wanted" in reason


@pytest.mark.parametrize(
    ("each", "is_told"), [(0.85, True), (0.92, False), (1.08, False), (1.15, True)]
)
def test_a_few_numbers_that_lines_leave_out_or_repeat_are_no_other_step(
    each: float, is_told: bool
) -> None:
    assert (judge(run(noisy(0.5)).result(steps_per_line=each)) is not None) is is_told


def test_a_line_may_cover_several_steps_if_the_file_says_so() -> None:
    every = 10
    means = noisy(0.1, 30)
    honest = run([every * mean for mean in means], told=means)
    assert judge(honest.result(every=every)) is None
    assert judge(honest.result(every=every, steps_per_line=10.0)) is None
    reason = judge(honest.result(every=every, steps_per_line=5.0))
    assert reason is not None and "workload.options.metrics.every is 10: write 5" in reason
    of_two = run([2 * mean for mean in means], told=means)
    reason = judge(of_two.result(every=2, steps_per_line=5.0))
    assert reason is not None and "workload.options.metrics.every is 2: write 5" in reason
    reason = judge(honest.result())
    assert reason is not None and "10 times less" in reason


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TOKENS // 2, "those of one rank?"),
        (TOKENS // 4, "those of one micro-batch?"),
        (TOKENS // 8, "one rank and one micro-batch?"),
        (TOKENS * 3, "does it train this layout?"),
    ],
)
def test_tokens_have_to_follow_from_the_layout(tokens: int, said: str) -> None:
    reason = judge(run(noisy(0.5)).result(tokens_per_step=tokens))
    assert reason is not None and said in reason


def test_targets_are_one_token_shorter_than_their_sequence() -> None:
    tokens = LAYOUT.global_batch_size * (SEQUENCE_LENGTH - 1)
    assert judge(run(noisy(0.5)).result(tokens_per_step=tokens)) is None
    assert judge(run(noisy(0.5)).result(tokens_per_step=TOKENS)) is None


def test_no_clock_shows_the_same_time_in_every_step() -> None:
    reason = judge(run([0.5123456] * 52).result())
    assert reason is not None and "exactly 0.5123456 s, and no clock shows that" in reason


@pytest.mark.parametrize("num", [FEWEST_STEPS - 1, FEWEST_STEPS])
def test_fewer_steps_than_a_measurement_needs_may_be_equal(num: int) -> None:
    result = RankResult(step_seconds=[0.5123456] * num, seen=ProgramSeen(seconds=60.0))
    assert (judge(result) is not None) is (num >= FEWEST_STEPS)


@pytest.mark.parametrize(
    ("seconds", "is_told"), [(0.5, True), (1.2, True), (1.7, True), (0.49, False), (0.52, False)]
)
def test_a_rounded_time_is_believed_as_far_as_its_digits_go(seconds: float, is_told: bool) -> None:
    reason = judge(run([seconds] * 52).result())
    assert (reason is not None and "write more digits" in reason) is is_told


def test_a_rate_of_few_digits_is_rounded_and_not_made_up() -> None:
    # 1.923 steps a second in every line, as transformers' Trainer rounds it.
    assert judge(run([1 / 1.923] * 52).result()) is None
    # 16,400 tokens a second.
    assert judge(run([TOKENS / 16_400] * 52).result()) is None


def test_a_warm_up_that_is_too_short_is_found_by_the_trend() -> None:
    steps = noisy(0.2)
    steps = [4 * step for step in steps[:22]] + steps[22:]
    reason = judge(run(steps).result())
    assert reason is not None and "raise measurement.warmup_steps" in reason


def test_steps_that_the_load_of_others_may_have_slowed_are_disturbed_and_not_untrue() -> None:
    steps = noisy(0.2)
    told = run([3.5 * step for step in steps[:22]] + steps[22:]).result()
    busy = MachineLoad(cpu_cores=2, own_cpu_cores=0.2, sweep_cpu_cores=0.0, others_cpu_cores=1.8)
    assert judge(told, load=busy) is None
    idle = replace(busy, others_cpu_cores=0.0)
    assert judge(told, load=idle) is not None
    slower = run([11 * step for step in steps[:22]] + steps[22:]).result()
    assert judge(slower, load=busy) is not None


def test_a_program_that_got_little_of_the_cores_may_have_slowed_down_as_much() -> None:
    steps = noisy(0.0069)
    told = run(steps[:34] + [5 * step for step in steps[34:]]).result()
    starved = MachineLoad(
        cpu_cores=2, own_cpu_cores=0.02, sweep_cpu_cores=0.0, others_cpu_cores=1.96
    )
    assert judge(told, load=starved) is None
    # 4, if it is unknown how much the program got.
    assert judge(told, load=replace(starved, own_cpu_cores=None)) is not None
    assert judge(told, load=replace(starved, others_cpu_cores=0.0)) is not None


def test_a_trend_names_the_steps_that_it_compares_and_the_machine_among_its_causes() -> None:
    steps = noisy(0.2)
    for told in ([5 * step for step in steps[:34]] + steps[34:], [*steps[:34], *[5.0] * 18]):
        reason = judge(run(told).result())
        assert reason is not None and "or the machine's speed changed" in reason.lower()
        assert "(the median of the first third of the timed steps) to " in reason


def test_steps_that_get_longer_may_not_have_been_waited_for() -> None:
    steps = [0.01] * 20 + [0.4] * 32
    reason = judge(
        run(noisy(0.4), told=[a * b for a, b in zip(steps, noisy(1.0), strict=True)]).result()
    )
    assert reason is not None and "before" in reason and "torch.cuda.synchronize()" in reason


@pytest.mark.parametrize("factor", [0.01, 0.5, 2.0])
def test_lines_that_come_after_the_last_that_counts_show_the_pace_of_short_steps(
    factor: float,
) -> None:
    """Ten steps of 50 ms are too few for a pace; a program goes on for a second until it ends."""
    steps = noisy(0.05, 30)
    whole = run(steps, told=[factor * step for step in steps], start=5.0).result(ended_itself=False)
    assert whole.seen is not None
    early = whole.model_copy(
        update={
            "step_seconds": whole.step_seconds[:8],
            "seen": whole.seen.model_copy(update={"later_seconds": whole.step_seconds[8:]}),
        }
    )
    reason = judge(early)
    assert reason is not None and "its lines came every" in reason
    honest = early.seen.model_copy(update={"later_seconds": steps[10:]})  # type: ignore[union-attr]
    told = {"warmup_seconds": steps[:2], "step_seconds": steps[2:10], "seen": honest}
    assert judge(early.model_copy(update=told)) is None


def test_steps_that_every_rank_writes_are_named() -> None:
    steps = noisy(0.1)
    told = [2 * step for step in steps]
    reason = judge(run(steps, told=told, start=30.0).result())
    assert reason is not None and "the time of 2 steps, or lines that 2 ranks write?" in reason
    alone = judge(run(steps, told=told, start=30.0).result(), layout=Layout(grad_accum_steps=16))
    assert alone is not None and "the time of 2 steps? The seconds" in alone


@pytest.mark.parametrize("start", [2.0, 30.0, 300.0])
def test_the_mean_of_all_steps_so_far_is_found_however_long_the_start_was(start: float) -> None:
    """The first step compiles, so means are too large for long; the program's start hides that."""
    steps = [4.0, *noisy(0.5, 51)]
    means = [sum(steps[: i + 1]) / (i + 1) for i in range(len(steps))]
    found = run(steps, told=means, start=start).result()
    if start < 20:
        with pytest.raises(ImplausibleMeasurement, match="the program had run for"):
            judge(found)
        return
    reason = judge(found)
    assert reason is not None and "lines came within" in reason
    assert "the seconds of one optimizer step are wanted" in reason


def test_the_first_lines_that_say_more_than_the_time_in_which_they_came_are_counted() -> None:
    """A line says 10.3 s and comes every 10 s: 3 say 30.9 s, and 30.05 s may be 30.85 s.

    The start of the program hides that from the sum of all.
    """
    reason = judge(run([10.0] * 52, told=[10.3] * 52, start=60.0).result(steps_per_line=1.0))
    assert reason is not None
    assert reason.startswith("3 lines came within 30.05 s,")
    assert "and say 30.9 s together: the seconds of one optimizer step are wanted" in reason


# --- the pace of lines ---------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 10])
def test_the_pace_of_lines_is_shown_against_what_they_say(every: int) -> None:
    told = noisy(0.3)
    honest = run([every * one for one in told], told=told).result(every=every)
    found = judge_pace(honest, layout=LAYOUT)
    assert found is not None and found.reason is None
    assert found.num_steps == 51 * every
    assert found.told_seconds == pytest.approx(every * sum(told[1:]))
    assert found.passed_seconds == pytest.approx(found.told_seconds, abs=2 * POLL_SECONDS)


@pytest.mark.parametrize(
    ("factor", "start", "said"),
    [
        (0.1, 2.0, "its lines came every"),
        (10.0, 2.0, "52 steps are said to have taken"),
        (1.1, 60.0, "lines came within"),
    ],
)
def test_a_pace_that_the_lines_contradict_has_the_reason(
    factor: float, start: float, said: str
) -> None:
    steps = noisy(0.3)
    found = judge_pace(
        run(steps, told=[factor * one for one in steps], start=start).result(), layout=LAYOUT
    )
    assert found is not None and found.reason is not None and said in found.reason


def test_lines_that_came_all_at_once_have_no_pace() -> None:
    assert judge_pace(run(noisy(0.3), buffered=1000).result(), layout=LAYOUT) is None
    assert judge_pace(RankResult(step_seconds=[0.3] * 52), layout=LAYOUT) is None
    unseen = RankResult(step_seconds=[], seen=ProgramSeen(seconds=20.0))
    assert judge_pace(unseen, layout=LAYOUT) is None


def test_the_seconds_of_a_line_for_several_steps_are_more_than_the_program_ran() -> None:
    means = noisy(0.1, 30)
    of_lines = run([10 * mean for mean in means], told=[10 * mean for mean in means])
    with pytest.raises(ImplausibleMeasurement, match="had run for"):
        judge(of_lines.result(every=10))


# --- honest programs -----------------------------------------------------------------------------

HONEST = {
    "plain": run(noisy(0.3)),
    "slow": run(noisy(30.0)),
    "between two reads": run(noisy(0.075)),
    "shorter than a read": run(noisy(0.012)),
    "shorter than a read, many": run(noisy(0.012, 600)),
    "a slow first step": run([90.0, 4.0, *noisy(0.3, 50)]),
    "a checkpoint every ten steps": run(noisy(0.3), pauses=[20, *[0] * 9] * 5 + [0] * 2),
    "an evaluation every three steps": run(noisy(0.1, 51), pauses=[0, 0, 3.0] * 17),
    "data stalls": run(noisy(0.2), pauses=[0.1 if i % 3 else 1.5 for i in range(52)]),
    "a loader that takes a third": run(noisy(0.3), pauses=[0.1] * 52),
    "lines at the end": run(noisy(0.3), buffered=1000),
    "lines in bursts": run(noisy(0.02, 800), buffered=250),
    "lines in few bursts": run(noisy(0.3), buffered=20),
    "a long teardown": run(noisy(0.3), teardown=60.0),
    "a machine that is busy": run(noisy(0.3, noise=0.3), poll_seconds=0.4),
    "alternating lengths": run([0.1, 1.0] * 26),
    "a long start": run(noisy(0.3), start=300.0),
}  # fmt: skip


@pytest.mark.parametrize("which", HONEST)
def test_an_honest_program_is_believed(which: str) -> None:
    assert judge(HONEST[which].result(steps_per_line=1.0)) is None


@settings(max_examples=examples(150))
@given(
    seconds=st.floats(0.01, 5.0),
    noise=st.floats(0.0001, 0.25),
    num=st.integers(6, 90),
    start=st.floats(0.05, 100.0),
    buffered=st.sampled_from([1, 1, 1, 2, 7, 40, 1000]),
    poll_seconds=st.floats(0.05, 0.2),
    pause=st.floats(0.0, 30.0),
    every=st.integers(4, 20),
    seed=st.integers(0, 10_000),
)
def test_no_honest_program_is_refused_or_marked(
    seconds: float,
    noise: float,
    num: int,
    start: float,
    buffered: int,
    poll_seconds: float,
    pause: float,
    every: int,
    seed: int,
) -> None:
    """Pauses follow fewer than half of the steps.

    If they are too short to be seen, they are a small part of the time.
    """
    if pause < 9 * poll_seconds:
        pause = min(pause, 0.3 * every * seconds)
    honest = run(
        noisy(seconds, num, noise=noise, seed=seed),
        start=start,
        buffered=buffered,
        pauses=[pause if i % every == 0 else 0.0 for i in range(num)],
        poll_seconds=poll_seconds,
    )
    assert judge(honest.result(steps_per_line=1.0)) is None


@settings(max_examples=examples(150))
@given(
    seconds=st.floats(0.1, 5.0),
    factor=st.one_of(st.floats(0.001, 0.55), st.floats(1.8, 2000.0)),
    start=st.floats(0.05, 100.0),
    seed=st.integers(0, 10_000),
)
def test_no_wrong_factor_is_believed_if_lines_come_as_steps_end(
    seconds: float, factor: float, start: float, seed: int
) -> None:
    steps = noisy(seconds, seed=seed)
    told = [step * factor for step in steps]
    try:
        reason = judge(run(steps, told=told, start=start).result())
    except ImplausibleMeasurement:
        return
    assert reason is not None


def test_what_nobody_saw_is_not_judged() -> None:
    assert judge(RankResult(step_seconds=[1e6] * 10)) is None


def test_a_document_alone_is_bounded_by_the_time_that_the_program_ran() -> None:
    seen = ProgramSeen(seconds=20.0)
    assert judge(RankResult(step_seconds=noisy(0.3), seen=seen)) is None
    with pytest.raises(ImplausibleMeasurement, match="52 steps are said to have taken 1"):
        judge(RankResult(step_seconds=noisy(3.0), seen=seen))


def test_the_steps_of_a_document_are_compared_with_the_pace_of_lines() -> None:
    one = run(noisy(0.5)).result()
    document = one.model_copy(update={"warmup_seconds": [], "step_seconds": noisy(0.5, 40)})
    assert judge(document) is None
    reason = judge(document.model_copy(update={"step_seconds": noisy(0.05, 40)}))
    assert reason is not None and "10 times less" in reason


@pytest.mark.parametrize(
    ("share", "told"), [(0.0199, False), (0.0201, True), (-0.0199, False), (-0.0201, True)]
)
def test_tokens_may_differ_by_two_percent(share: float, told: bool) -> None:
    layout = Layout(micro_batch_size=10)
    result = RankResult(
        step_seconds=[0.1, 0.11, 0.12],
        tokens_per_step=round(1e6 * (1 + share)),
        seen=ProgramSeen(seconds=60.0),
    )
    plan = MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=9, relative_confidence=0.02)
    found = judge_run(result, layout=layout, sequence_length=100_000, plan=plan)
    assert (found is not None) is told


@pytest.mark.parametrize(
    ("first", "last", "num", "told"),
    # The first and the last third of at least twelve steps: no more than threefold.
    [
        (3.0, 1.0, 12, False),
        (3.01, 1.0, 12, True),
        (1.0, 2.99, 12, False),
        (1.0, 3.01, 12, True),
        (9.0, 1.0, 11, False),
    ],
)
def test_steps_may_change_threefold(first: float, last: float, num: int, told: bool) -> None:
    third = num // 3
    steps = [first] * third + [2.0 + 0.001 * n for n in range(num - 2 * third)] + [last] * third
    result = RankResult(step_seconds=steps, seen=ProgramSeen(seconds=1e3))
    plan = MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=99, relative_confidence=0.02)
    found = judge_run(result, layout=Layout(), sequence_length=64, plan=plan)
    assert (found is not None) is told
    assert found is None or "its steps went" in found


@pytest.mark.parametrize("at_first", [[4.0] * 5, [1.0] * 3 + [4.0] * 5])
def test_the_first_third_of_the_steps_is_compared_with_the_last(at_first: list[float]) -> None:
    """Most of the first third take 4 s: fewer than half of the first half, or of a quarter."""
    steps = [*at_first, *(1.0 + 0.001 * n for n in range(24 - len(at_first)))]
    reason = judge(RankResult(step_seconds=steps, seen=ProgramSeen(seconds=1e3)))
    assert reason is not None and "its steps went" in reason


@pytest.mark.parametrize(("seconds", "refused"), [(10.0, False), (9.0, True)])
def test_steps_may_add_up_to_the_time_of_the_program_and_a_little(
    seconds: float, refused: bool
) -> None:
    """2 % and a fifth of a second: 10.2 and 0.2 of ten seconds."""
    result = RankResult(step_seconds=[2.0, 3.0, 5.39], seen=ProgramSeen(seconds=seconds))
    plan = MeasurementPlan(warmup_steps=1, min_steps=2, max_steps=99, relative_confidence=0.02)

    def judge(of: RankResult) -> str | None:
        return judge_run(of, layout=Layout(), sequence_length=64, plan=plan)

    if refused:
        with pytest.raises(ImplausibleMeasurement, match="had run for"):
            judge(result)
        return
    assert judge(result) is None
    with pytest.raises(ImplausibleMeasurement):
        judge(result.model_copy(update={"step_seconds": [2.0, 3.0, 5.41]}))


def test_lines_that_tell_a_whole_multiple_of_their_pace_are_told_of_how_many_steps() -> None:
    for num in (2, 3, 20, 100):
        steps = noisy(0.3)
        reason = judge(run(steps, told=[num * step for step in steps], start=2000.0).result())
        assert reason is not None and f"the time of {num} steps" in reason
    steps = noisy(0.3)
    reason = judge(run(steps, told=[2.5 * step for step in steps], start=600.0).result())
    assert reason is not None and "steps, or lines" not in reason


def test_a_program_of_one_rank_is_not_told_to_write_from_one_rank_alone() -> None:
    steps = noisy(0.3)
    found = run(steps, told=[2.5 * step for step in steps], start=600.0).result()
    several, one = judge(found), judge(found, layout=Layout(micro_batch_size=2, grad_accum_steps=8))
    assert several is not None and several.endswith(", and from one rank alone")
    assert one is not None and one.endswith("(time.perf_counter())")


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1.08, ": the seconds of one optimizer step are wanted"),
        (2.15, ": the time of 2 steps, or lines that 2 ranks write?"),
        (2.35, ": the seconds of one optimizer step are wanted"),
    ],
)
def test_a_factor_within_a_tenth_of_a_whole_number_is_one_of_steps(
    factor: float, said: str
) -> None:
    steps = noisy(0.3, noise=0.001)
    told = run(steps, told=[factor * step for step in steps], start=0.1, teardown=0.0)
    with pytest.raises(ImplausibleMeasurement) as caught:
        judge(told.result())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.999, "999 ms"), (1.0, "1 s"), (1.5, "1.5 s"), (3000.0, "3,000 s")]
)
def test_times_of_a_second_and_more_are_told_in_seconds(seconds: float, said: str) -> None:
    with pytest.raises(ImplausibleMeasurement, match=rf"the program had run for {said}:"):
        judge(RankResult(step_seconds=noisy(3000.0), seen=ProgramSeen(seconds=seconds)))


def test_the_factor_that_is_said_is_the_one_that_was_judged() -> None:
    """Both medians alone are 1.05 apart, and most lines tell less than their time by 1.67 or 2."""
    steps = [1.0, 2.0, 2.0, 1.0, 1.0] * 10
    told = [0.95, 1.0, 1.0, 0.6, 0.95] * 10
    reason = judge(run(steps, told=told).result())
    assert reason is not None
    assert "every 1 s, and say that a step takes 600 ms: 1.7 times less" in reason


def test_so_is_the_factor_of_times_that_are_too_long() -> None:
    """Both medians are alike, and most lines report 1.8 times their time or more."""
    steps = [2.0, 0.5, 0.5, 2.0, 2.0] * 10
    told = [2.0, 0.9, 2.0, 3.8, 3.8] * 10
    reason = judge(run(steps, told=told, start=600.0).result())
    assert reason is not None
    assert "every 2 s, and say that a step takes 3.8 s" in reason


@pytest.mark.parametrize("seconds", [0.03, 0.036, 0.048, 0.064, 0.08, 0.12, 0.2, 0.4])
def test_half_of_a_step_is_seen_in_a_dozen_lines(seconds: float) -> None:
    """With the reads that the rank makes at such steps."""
    for seed in range(20):
        steps = noisy(seconds, 14, seed=seed)
        told = [step / 2 for step in steps]
        half = run(steps, told=told, poll_seconds=poll_seconds(told[:1]))
        reason = judge(half.result())
        assert reason is not None and " times less. " in reason
        assert judge(run(steps, poll_seconds=poll_seconds(steps[:1])).result()) is None


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("poll", [0.2, 0.25])
def test_half_of_a_step_is_seen_where_lines_are_read_late(seconds: float, poll: float) -> None:
    """On a busy machine several lines come with each read, and no window is known well."""
    steps = noisy(seconds, 22, noise=0.1)
    reason = judge(run(steps, told=[step / 2 for step in steps], poll_seconds=poll).result())
    assert reason is not None and " times less. " in reason
    assert judge(run(steps, poll_seconds=poll).result()) is None

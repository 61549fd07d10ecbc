"""Lines that a program writes several at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.core.trial.line_groups import LineGroups, _groups
from orchestrator.core.trial.pace import ToldSteps
from orchestrator.core.trial.plausibility import judge_groups
from orchestrator.core.trial.protocol import LinesRead, ProgramSeen, RankResult
from tests.core.trial.test_plausibility import noisy, run


def held_back(*, step: float, told: float, size: int, num: int = 53) -> RankResult:
    """A program whose clock sees a part of each step, and that flushes its lines now and then."""
    return run(noisy(step, num), told=noisy(told, num, seed=2), buffered=size).result()


@pytest.mark.parametrize("size", [2, 5, 10])
@pytest.mark.parametrize("told", [0.005, 0.03, 0.07])
def test_a_clock_that_does_not_wait_is_found_by_the_time_between_groups(
    size: int, told: float
) -> None:
    reason = judge_groups(held_back(step=0.15, told=told, size=size))
    if size == 10 and told == 0.005:
        # Four groups of lines that could have been written within 45 ms, as so seen by accident.
        assert reason is None or "at a time" in reason
        return
    assert reason is not None and f"{size} at a time, every" in reason
    assert "torch.cuda.synchronize()" in reason and "flush each line" in reason


@pytest.mark.parametrize("size", [1, 2, 5, 10, 1000])
@pytest.mark.parametrize("step", [0.01, 0.15, 3.0])
def test_lines_that_tell_all_of_the_time_between_groups_are_believed(
    size: int, step: float
) -> None:
    assert judge_groups(held_back(step=step, told=step, size=size)) is None


def test_held_back_lines_are_known_by_what_they_tell() -> None:
    """Five steps of 0.15 s cannot end within a look of 0.05 s; five of 2 ms can."""
    groups = LineGroups.of(held_back(step=0.15, told=0.15, size=5))
    assert groups is not None and groups.are_held_back and groups.every is None
    assert groups.num_lines == pytest.approx(5, abs=0.3)
    short = LineGroups.of(held_back(step=0.002, told=0.002, size=1))
    assert short is None or not short.are_held_back


def test_pauses_that_come_less_regularly_than_groups_are_believed() -> None:
    steps = noisy(0.1, 53)
    pauses = [1.0 if number in (3, 11, 12, 30, 41) else 0.0 for number in range(53)]
    assert judge_groups(run(steps, pauses=pauses, buffered=5).result()) is None
    # A single pause does not hide that the other lines report too little time.
    wrong = run(steps, told=noisy(0.01, 53), pauses=[*[0.0] * 20, 9.0, *[0.0] * 32], buffered=5)
    assert judge_groups(wrong.result()) is not None


def test_too_few_groups_show_nothing() -> None:
    assert judge_groups(held_back(step=0.15, told=0.03, size=5, num=20)) is None
    assert judge_groups(held_back(step=0.15, told=0.03, size=5, num=22)) is not None


def test_what_was_not_seen_is_not_judged() -> None:
    assert judge_groups(RankResult(step_seconds=[0.5] * 9)) is None
    assert judge_groups(RankResult(step_seconds=[0.5] * 9, seen=ProgramSeen(seconds=9.0))) is None
    assert LineGroups.of(_with_reads(500)) is None, "some reads were forgotten"


def _with_reads(num: int) -> RankResult:
    def reads() -> Sequence[LinesRead]:
        return [
            LinesRead(after=place - 0.05, at=float(place), num_steps=2 * place)
            for place in range(1, num + 1)
        ]

    return RankResult(
        step_seconds=[0.1] * (2 * num), seen=ProgramSeen(seconds=num + 1, reads=list(reads()))
    )


def groups_of(
    lines: Sequence[int], *, told: float, gaps: Sequence[float] | None = None
) -> LineGroups | None:
    """The groups of a program that writes so many lines at once, a second after the others.

    It is looked at 0.05 s before they are seen. The first lines begin the first group.
    """
    at, num, reads = 0.0, 0, []
    for gap, more in zip(gaps or [1.0] * len(lines), lines, strict=True):
        at, num = at + gap, num + more
        reads.append(LinesRead(after=at - 0.05, at=at, num_steps=num))
    return LineGroups.of(
        RankResult(step_seconds=[told] * num, seen=ProgramSeen(seconds=at, reads=reads))
    )


def test_groups_have_their_interval_and_what_their_lines_report() -> None:
    found = groups_of([5] * 10, told=0.1)
    assert found is not None
    assert (found.are_held_back, found.num_lines) == (True, 5)
    assert (found.every, found.told) == pytest.approx((1.0, 0.5))


@pytest.mark.parametrize(("num", "most"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_quarter_of_the_intervals_may_have_pauses(num: int, most: int) -> None:
    for pauses in (most, most + 1):
        gaps = [1.0] + [10.0] * pauses + [1.0] * (num - pauses)
        found = groups_of([5] * (num + 1), told=0.1, gaps=gaps)
        assert found is not None
        if pauses == most:
            assert found.every == pytest.approx((num + 9 * pauses) / num)
        else:
            assert found.every is None


def test_intervals_of_which_some_are_twice_as_long_are_not_regular() -> None:
    found = groups_of([5] * 9, told=0.1, gaps=[1.0, *[1.0, 2.4] * 4])
    assert found is not None and found.every is None


@pytest.mark.parametrize(
    ("told", "is_held_back"),
    # The second line of a pair ends with the first in a look of 0.05 s by chance; twice.
    [(0.03, False), (0.038, False), (0.04, True), (0.06, True)],
)
def test_lines_are_held_back_if_chance_explains_them_in_less_than_one_of_twenty(
    told: float, *, is_held_back: bool
) -> None:
    found = groups_of([2, 2, 2], told=told)
    assert found is not None and found.are_held_back is is_held_back


@pytest.mark.parametrize(("num_single", "is_judged"), [(8, True), (9, False)])
def test_half_of_the_lines_come_in_groups_or_nothing_is_judged(
    num_single: int, *, is_judged: bool
) -> None:
    found = groups_of([1, *[2] * 4, *[1] * num_single], told=0.001)
    assert (found is not None) is is_judged


@pytest.mark.parametrize(
    ("sizes", "is_judged"), [([2, 2, 2, 2], True), ([2, 3, 2, 3], True), ([3, 3, 3, 3], False)]
)
def test_times_after_at_most_two_and_a_half_lines_are_part_of_a_step(
    sizes: list[int], *, is_judged: bool
) -> None:
    """Lines that may come together by chance: a pause after every third of them is believed."""
    gaps = [1.0, *[size / 2 for size in sizes]]
    found = groups_of([1, *sizes], told=0.001, gaps=gaps)
    assert found is not None and not found.are_held_back
    assert (found.every is not None) is is_judged


def test_reads_that_follow_each_other_are_one_group() -> None:
    """The first of these has lines in two reads: the next comes a second after the last."""
    ends = [(0.95, 1.0), (1.0, 1.05), *[(place + 1.0, place + 1.05) for place in range(1, 5)]]
    reads = [
        LinesRead(after=after, at=at, num_steps=5 * (place + 1))
        for place, (after, at) in enumerate(ends)
    ]
    result = RankResult(step_seconds=[0.1] * 30, seen=ProgramSeen(seconds=9.0, reads=reads))
    found = LineGroups.of(result)
    assert found is not None and found.every == pytest.approx(1.0)


def test_of_more_than_400_reads_some_are_left_out() -> None:
    assert LineGroups.of(_with_reads(400)) is not None
    assert LineGroups.of(_with_reads(401)) is None


def test_a_group_is_between_the_looks_before_and_after_it() -> None:
    """Looks of 0.1 s; nine lines of 0.1 s each, and a last one of 0.3 s."""
    looks = [(0.9, 2), (1.0, 4), (3.0, 5), (3.1, 8), (3.2, 9), (6.0, 10)]
    reads = [LinesRead(after=after, at=after + 0.1, num_steps=num) for after, num in looks]
    told = ToldSteps(seconds=[0.1] * 9 + [0.3], median=0.1, are_lines=True, every=1)
    second, third = _groups(reads, told)
    # From the last look at one group to the first at the next, or the other way round.
    assert (second.least, second.most) == pytest.approx((3.0 - 1.1, 3.3 - 1.0))
    assert (third.least, third.most) == pytest.approx((6.0 - 3.3, 6.1 - 3.2))
    assert (second.num_lines, second.in_one_read) == (5, False)
    assert (third.num_lines, third.in_one_read) == (1, True)
    assert (second.told, third.told) == pytest.approx((0.5, 0.3))
    # Four more lines of 0.1 s do not fit into one look; a single line does.
    assert (second.chance, third.chance) == (0.0, 1.0)

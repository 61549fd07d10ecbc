"""A counter that begins again, as in each epoch, and steps that several ranks print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workloads.command.known_steps import KnownSteps

STEP = 0.1


def new_of(
    reads: Iterable[tuple[float, Sequence[int]]], *, several_ranks: bool = False
) -> list[int]:
    """Return the numbers that count as new steps. A read: its time, the numbers of its lines."""
    known = KnownSteps(several_ranks=several_ranks, began=0.0)
    found = []
    for at, numbers in reads:
        known.begin_read(at)
        found += [number for number in numbers if known.is_new(number, STEP)]
    return found


def one_by_one(numbers: Sequence[int], *, start: float = 1.0) -> list[tuple[float, Sequence[int]]]:
    return [(start + STEP * place, [number]) for place, number in enumerate(numbers, start=1)]


def test_a_counter_of_the_steps_in_an_epoch_begins_again() -> None:
    numbers = [*range(1, 9), *range(1, 9), *range(1, 4)]
    assert new_of(one_by_one(numbers)) == numbers
    assert new_of(one_by_one(numbers), several_ranks=True) == numbers


def test_lines_that_a_buffer_holds_over_the_end_of_an_epoch_are_further_steps() -> None:
    numbers = [*range(1, 21), *range(1, 21)]
    reads = [(1.0 + 1.5 * STEP * 10 * i, numbers[10 * i - 10 : 10 * i]) for i in range(1, 5)]
    reads[1:3] = [(reads[2][0], numbers[10:30])]
    assert new_of(reads) == numbers
    assert new_of([(9.0, numbers)]) == numbers, "all at the end"


def test_ranks_that_each_print_a_step_tell_it_once() -> None:
    reads = [
        (1.0 + STEP * step + 0.01 * rank, [step]) for step in range(1, 30) for rank in range(4)
    ]
    assert new_of(reads, several_ranks=True) == [*range(1, 30)]
    # A rank that is two steps behind the others.
    late = [(1.0 + STEP * step, [step, max(1, step - 2)]) for step in range(1, 30)]
    assert new_of(late, several_ranks=True) == [*range(1, 30)]


def test_the_buffer_of_another_rank_is_no_new_epoch() -> None:
    """Its lines come long after the first rank's, and in no time."""
    numbers = [*range(1, 101)]
    reads = [(11.0, numbers), (11.0 + 2 * STEP, numbers), (21.0, [*range(101, 201)])]
    found = new_of(reads, several_ranks=True)
    # Two of them took as long as they tell.
    assert len(found) - 200 <= 3 and found[-100:] == [*range(101, 201)]
    assert new_of([(11.0, numbers * 2)], several_ranks=True) == numbers


def test_a_step_that_is_printed_again_is_known() -> None:
    assert new_of(one_by_one([1, 2, 2, 3, 3, 2, 4])) == [1, 2, 3, 4]
    assert new_of(one_by_one([3, 4, 1])) == [3, 4], "nothing begins again after two steps"


def test_what_is_no_number_is_no_known_step() -> None:
    known = KnownSteps(several_ranks=True, began=0.0)
    known.begin_read(1.0)
    assert [known.is_new(one, STEP) for one in (None, None, True, "7")] == [True] * 4

"""What a rank reports of its profile: times and shares of a step, by arithmetic."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment, ProfilePlan, RankProfile
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part, Split
from tests.core.trial.rank_profiles import rank_profile

PARTS = {Part.EXPOSED_TP: 100_000, Part.BUBBLE: 50_000, Part.IDLE: 150_000, Part.OPTIMIZER: 200_000}


def test_a_step_is_the_window_over_the_number_of_steps() -> None:
    assert rank_profile(num_steps=4).step_seconds == 1_000_000 / 4 / 1e9


def test_a_share_is_that_of_the_whole_window() -> None:
    profile = rank_profile(PARTS)
    assert profile.share(Part.EXPOSED_TP) == pytest.approx(0.1)
    assert profile.share(Part.EXPOSED_TP, Part.OPTIMIZER) == pytest.approx(0.3)
    assert profile.share() == 0
    empty = rank_profile(window_nanoseconds=0, parts=dict.fromkeys(Part, 0))
    assert empty.share(Part.MATMUL) == 0


def test_a_rank_works_while_it_neither_communicates_exposed_nor_waits_in_the_bubble() -> None:
    assert rank_profile(PARTS).working_share == pytest.approx(1 - 0.1 - 0.05)


def test_a_rank_computes_in_products_and_optimizer_but_not_while_it_waits() -> None:
    assert rank_profile(PARTS).computing_nanoseconds == 1_000_000 - 100_000 - 50_000 - 150_000


def test_a_moment_holds_up_to_a_pebibyte_of_each_kind() -> None:
    def moment(num_bytes: int) -> MemoryMoment:
        kind, part = next(iter(MemoryKind)), next(iter(StepPart))
        return MemoryMoment(step=1, part=part, num_bytes={kind: num_bytes})

    assert moment(2**50).total == 2**50
    with pytest.raises(ValidationError):
        moment(2**50 + 1)


_MOMENT = {"step": 1, "part": "forward", "num_bytes": {}}


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("num_steps", [1], [0]),
        ("overlapped", [{"dp": 10**17}], [{"dp": -1}, {"dp": 10**17 + 1}]),
        (
            "unknown",
            [{"x" * 200: 0}, dict.fromkeys("abcdefghij", 1)],
            [{"x" * 201: 0}, dict.fromkeys("abcdefghijk", 1)],
        ),
        ("num_kernels", [0], [-1]),
        ("median_kernel_nanoseconds", [None, 0, 10**17], [-1, 10**17 + 1]),
        ("host_nanoseconds", [None, 0, 10**17], [-1, 10**17 + 1]),
        ("plain_step_seconds", [None, 0.0, 1e7], [-0.1, 1.1e7]),
        ("trace_path", [None, "x" * 4000], ["x" * 4001]),
        ("memory", [[_MOMENT] * 72], [[_MOMENT] * 73, [_MOMENT | {"step": 0}]]),
    ],
)
def test_a_report_is_taken_up_to_its_bounds(
    name: str, taken: list[object], refused: list[object]
) -> None:
    for value in taken:
        assert rank_profile(**{name: value}).model_dump(mode="json")[name] == value
    for value in refused:
        with pytest.raises(ValidationError, match=name):
            rank_profile(**{name: value})


def test_a_profile_is_of_three_steps_and_of_at_most_a_thousand() -> None:
    assert ProfilePlan() == ProfilePlan(num_steps=3, memory=False, ranks=())
    assert [ProfilePlan(num_steps=num).num_steps for num in (1, 1000)] == [1, 1000]
    for num in (0, 1001):
        with pytest.raises(ValidationError):
            ProfilePlan(num_steps=num)
    profile = rank_profile()
    assert (profile.is_compiled, profile.is_slowest) == (False, False)


def test_parts_that_do_not_add_up_to_the_steps_are_refused() -> None:
    parts = dict.fromkeys(Part, 0) | {Part.MATMUL: 999_999}
    with pytest.raises(ValidationError, match="add up to 999999 ns, and the steps took 1000000 ns"):
        rank_profile(parts=parts)


def test_a_report_of_a_split_names_unknown_kernels_by_200_characters() -> None:
    found = RankProfile.of(
        Split(
            window=10,
            num_steps=2,
            parts=dict.fromkeys(Part, 0) | {Part.UNKNOWN: 10},
            overlapped={Axis.DP: 3},
            unknown=[("x" * 300, 10)],
            num_kernels=1,
            median_kernel=10,
            is_on_device=True,
            host=None,
            attention=None,
            is_compiled=True,
        ),
        is_slowest=True,
    )
    assert found.unknown == {"x" * 200: 10}
    assert (found.step_seconds, found.is_compiled, found.is_slowest) == (5e-9, True, True)

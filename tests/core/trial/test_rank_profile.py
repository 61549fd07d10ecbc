"""What a rank reports of its profile: times and shares of a step, by arithmetic."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part
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

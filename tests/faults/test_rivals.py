"""Two orchestrators want one sweep: one works, the other ends with 5 and writes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.fresh_stores import Fresh
from tests.faults.rivals import HELD, pauses, races

pytestmark = pytest.mark.timeout(900)

NUM_RACES = 3
NUM_REPLACED = 2
# Some stop before their start or after their end; `make chaos` has 1,000 pauses and 40 races.
MOST_PAUSES = 40


def test_of_several_that_begin_at_once_one_works_and_the_others_end_with_5(
    fresh: Fresh, tmp_path: Path
) -> None:
    found = races(fresh, tmp_path, count=NUM_RACES)
    assert found.complaints == []
    assert all(HELD in codes for codes in found.exits), found.exits


def test_an_orchestrator_that_slept_past_its_lease_is_replaced_and_writes_nothing_more(
    fresh: Fresh, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    found = pauses(fresh, tmp_path, count=MOST_PAUSES, seed=seed, enough=NUM_REPLACED)
    assert found.complaints == []
    assert found.replaced >= NUM_REPLACED, found.exits
    assert found.acknowledged > 0

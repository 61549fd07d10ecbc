"""A program that dies while it makes or upgrades a store: the next one finds it usable, with all that was in it.

At any statement on SQLite; on PostgreSQL, where that takes longer, at one of three, others each time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)

MOST_SECONDS = 380.0
EVERY = {"sqlite": 1, "postgresql": 3}


@pytest.mark.parametrize(
    ("play", "least"),
    [
        ("making", 20),  # of a dozen tables and views
        ("upgrade", 10),
    ],
)
def test_a_store_whose_making_or_upgrade_was_cut_short_is_finished_by_the_next(
    play: str, least: int, store_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    every = EVERY[request.node.callspec.params["store_url"]]
    first = random.SystemRandom().randrange(every)
    deaths = programs.told("tests.faults.deaths", play, store_url, str(tmp_path), str(first), str(every), seconds=MOST_SECONDS)
    print(f"from statement {first}, at every {every}: {deaths['num_points']} deaths")
    assert deaths["complaints"] == []
    assert deaths["num_points"] >= least / every

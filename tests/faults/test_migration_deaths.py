"""A program dies at any statement of a migration: the next one finds a usable store.

A test run takes one of EVERY statements, from a random one on; `make chaos` takes them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.both_databases import POSTGRESQL_IS_LONG
from tests.faults.deaths import some_points

pytestmark = pytest.mark.timeout(900)

MOST_SECONDS = 380.0
EVERY = 8


@POSTGRESQL_IS_LONG
@pytest.mark.parametrize(
    ("play", "least"),
    [
        ("making", 100 // EVERY),  # of a dozen tables and views
        ("upgrade", 50 // EVERY),
    ],
)
def test_a_store_whose_making_or_upgrade_was_cut_short_is_finished_by_the_next(
    play: str, least: int, store_url: str, tmp_path: Path
) -> None:
    points = some_points(EVERY)
    deaths = programs.told(
        "tests.faults.deaths", play, store_url, str(tmp_path), *points, seconds=MOST_SECONDS
    )
    assert deaths["complaints"] == []
    assert deaths["num_points"] > least

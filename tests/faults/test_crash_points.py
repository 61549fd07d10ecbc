"""An orchestrator dies at any of its statements: the same command continues without a loss.

A test run takes one of EVERY statements, from a random one on; `make chaos` takes them all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.faults.deaths import some_points
from tests.faults.faulty_nodes import AMONG_FAULTY_NODES

pytestmark = pytest.mark.timeout(900)  # 10 s on idle cores

MOST_SECONDS = 580.0
EVERY = 20


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_a_death_at_any_statement_loses_nothing_and_doubles_nothing(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The play has one of the cells; `make chaos` dies in both, at every statement."""
    url = "sqlite" if database == "sqlite" else request.getfixturevalue("postgresql_server")
    deaths = _died("one-cell", url, tmp_path, every=EVERY)
    # 5 launched trials, a retry and a repeat have 20 statements and more each; on PostgreSQL some
    # others hold the sweep.
    assert deaths["num_points"] > (140 if database == "sqlite" else 150) // EVERY
    assert (
        deaths["num_acknowledged"] > deaths["num_points"]
    )  # otherwise nothing could have been lost


@pytest.mark.long
def test_a_death_in_the_middle_of_what_is_written_of_nodes_or_taken_from_a_spool_loses_nothing(
    tmp_path: Path,
) -> None:
    """One of its nodes never answers, one is slow and gets benched, and an earlier orchestrator
    died with an end in its spool. On PostgreSQL: `make chaos`.
    """
    deaths = _died("sick-nodes", "sqlite", tmp_path, every=3)
    # Each method has three points or more: before a statement, before a commit, after it.
    assert set(deaths["within"]) == set(AMONG_FAULTY_NODES.methods), "each of them was died in"


def _died(play: str, url: str, folder: Path, *, every: int) -> dict[str, Any]:
    points = some_points(every)
    deaths = programs.told(
        "tests.faults.deaths", play, url, str(folder), *points, seconds=MOST_SECONDS
    )
    print(
        f"every {points[0]} from {points[1]}: {deaths['num_points']} points,"
        f" {deaths['num_acknowledged']} results acknowledged "
        f"before a death; {deaths['within']}"
    )
    assert deaths["complaints"] == []
    return deaths

"""An orchestrator that dies at any one of its statements: the same command goes on, and nothing is lost, doubled or stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import small_sweep
from tests.faults.crash_points import Fresh, die_everywhere, fresh_sqlite, small_play
from tests.faults.sick_nodes import AMONG_SICK_NODES

pytestmark = pytest.mark.timeout(600)  # a quarter of a minute where nobody else uses the cores


def test_a_death_at_any_statement_loses_nothing_and_doubles_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """Of one of the cells; `make chaos` dies in both."""
    deaths = die_everywhere(small_play(small_sweep.spec(gpus=[1]), num_trials=6), fresh=fresh, folder=tmp_path)
    print(f"{deaths.num_points} points, {deaths.num_acknowledged} results acknowledged before a death")
    assert deaths.complaints == []
    assert deaths.num_points > 150  # of 5 launched trials, a retry and a repeat, with 20 statements and more each
    assert deaths.num_acknowledged > deaths.num_points  # otherwise nothing could have been lost


def test_a_death_in_the_middle_of_what_is_written_of_nodes_or_taken_from_a_spool_loses_nothing(tmp_path: Path) -> None:
    """One of its nodes never answers, one is slow and gets benched, and an earlier orchestrator died with an end in its spool. On PostgreSQL: `make chaos`."""
    deaths = die_everywhere(AMONG_SICK_NODES, fresh=fresh_sqlite(tmp_path), folder=tmp_path)
    print(f"{deaths.num_points} points: {dict(deaths.within)}")
    assert deaths.complaints == []
    assert set(deaths.within) == set(AMONG_SICK_NODES.within), "each of them was died in"
    assert min(deaths.within.values()) >= 3  # a statement, and its commit before and after

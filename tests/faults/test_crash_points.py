"""An orchestrator that dies at any one of its statements: the same command goes on, and nothing is lost, doubled or stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import small_sweep
from tests.faults.crash_points import Fresh, die_everywhere

pytestmark = pytest.mark.timeout(600)  # half a minute where nobody else uses the cores


def test_a_death_at_any_statement_loses_nothing_and_doubles_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """Of one of the cells; `make chaos` dies in both."""
    deaths = die_everywhere(small_sweep.spec(gpus=[1]), num_trials=6, fresh=fresh, folder=tmp_path)
    print(f"{deaths.num_points} points, {deaths.num_acknowledged} results acknowledged before a death")
    assert deaths.complaints == []
    assert deaths.num_points > 150  # of 5 launched trials, a retry and a repeat, with 25 statements and more each
    assert deaths.num_acknowledged > deaths.num_points  # otherwise nothing could have been lost

"""An orchestrator that dies at any one of its statements: the same command goes on, and nothing is lost, doubled or stuck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import small_sweep
from tests.faults.crash_points import Fresh, die_everywhere

pytestmark = pytest.mark.timeout(600)  # a quarter of a minute where nobody else uses the cores

# Four layouts in which every ending occurs once: measured, measured at the second attempt, failed, out of memory.
OF = small_sweep.spec(gpus=[1], axes={"micro_batch_size": [1, 2], "recompute": ["none", "full"]})
NUM_TRIALS = 4


def test_a_death_at_any_statement_loses_nothing_and_doubles_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """`make chaos` dies in all of twelve trials."""
    deaths = die_everywhere(OF, num_trials=NUM_TRIALS, fresh=fresh, folder=tmp_path)
    print(f"{deaths.num_points} points, {deaths.num_acknowledged} results acknowledged before a death")
    assert deaths.complaints == []
    assert deaths.num_points > 120  # of 4 launched trials, a retry and a repeat, with 20 statements and more each
    assert deaths.num_acknowledged > deaths.num_points  # otherwise nothing could have been lost

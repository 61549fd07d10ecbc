"""Two dozen random kills, some of every kind: nothing is lost, doubled or left over."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests import programs
from tests.both_databases import POSTGRESQL_IS_LONG
from tests.faults.campaign import LEVELS, outcome_of

pytestmark = pytest.mark.timeout(600)

# Enough for each kind, and some more; `make chaos` has 5,000.
KILLS = {"sqlite": 14, "postgresql": 10}
# On a busy machine; both together take 10 s on an idle one.
MOST_SECONDS = 450.0
ENDING_SECONDS = 300.0  # for the last sweep, and judging


@POSTGRESQL_IS_LONG
def test_kills_at_random_lose_nothing_double_nothing_and_leave_nobody(
    store_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    kills = KILLS[request.node.callspec.params["store_url"]]
    arguments = [store_url, str(tmp_path), str(seed), str(kills), str(MOST_SECONDS)]
    out = outcome_of(
        programs.told("tests.faults.campaign", *arguments, seconds=MOST_SECONDS + ENDING_SECONDS)
    )
    print(json.dumps(out.as_json()))
    assert out.complaints == []
    assert (out.lost, out.duplicated, out.stuck, out.broken, out.leaked_processes) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert out.acknowledged > 0 and out.kills >= kills and set(out.victims) == set(LEVELS), (
        "the machine is too busy to say anything"
    )
    assert out.slowest_takeover_seconds <= 30.0

"""A few kills around programs with daemons: no process is left. `make chaos` does hundreds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import programs
from tests.faults import stubborn
from tests.faults.campaign import outcome_of
from tests.faults.evidence import alive
from tests.faults.program_kills import ProgramCampaign

pytestmark = pytest.mark.timeout(600)

# Enough for each kind; on Ray, for the orchestrator and the raylet.
KILLS, RAY_KILLS = 8, 2
MOST_SECONDS = 200.0
ENDING_SECONDS = 300.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "kills"), [("agents", KILLS), pytest.param("ray", RAY_KILLS, marks=pytest.mark.ray)]
)
def test_kills_around_programs_that_leave_daemons_behind_leave_nobody(
    tmp_path: Path, sqlite_url: str, where: str, kills: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    arguments = [where, sqlite_url, str(tmp_path), str(seed), str(kills), str(MOST_SECONDS)]
    out = outcome_of(
        programs.told(
            "tests.faults.program_kills", *arguments, seconds=MOST_SECONDS + ENDING_SECONDS
        )
    )
    print(out.as_json())
    assert out.complaints == []
    assert (out.lost, out.duplicated, out.stuck, out.broken, out.leaked_processes) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert out.looks > 0 and sum(out.victims.values()) >= kills
    if where == "agents":
        assert set(out.victims) == set(ProgramCampaign.VICTIMS)


def test_the_campaign_sees_what_shows_no_sign_of_whose_it_is(tmp_path: Path) -> None:
    """Daemons without environment or parent are found by what they wrote and have open."""
    evidence = tmp_path / "evidence"
    environment = os.environ | {
        stubborn.THEN_VARIABLE: "end",
        "SWEEP_METRICS_FILE": str(tmp_path / "metrics"),
        "SWEEP_NUM_STEPS": "1",
    }
    subprocess.run(
        [sys.executable, stubborn.__file__, str(evidence), "emptied", "stopped"],
        env=environment,
        check=True,
    )
    until = time.monotonic() + 60.0
    while {who.split()[0] for who in alive([evidence])} != {"emptied", "stopped"}:
        assert time.monotonic() < until
        time.sleep(0.02)
    told = evidence.read_text()
    evidence.write_text("")
    found = alive([evidence])
    assert {who.split()[0] for who in found} == {"unknown"} and len(found) == 2
    evidence.write_text(told)
    for who in alive([evidence]):
        os.kill(int(who.split()[1]), 9)
    while alive([evidence]):
        assert time.monotonic() < until

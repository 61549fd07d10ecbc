"""A few kills on a real Ray cluster, and of its head. `make chaos` does hundreds."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from orchestrator.node.processes import start_time
from tests.faults.ray_kills import code_within, running
from tests.programs import told

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NUM_KILLS, MOST_SECONDS = 2, 60.0


@pytest.mark.long
def test_kills_on_ray_and_the_loss_of_its_head_lose_nothing(
    tmp_path: Path, sqlite_url: str
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    arguments = [sqlite_url, str(tmp_path), str(seed), str(NUM_KILLS), str(MOST_SECONDS)]
    out = told("tests.faults.ray_kills", *arguments, seconds=550)
    print(out)
    assert out["complaints"] == []
    assert out["victims"]["head"] == 1
    assert (out["lost"], out["duplicated"], out["stuck"], out["leaked_processes"]) == (0, 0, 0, 0)


def test_an_orchestrator_that_goes_on_beyond_its_time_is_ended(tmp_path: Path) -> None:
    with running(
        [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "said.txt"
    ) as process:
        assert code_within(0.2, process) is None
        assert start_time(process.pid) is not None
    assert start_time(process.pid) is None

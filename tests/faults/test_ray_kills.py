"""A kill on a real Ray cluster, and that of its head: the call ends in time, and the next one goes on. Hundreds in `make chaos`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NUM_KILLS, MOST_SECONDS = 1, 30.0


def test_kills_on_ray_and_the_loss_of_its_head_lose_nothing(tmp_path: Path, sqlite_url: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    arguments = [sqlite_url, str(tmp_path), str(seed), str(NUM_KILLS), str(MOST_SECONDS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.ray_kills", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert "OUT " in done.stdout, done.stderr[-4000:]
    out = json.loads(done.stdout.split("OUT ", 1)[1])
    print(out)
    assert out["complaints"] == []
    assert out["victims"]["head"] == 1
    assert (out["lost"], out["duplicated"], out["stuck"], out["leaked_processes"]) == (0, 0, 0, 0)

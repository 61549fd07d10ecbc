"""A few kills on a real Ray cluster, and at last of its head: the call ends in time, and the next one goes on. Hundreds in `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.programs import told

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NUM_KILLS, MOST_SECONDS = 3, 60.0


def test_kills_on_ray_and_the_loss_of_its_head_lose_nothing(tmp_path: Path, sqlite_url: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    arguments = [sqlite_url, str(tmp_path), str(seed), str(NUM_KILLS), str(MOST_SECONDS)]
    out = told("tests.faults.ray_kills", *arguments, seconds=550)
    print(out)
    assert out["complaints"] == []
    assert out["victims"]["head"] == 1
    assert (out["lost"], out["duplicated"], out["stuck"], out["leaked_processes"]) == (0, 0, 0, 0)

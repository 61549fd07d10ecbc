"""How a campaign of kills on Ray ends what goes on beyond its time. The kills are part of `make chaos`: a cluster of three nodes that comes and goes takes a minute of a core."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.processes import start_time
from tests.faults.ray_kills import code_within, running


def test_an_orchestrator_that_goes_on_beyond_its_time_is_ended(tmp_path: Path) -> None:
    with running([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "said.txt") as process:
        assert code_within(0.2, process) is None
        assert start_time(process.pid) is not None
    assert start_time(process.pid) is None

"""Lines are read late on a busy machine; the phases are still those of the program."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from orchestrator.core.trial.protocol import Phase
from tests.node.launching import order
from workloads.command.metrics import Metrics
from workloads.rank import Rank

AGE = 100.0  # of the program, in seconds


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    request = order("workloads.command", trial_id=1, world_size=1, options={"argv": ["x"]}).request
    rank = Rank(
        request=request, rank=0, local_rank=0, world_size=1, local_world_size=1, run_dir=tmp_path
    )
    rank.heartbeat(Phase.FIRST_STEP)
    return Metrics(tmp_path / "metrics.jsonl", rank, began=time.monotonic() - AGE)


def write(metrics: Metrics, *step_seconds: float, ago: float = 0.0) -> None:
    """Append lines that the program wrote so many seconds ago."""
    with metrics.file.path.open("a") as file:
        file.writelines(json.dumps({"step_seconds": seconds}) + "\n" for seconds in step_seconds)
    written_at = time.time() - ago
    os.utime(metrics.file.path, (written_at, written_at))


def test_lines_that_are_read_late_count_from_when_they_were_written(metrics: Metrics) -> None:
    write(metrics, 10.0, 10.0, 10.0, ago=30.0)
    metrics.read()
    phases = metrics.phase_seconds()
    assert phases[Phase.STEADY] == pytest.approx(20.0, abs=1.0)
    assert phases[Phase.TEARDOWN] == pytest.approx(30.0, abs=1.0)


def test_no_line_was_written_before_the_read_that_did_not_see_it(metrics: Metrics) -> None:
    metrics.read()
    before = time.monotonic()
    # Lines with another clock, and with steps that cannot be so long.
    write(metrics, 9.0, 9.0, ago=3600.0)
    metrics.read()
    phases = metrics.phase_seconds()
    assert phases[Phase.STEADY] + phases[Phase.TEARDOWN] <= time.monotonic() - before + 0.01


def test_a_file_of_a_clock_that_is_ahead_was_written_when_it_was_read(metrics: Metrics) -> None:
    before = time.monotonic()
    write(metrics, 0.01, ago=-3600.0)
    metrics.read()
    assert 0 <= metrics.phase_seconds()[Phase.TEARDOWN] <= time.monotonic() - before


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ([{"step": 2}, {"step": 3, "loss": "nan"}], 3),
        ([{"iteration": 0, "loss": "nan"}], 0),
        ([{"step": 2}, {"step": 10**400, "loss": "nan"}], 2),
        ([{}, {"loss": "nan"}], 2),
    ],
    ids=["its own", "from 0", "no number", "none"],
)
def test_a_loss_that_is_not_finite_is_of_the_step_that_the_program_numbers(
    metrics: Metrics, lines: list[dict[str, object]], step: int
) -> None:
    text = "".join(json.dumps({"step_seconds": 0.5} | line) + "\n" for line in lines)
    metrics.file.path.write_text(text)
    metrics.read()
    assert f"the loss of step {step} is nan" in str(metrics.diverged)

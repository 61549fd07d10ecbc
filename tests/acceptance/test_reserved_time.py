"""Every reserved GPU-second is accounted for, and budgets of GPU time end a sweep.

After a `kill -9`: test_killed_midway.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.accounts import GANG, RESERVE_SECONDS, reserved, sessions, status
from tests.acceptance.command import Command, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 30.0}}  # 0.2 to 2 s a trial
EIGHT = {
    "micro_batch_size": [1, 8],
    "recompute": ["none", "full"],
    "zero_stage": [0, 1],
}  # as many layouts


@pytest.mark.long
def test_what_a_sweep_reserved_adds_up_to_the_time_of_its_gang(
    command: Command, tmp_path: Path
) -> None:
    command.ok("run", write_sweep(tmp_path, workload=SLOW, axes=EIGHT))
    (session,) = sessions(command)
    said = status(command)
    parts = reserved(command)
    assert parts.reserved == pytest.approx(said["gpu_seconds"])
    # The lease began after the first attempt was stored, existed when the last one ended, and was
    # over before the session was.
    assert (
        session.least_reserved(session.last_attempt_ended_at)
        <= parts.reserved
        <= session.most_reserved(session.ended_at)
    )
    assert parts.failed == parts.out_of_memory == parts.lost == parts.under_way == 0.0
    assert min(parts.useful, parts.warmup, parts.startup, parts.idle) > 0.0
    # Timed steps really slept: what they are counted for is what the samples say.
    slept = sum(sum(samples) for (samples,) in _samples(command))
    assert parts.useful == pytest.approx(GANG * slept, rel=1e-6)
    opened = (session.ended_at - session.started_at).total_seconds() * session.num_gpus
    assert parts.reserved <= session.capacity <= opened
    assert said["capacity_gpu_seconds"] == session.capacity


def _samples(command: Command) -> list[list[list[float]]]:
    return [
        [json.loads(value) if isinstance(value, str) else value]
        for (value,) in command.sql("SELECT step_seconds FROM measurement")
    ]


@pytest.mark.long
def test_a_spent_budget_of_money_ends_the_sweep_and_the_next_call_says_so(
    command: Command, tmp_path: Path
) -> None:
    file = write_sweep(
        tmp_path,
        workload=SLOW,
        price_per_gpu_hour=3600.0,
        search={"max_cost": 12.0, "confirm": {"repeats": 0}},
    )  # $1 a second
    done = command.ok("run", file)
    assert "max_cost reached" in done.stderr
    said = status(command)
    longest = max(row[0] for row in command.sql("SELECT max(gpu_seconds) FROM attempt"))
    # And the end of Ray, as long as it is leased.
    assert (
        12.0 - longest - GANG * RESERVE_SECONDS <= said["dollars"] <= 12.0 + longest + GANG * 15.0
    )
    assert 0 < sum(said["num_trials"].values()) < 16
    again = command.here.ok("run", file)
    assert "max_cost reached" in again.stderr
    assert "Ray" not in again.stderr
    cost = command.here.json("plan", file)["cost"]
    assert (cost["budget_limit"], cost["num_trials"]) == (
        "max_cost",
        16 - said["num_trials"]["measured"],
    )  # what is left
    assert cost["budget_gpu_hours_left"] == pytest.approx(max((12.0 - said["dollars"]) / 3600, 0.0))
    assert "search.max_cost leaves" in command.here.ok("plan", file).stdout

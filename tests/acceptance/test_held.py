"""Every GPU-second between the first gang and the end of the command is accounted for, also over a `kill -9`; and budgets of it end a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.core.held import HeldGpuSeconds
from orchestrator.sweep import POLL_SECONDS, RENEW_SECONDS
from tests.acceptance.command import Command, write_sweep
from tests.acceptance.test_killed_midway import measured

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

SLOW = {"name": "synthetic", "options": {"sleep": True, "time_scale": 30.0}}  # 0.2 to 2 s a trial
EIGHT = {"micro_batch_size": [1, 8], "recompute": ["none", "full"], "zero_stage": [0, 1]}  # as many layouts
GANG = 2  # slots of every gang of the sweep: one lease from the first trial to the end
RESERVE_SECONDS = 2.0  # from the row of the first attempt to Ray's reservation: its back-off is a second, and this machine may be busy
UNSEEN_SECONDS = RENEW_SECONDS + POLL_SECONDS + 0.5  # between two renewals: what a kill leaves uncounted

BETWEEN_SECONDS = 1.0  # idle between trials since the last renewal, of which a kill leaves nothing: some 30 ms a trial


@dataclass(frozen=True)
class Session:
    """One call, by the database's clock."""

    started_at: datetime
    first_attempt_at: datetime
    last_attempt_ended_at: datetime
    ended_at: datetime
    num_gpus: int
    capacity: float


def sessions(command: Command) -> list[Session]:
    rows = command.sql(
        "SELECT session.started_at, min(attempt.started_at), max(attempt.ended_at), session.ended_at, session.num_gpus, session.capacity_gpu_seconds"
        " FROM session JOIN attempt ON attempt.epoch = session.epoch GROUP BY session.id ORDER BY session.id",
    )
    return [Session(*(_utc(moment) for moment in row[:4]), num_gpus=row[4], capacity=row[5]) for row in rows]


def _utc(moment: str | datetime) -> datetime:
    found = datetime.fromisoformat(str(moment))
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def status(command: Command) -> Any:
    return command.json("status", "t")["sweeps"][0]


def test_what_a_sweep_held_adds_up_to_the_time_of_its_gang(command: Command, tmp_path: Path) -> None:
    command.ok("run", write_sweep(tmp_path, workload=SLOW, axes=EIGHT))
    (session,) = sessions(command)
    said = status(command)
    parts = HeldGpuSeconds(**said["gpu_seconds_by_part"])
    assert parts.held == pytest.approx(said["gpu_seconds"])
    # The lease began after the first attempt was written down, was there when the last one ended, and was over before the session was.
    least = (session.last_attempt_ended_at - session.first_attempt_at).total_seconds() - RESERVE_SECONDS
    most = (session.ended_at - session.first_attempt_at).total_seconds()
    assert GANG * least <= parts.held <= GANG * most
    assert parts.failed == parts.out_of_memory == parts.lost == parts.in_flight == 0.0
    assert min(parts.useful, parts.warmup, parts.startup, parts.idle) > 0.0
    # Timed steps really slept: what they are counted for is what the samples say.
    slept = sum(sum(samples) for (samples,) in _samples(command))
    assert parts.useful == pytest.approx(GANG * slept, rel=1e-6)
    opened = (session.ended_at - session.started_at).total_seconds() * session.num_gpus
    assert parts.held <= session.capacity <= opened
    assert said["capacity_gpu_seconds"] == session.capacity


def _samples(command: Command) -> list[list[list[float]]]:
    import json

    return [[json.loads(value) if isinstance(value, str) else value] for (value,) in command.sql("SELECT step_seconds FROM measurement")]


def test_a_kill_leaves_no_more_uncounted_than_the_seconds_since_it_was_last_seen(command_on: Command, tmp_path: Path) -> None:
    file = write_sweep(tmp_path, workload=SLOW, axes=EIGHT)
    with Store.open(command_on.store_url) as store:
        running = command_on.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 6)
        running.kill()
        killed_at = datetime.now(tz=UTC)
        assert running.survivors(seconds=10) == []
        before = HeldGpuSeconds(**status(command_on)["gpu_seconds_by_part"])
        assert before.useful > 0
        command_on.ok("run", file)
    killed, ended = sessions(command_on)
    assert 0 <= (killed_at - killed.ended_at).total_seconds() <= UNSEEN_SECONDS
    most = [(killed_at - killed.first_attempt_at).total_seconds(), (ended.ended_at - ended.first_attempt_at).total_seconds()]
    least = [
        (killed.ended_at - killed.first_attempt_at).total_seconds() - RESERVE_SECONDS - BETWEEN_SECONDS,
        (ended.last_attempt_ended_at - ended.first_attempt_at).total_seconds() - RESERVE_SECONDS,
    ]
    parts = HeldGpuSeconds(**status(command_on)["gpu_seconds_by_part"])
    assert GANG * sum(least) <= parts.held <= GANG * sum(most)
    assert parts.in_flight == 0.0
    assert parts.useful > before.useful
    assert parts.held <= killed.capacity + ended.capacity
    text = command_on.ok("status", "t").stdout
    assert "GPU-hours held: useful" in text


def test_a_spent_budget_of_money_ends_the_sweep_and_the_next_call_says_so(command: Command, tmp_path: Path) -> None:
    file = write_sweep(
        tmp_path, workload=SLOW, price_per_gpu_hour=3600.0, search={"max_cost": 12.0, "confirm": {"repeats": 0}}
    )  # $1 a second
    done = command.ok("run", file)
    assert "max_cost reached" in done.stderr
    said = status(command)
    longest = max(row[0] for row in command.sql("SELECT max(gpu_seconds) FROM attempt"))
    assert (
        12.0 - longest - GANG * RESERVE_SECONDS <= said["dollars"] <= 12.0 + longest + GANG * 15.0
    )  # and the end of Ray, as long as it is leased
    assert 0 < sum(said["num_trials"].values()) < 16
    again = command.ok("run", file)
    assert "max_cost reached" in again.stderr
    assert "Ray" not in again.stderr
    cost = command.json("plan", file)["cost"]
    assert (cost["budget_limit"], cost["num_trials"]) == ("max_cost", 16)
    assert cost["budget_gpu_hours_left"] == pytest.approx(max((12.0 - said["dollars"]) / 3600, 0.0))
    assert "search.max_cost leaves" in command.ok("plan", file).stdout

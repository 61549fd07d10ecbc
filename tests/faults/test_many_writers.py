"""Eight processes write one SQLite file while a ninth reads a snapshot: all succeed."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.trial.lifecycle import TrialState
from tests.db.builders import Bench
from tests.faults import forks

pytestmark = pytest.mark.timeout(600)

NUM_WRITERS, NUM_TRIALS = 8, 25  # two commits a trial


def write(url: str, number: int, into: Path) -> None:
    seconds = []
    with Store.open(url) as store:
        bench = Bench.on(store, f"writer-{number}")
        for size in range(1, NUM_TRIALS + 1):
            began = time.monotonic()
            bench.measure(size)
            seconds.append(time.monotonic() - began)
    into.write_text(json.dumps(seconds))


def test_eight_writers_and_a_reader_are_never_refused(sqlite_url: str, tmp_path: Path) -> None:
    Store.open(sqlite_url).close()
    reader = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM trial").fetchall()
    pids = [
        forks.start(partial(write, sqlite_url, number, tmp_path / f"{number}.json"))
        for number in range(NUM_WRITERS)
    ]
    assert [forks.wait(pid) for pid in pids] == [0] * NUM_WRITERS
    assert reader.execute("SELECT count(*) FROM trial").fetchone() == (0,)
    reader.close()
    seconds = sorted(
        s
        for number in range(NUM_WRITERS)
        for s in json.loads((tmp_path / f"{number}.json").read_text())
    )
    print(
        f"a trial's two commits: median {seconds[len(seconds) // 2] * 1e3:.0f} ms, slowest "
        f"{seconds[-1] * 1e3:.0f} ms"
    )
    with Store.open(sqlite_url) as store:
        for sweep in store.sweeps():
            assert [trial.state for trial in store.trials(sweep.id)] == [
                TrialState.MEASURED
            ] * NUM_TRIALS

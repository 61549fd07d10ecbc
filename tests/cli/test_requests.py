"""`sweep enqueue` and `sweep retry`: what they ask for, and what they refuse."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.trial.lifecycle import TrialState
from tests.acceptance.command import CommandHere, write_sweep
from tests.db.builders import Bench


@pytest.fixture
def ended(command: CommandHere, tmp_path: Path) -> CommandHere:
    """A simulated sweep of which one layout of four was measured."""
    axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    search = {"max_trials": 1, "confirm": {"repeats": 0}}
    file = write_sweep(tmp_path, axes=axes, search=search)
    command.ok("run", file, "--simulate")
    return command


def test_a_layout_that_was_asked_for_is_measured_by_the_next_call(
    ended: CommandHere, tmp_path: Path
) -> None:
    ((tried,),) = ended.sql("select micro_batch_size from v_trial")
    size = 3 - tried
    words = (f"mbs={size}", "recompute=full")
    done = ended.ok("enqueue", *words, "--sweep", "t-simulated")
    assert "Asked for trial 2, " in done.stdout and "The next `sweep run`" in done.stdout
    again = ended.json("enqueue", *words)
    assert (again["trial_id"], again["state"], again["accepted"]) == (2, "queued", True)
    ended.ok("run", tmp_path / "t.yaml", "--simulate")
    found = ended.sql("select micro_batch_size, state from v_trial where trial_id = 2")
    assert found == [[size, "measured"]]
    there = ended.ok("enqueue", *words)
    assert "is measured already. To measure it again: sweep retry 2" in there.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mbs=3",), "is not legal in llama-tiny_2gpu_s64_gb64"),
        (("mbs=1", "--cell", "9gpu"), "no cell's name contains it"),
        (("nonsense",), "nonsense"),
        (("mbs=1", "--sweep", "u"), "no sweep is named 'u'"),
    ],
    ids=["illegal", "no cell", "no layout", "no sweep"],
)
def test_what_cannot_be_measured_is_refused(
    ended: CommandHere, words: tuple[str, ...], said: str
) -> None:
    done = ended.run("enqueue", *words)
    assert done.returncode == 2 and said in done.stderr
    assert ended.sql("select count(*) from v_trial") == [[1]]


@pytest.mark.parametrize("asked", [("enqueue", "mbs=1"), ("calibration",), ("profile", "1")])
def test_a_stored_file_of_another_version_is_refused(
    ended: CommandHere, sqlite_url: str, asked: tuple[str, ...]
) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update sweep set spec_json = '{\"gpu\": 2}'")
    done = ended.run(*asked)
    assert done.returncode == 2 and "by another version of this program" in done.stderr


def test_a_trial_waits_again_if_nobody_works_on_its_sweep(
    ended: CommandHere, sqlite_url: str
) -> None:
    assert ended.json("retry", "1")["trials"] == [{"trial_id": 1, "accepted": True}]
    done = ended.run("retry", "1")
    assert (done.returncode, done.stdout) == (2, "Trial 1 has not ended: nothing was changed.\n")
    with Store.open(sqlite_url) as store:
        assert store.trials_by_id([1])[0].state is TrialState.QUEUED
    assert ended.run("retry", "99").returncode == 2


def test_who_works_on_a_sweep_is_asked(store: Store, command: CommandHere) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(1)
    done = command.ok("retry", str(trial_id))
    assert "reads the request within 5 s" in done.stdout
    (event,) = store.events_of_kinds(bench.sweep_id, ["retry_asked"])
    assert event.trial_id == trial_id
    assert store.trials_by_id([trial_id])[0].state is TrialState.MEASURED

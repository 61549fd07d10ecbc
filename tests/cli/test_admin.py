"""The commands that change what the store holds: cancel, invalidate, db upgrade."""

from __future__ import annotations

import json
import shlex

import pytest

from db.store import Store
from db.types import StopRequest
from orchestrator import cli
from orchestrator.cli import admin
from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.core.trial.lifecycle import TrialState
from tests.cli.conftest import Sweep
from tests.db.builders import Bench, start_attempt


def test_cancel_reaches_the_orchestrator_that_holds_the_sweep(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    out, _ = sweep("cancel", "--drain")
    assert "running trials may finish" in out
    assert store.renew(bench.sweep_id, bench.epoch) is StopRequest.DRAIN
    out, _ = sweep("cancel", "tiny", "--json")
    found = json.loads(out)
    assert (found["accepted"], found["request"]) == (True, "cancel")
    assert store.renew(bench.sweep_id, bench.epoch) is StopRequest.CANCEL
    assert "asked to cancel" in sweep("status")[0]


def test_cancel_says_so_where_nobody_works(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    store.release(bench.sweep_id, bench.epoch)
    assert "Nobody works on sweep tiny" in sweep("cancel")[0]
    assert json.loads(sweep("cancel", "--json")[0])["accepted"] is False


def test_invalidate_counts_asks_and_touches_only_what_matches(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    old, new = bench.measure(1, torch="2.9.0"), bench.measure(2)
    store.release(bench.sweep_id, bench.epoch)
    # Stdin is no terminal: nobody can answer.
    _, err = sweep("invalidate", "--where", "not is_current_fingerprint", code=2)
    assert "1 matching trial of sweep tiny: 1 measured" in err
    assert "add --yes" in err
    assert store.trial(old).trial.state is TrialState.MEASURED
    out, _ = sweep("invalidate", "--where", "not is_current_fingerprint", "--yes")
    assert "1 trial will be measured again" in out
    assert store.trial(old).trial.state is TrialState.QUEUED
    assert store.trial(new).trial.state is TrialState.MEASURED
    assert "nothing was changed" in sweep("invalidate", "--where", "trial_id = 999")[0]


def test_invalidate_can_be_kept_to_one_sweep(store: Store, sweep: Sweep) -> None:
    benches = [Bench.on(store, name) for name in ("one", "two")]
    trials = [bench.measure() for bench in benches]
    for bench in benches:
        store.release(bench.sweep_id, bench.epoch)
    found = json.loads(
        sweep("invalidate", "--where", "mfu > 0.1", "--sweep", "two", "--yes", "--json")[0]
    )
    assert (found["matched"], found["num_invalidated"]) == ({"measured": 1}, 1)
    assert [store.trial(trial).trial.state for trial in trials] == [
        TrialState.MEASURED,
        TrialState.QUEUED,
    ]


def test_invalidate_takes_the_newest_sweep_or_all_that_it_names(
    store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = [Bench.on(store, name) for name in ("one", "two", "three")]
    for bench, sizes in zip(benches, ([1, 2], [1], [1]), strict=True):
        for size in sizes:
            bench.measure(size)
        store.release(bench.sweep_id, bench.epoch)
    _, err = sweep("invalidate", "--where", "mfu > 0.1", "--yes")
    assert "1 matching trial of sweep three: 1 measured" in err
    with monkeypatch.context() as patch:
        patch.setattr(admin, "MOST_NAMED", 1)
        _, err = sweep("invalidate", "--where", "mfu > 0.1", "--all-sweeps", code=2)
    assert "3 matching trials of 2 sweeps, two (1), and 1 more: 3 measured" in err
    _, err = sweep("invalidate", "--where", "mfu > 0.1", "--yes", "--all-sweeps")
    assert "3 matching trials of 2 sweeps, two (1), one (2): 3 measured" in err
    _, err = sweep("invalidate", "--where", "1=1", "--sweep", "one", "--all-sweeps", code=2)
    assert "--all-sweeps and --sweep exclude each other" in err


def test_the_advice_for_a_trial_that_was_lost_too_often_works_for_an_older_sweep(
    store: Store, sweep: Sweep
) -> None:
    old = Bench.on(store, "old")
    trial_id, _ = old.start()
    Bench.on(store, "new")
    for left in range(POLICIES[FailureKind.ORCHESTRATOR_LOST].max_retries, -1, -1):
        epoch = store.acquire(old.sweep_id, host="elsewhere", pid=1, takeover=True)
        store.mark_lost(old.sweep_id, epoch)
        if left:
            start_attempt(store, trial_id, epoch)
    store.release(old.sweep_id, epoch)
    told = store.trial(trial_id).trial.failure_message or ""
    out, _ = sweep(*shlex.split(told[told.index("sweep invalidate") :])[1:])
    assert "1 trial will be measured again" in out


@pytest.mark.parametrize(
    "where",
    [
        "nope = 1",
        "1=1) or (1=1",
        "trial_id = 1; delete from trial",
        "1=1 --",
        "trial_id in (select load_extension('x'))",
        "",
    ],
)
def test_a_condition_can_only_be_a_condition(store: Store, sweep: Sweep, where: str) -> None:
    bench = Bench.on(store)
    trial = bench.measure()
    bench.add(2)
    store.release(bench.sweep_id, bench.epoch)
    assert cli.main(["invalidate", "--where", where, "--yes"]) in (0, 2)
    assert len(store.trials(bench.sweep_id)) == 2
    assert store.trial(trial).trial.state in (TrialState.MEASURED, TrialState.QUEUED)


def test_invalidate_is_refused_while_an_orchestrator_works(store: Store, sweep: Sweep) -> None:
    Bench.on(store).measure()
    _, err = sweep("invalidate", "--where", "mfu > 0", "--yes", code=5)
    assert "held by host" in err


def test_db_upgrade_of_a_current_database_changes_nothing(store: Store, sweep: Sweep) -> None:
    assert "already" in sweep("db", "upgrade")[0]
    assert json.loads(sweep("db", "upgrade", "--json")[0])["copy"] is None
    found = json.loads(sweep("db", "upgrade", "--json")[0])
    assert found["version_before"] == found["version_after"]

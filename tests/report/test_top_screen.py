"""The texts of `sweep top`, from the rows of a store."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.report.live_sweep import LiveRows, LiveSweep
from orchestrator.report.top_head import head_lines
from orchestrator.report.top_screen import COLUMNS, SORTS, TableName, table
from tests.cli.cli_store import FORMULA, HOSTILE, Filled, fill
from tests.db.builders import Bench, record_failure, start_repeat


@pytest.fixture
def filled(sqlite_store: Store, tmp_path: Path) -> Filled:
    return fill(sqlite_store, tmp_path)


@pytest.fixture
def rows(filled: Filled, sqlite_store: Store) -> LiveRows:
    return LiveSweep(sqlite_store, "tiny").read(0.0)


def lines(name: TableName, rows: LiveRows, **options: str) -> list[dict[str, str]]:
    now = rows.status.row.created_at + timedelta(minutes=1)
    found = table(name, rows, now=now, progress={}, **options)  # type: ignore[arg-type]
    assert found.num_matching == len(found.lines) + found.num_hidden
    return [dict(zip(COLUMNS[name], line.texts, strict=True)) for line in found.lines]


def test_each_table_has_its_lines_in_each_of_its_orders(rows: LiveRows) -> None:
    for name in TableName:
        by_order = {order: lines(name, rows, sort=order) for order in SORTS[name]}
        texts = [sorted(map(str, found)) for found in by_order.values()]
        assert texts[0] and all(one == texts[0] for one in texts)


def test_a_cell_has_its_best_and_its_counts(rows: LiveRows, filled: Filled) -> None:
    tiny, large = lines(TableName.CELLS, rows)
    assert (tiny["tokens/s/GPU"], tiny["measured"], tiny["OOM"]) == ("1,234", "3", "1")
    assert (tiny["failed"], tiny["under way"], tiny["waiting"]) == ("1", "2", "1")
    assert tiny["search"] == "searches" and large["search"] == "nothing runs now"
    assert large["tokens/s/GPU"] == "-" and "nothing has fitted" in large["layout"]


def test_what_runs_is_shown_with_its_nodes_and_how_long(rows: LiveRows, filled: Filled) -> None:
    running, launching = lines(TableName.RUNNING, rows)
    assert (running["trial"], running["phase"]) == (str(filled.running), "taking steps")
    assert (launching["trial"], launching["phase"]) == (
        str(filled.launching),
        "before its first step",
    )
    assert running["nodes"] == "node-a" and running["GPUs"] == "2"
    assert running["for"] in ("59 s", "1 min 00 s")
    now = rows.status.row.created_at
    seen = table(
        TableName.RUNNING, rows, now=now, progress={filled.running: ("rendezvous", 0)}
    ).lines[0]
    assert seen.texts[1] == "rendezvous" and seen.trial_id == filled.running


def test_a_repeat_under_way_is_shown(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    trial = bench.measure(1)
    start_repeat(sqlite_store, trial, epoch=bench.epoch)
    (repeat,) = lines(TableName.RUNNING, LiveSweep(sqlite_store, "tiny").read(0.0))
    assert repeat["trial"] == str(trial)


def test_a_filter_keeps_the_lines_with_the_text(rows: LiveRows, filled: Filled) -> None:
    (failed,) = lines(TableName.TRIALS, rows, matching="FAILED")
    assert failed["trial"] == str(filled.failed)
    assert not lines(TableName.TRIALS, rows, matching="no such text")
    (waiting,) = lines(TableName.QUEUE, rows)
    assert waiting["trial"] == str(filled.queued)


def test_failures_come_with_what_others_wrote_as_it_is(rows: LiveRows, filled: Filled) -> None:
    found = {line["trial"]: line for line in lines(TableName.FAILURES, rows)}
    assert found[str(filled.failed)]["message"] == HOSTILE
    assert found[str(filled.out_of_memory)]["kind"] == "oom_gpu"
    assert any(FORMULA in line["cell"] for line in lines(TableName.CELLS, rows))


def test_fast_trials_come_first_and_old_conditions_last(rows: LiveRows, filled: Filled) -> None:
    ids = [int(line["trial"]) for line in lines(TableName.TRIALS, rows)]
    assert ids[:2] == [filled.measured, filled.slower] and ids[-1] == filled.old_conditions


@pytest.mark.parametrize("matching", ["", "mbs"])
def test_more_lines_than_are_wanted_are_counted(rows: LiveRows, matching: str) -> None:
    now = rows.status.row.created_at
    found = table(TableName.TRIALS, rows, now=now, progress={}, matching=matching, most=3)
    assert len(found.lines) == 3 and found.num_hidden == len(rows.trials) - 3


def _head(rows: LiveRows, **search: object) -> str:
    row = replace(rows.status.row, spec_json=json.dumps({"search": search}))
    changed = replace(rows, status=replace(rows.status, row=row))
    session = rows.status.session
    assert session is not None
    now = session.started_at + timedelta(minutes=10)
    return "\n".join(text for text, _ in head_lines(changed, now))


def test_the_head_says_who_works_what_is_spent_and_what_is_left(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    leased = Leased(reserved=7200.0, idle=0.0, capacity=9600.0)
    sqlite_store.begin_session(
        bench.sweep_id, bench.epoch, num_gpus=16, leased=leased, price_per_gpu_hour=3.0
    )
    for size in (1, 2, 4):
        bench.measure(size)
    bench.start(8)
    rows = LiveSweep(sqlite_store, "tiny").read(0.0)
    plain = _head(rows)
    assert "tiny: running on host" in plain and "2 of 16 GPUs in use" in plain
    assert "3 measured, 1 under way" in plain
    assert " GPU-hours, $" in plain and "left" not in plain
    limited = _head(rows, max_gpu_hours=20, max_cost=60.0, max_trials=10, max_wall_time=3600)
    assert " of 20 GPU-hours" in limited and " of $60.00" in limited
    # A trial that was launched once and waits again counts, as it does for the loop.
    trial_id, attempt = bench.start(16)
    record_failure(
        sqlite_store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=Failure(kind=FailureKind.NODE_LOST, message="gone"),
        event=TrialEvent.REQUEUED,
    )
    assert "5 of 10 trials" in _head(LiveSweep(sqlite_store, "tiny").read(0.0), max_trials=10)
    assert "4 of 10 trials" in limited and "this call 10 min 00 s of 1 h 00 min" in limited
    # 10 minutes for 3 trials, so 20 for 6 more and the one that runs, or fewer.
    assert "likely" in limited and "left" in limited
    assert "at most 50 min 00 s left" in _head(rows, max_wall_time=3600)
    assert "a budget is spent and nothing more is started" in _head(rows, max_wall_time=60)


@pytest.mark.parametrize("has_lease", [False, True])
def test_a_sweep_that_nobody_holds_says_how_it_ended(rows: LiveRows, *, has_lease: bool) -> None:
    holder = rows.status.row.holder
    assert holder is not None
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    # Until its lease ends, the store still names an orchestrator that has died.
    gone = replace(holder, pid=dead.pid) if has_lease else None
    status = replace(rows.status, row=replace(rows.status.row, holder=gone))
    freed = replace(rows, status=status)
    head = head_lines(freed, status.row.created_at)[0][0]
    assert "nobody works on it now" in head and "the same `sweep run` continues it" in head
    assert {line["phase"] for line in lines(TableName.RUNNING, freed)} == {"interrupted"}
    assert {line["search"] for line in lines(TableName.CELLS, freed)} == {"not finished"}


def test_every_state_of_a_trial_can_be_shown(rows: LiveRows) -> None:
    states = {line["state"] for line in lines(TableName.TRIALS, rows)}
    assert states == {state.replace("_", " ") for state in TrialState}

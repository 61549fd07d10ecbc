"""Many trials in one commit: its result, its cost, and the effect of one bad member."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from db.connection.engine import Database
from db.connection.id_list import ByIds
from db.connection.portions import MOST
from db.schema import sweep, trial
from db.store import Store
from db.types import AttemptState
from db.write.changes import MANY
from db.write.writes import Ended, FailedEnd, MeasuredEnd, NewTrial, Pruned, Recorded
from orchestrator.core.errors import LeaseLost, UsageInvalid
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import IllegalTransition, TrialEvent, TrialState
from orchestrator.core.trial.node_report import GpuUsage
from tests.db.builders import (
    Bench,
    cell,
    counted_statements,
    failure,
    fingerprint,
    layout,
    losing_answers,
    measurement,
    record_failure,
    start_attempt,
    start_repeat,
)


def new(bench: Bench, *micro_batch_sizes: int) -> list[NewTrial]:
    return [
        NewTrial(cell_id=bench.cell_id, layout=layout(size), why=f"why {size}", nodes=["node-a"])
        for size in micro_batch_sizes
    ]


def measured(
    attempt: tuple[int, int],
    tokens_per_second_per_gpu: float = 1000.0,
    *,
    torch: str = "2.13.0",
    **changes: Any,
) -> Ended:
    outcome = MeasuredEnd(measurement=measurement(tokens_per_second_per_gpu, **changes))
    return Ended(
        trial_id=attempt[0],
        attempt=attempt[1],
        outcome=outcome,
        facts={"fingerprint": fingerprint(torch), "gpu_seconds": 4.0},
    )


def failed(
    attempt: tuple[int, int],
    event: TrialEvent,
    kind: FailureKind = FailureKind.OOM_GPU,
    *,
    stepped: bool = False,
) -> Ended:
    outcome = FailedEnd(failure=failure(kind), event=event, peak_memory_bytes=79 << 30)
    return Ended(
        trial_id=attempt[0],
        attempt=attempt[1],
        outcome=outcome,
        stepped=stepped,
        facts={"gpu_seconds": 2.0},
    )


def test_numbers_that_only_one_of_the_measurements_of_a_commit_has_are_kept(bench: Bench) -> None:
    """The others have NULL there; columns that none has are not written."""
    store = bench.store
    attempts = store.begin_trials(new(bench, 1, 2), epoch=bench.epoch)
    store.note_first_steps(attempts, epoch=bench.epoch)
    without, with_gpu = (measured(attempt) for attempt in attempts)
    assert isinstance(with_gpu.outcome, MeasuredEnd)
    seen = replace(with_gpu.outcome, gpu=GpuUsage(clock_mhz=1755.0))
    with counted_statements(store) as said:
        store.record_ends([without, replace(with_gpu, outcome=seen)], epoch=bench.epoch)
    (insert,) = (text for text in said if text.startswith("INSERT INTO measurement "))
    assert "gpu_clock_mhz" in insert and "gpu_power_watts" not in insert
    seen_by_trial = [store.trial(trial_id).attempts[0].gpu for trial_id, _ in attempts]
    assert [gpu.clock_mhz for gpu in seen_by_trial if gpu is not None] == [None, 1755.0]
    assert [store.trial(trial_id).trial.mfu for trial_id, _ in attempts] == [0.41, 0.41]


def test_trials_of_several_cells_begin_in_one_commit_and_in_their_order(bench: Bench) -> None:
    store = bench.store
    other = store.ensure_cell(bench.sweep_id, cell(num_gpus=4), bench.epoch)
    begun = store.begin_trials(
        [
            NewTrial(cell_id=cell_id, layout=layout(size), nodes=["n"])
            for size in (5, 3, 4)
            for cell_id in (other, bench.cell_id)
        ],
        epoch=bench.epoch,
    )
    details = [store.trial(trial_id) for trial_id, _ in begun]
    assert [number for _, number in begun] == [1] * 6
    assert [(d.trial.cell_id, d.trial.layout.micro_batch_size) for d in details] == [
        (cell_id, size) for size in (5, 3, 4) for cell_id in (other, bench.cell_id)
    ]
    assert all(
        d.trial.state is TrialState.LAUNCHING and d.attempts[0].nodes == ("n",) for d in details
    )
    assert all(
        [(e.event, e.attempt) for e in d.events] == [("added", None), ("gang_placed", 1)]
        for d in details
    )


def test_a_layout_that_waits_is_begun_among_new_ones_as_the_trial_that_it_is(bench: Bench) -> None:
    waiting = bench.add(2)
    begun = bench.store.begin_trials(new(bench, 1, 2, 3), epoch=bench.epoch)
    assert begun[1] == (waiting.id, 1)
    assert len(bench.store.trials(bench.sweep_id)) == 3


@pytest.mark.parametrize(
    "sizes", [(1, 2, 9), (1, 2, 1)], ids=["one is measured", "one is named twice"]
)
def test_of_a_batch_with_one_that_cannot_begin_none_is_begun(
    bench: Bench, sizes: tuple[int, ...]
) -> None:
    bench.measure(9)
    before = bench.store.trials(bench.sweep_id), bench.store.events(bench.sweep_id)
    with pytest.raises(IllegalTransition):
        bench.store.begin_trials(new(bench, *sizes), epoch=bench.epoch)
    assert (bench.store.trials(bench.sweep_id), bench.store.events(bench.sweep_id)) == before


def test_first_steps_are_noted_together_or_not_at_all(bench: Bench) -> None:
    first, second = bench.start(1), bench.start(2)
    with pytest.raises(IllegalTransition, match="first_step of attempt 7, but its latest is 1"):
        bench.store.note_first_steps([first, (second[0], 7)], epoch=bench.epoch)
    assert bench.store.trial(first[0]).trial.state is TrialState.LAUNCHING
    bench.store.note_first_steps([first, second], epoch=bench.epoch)
    assert [row.state for row in bench.store.trials(bench.sweep_id)] == [TrialState.RUNNING] * 2


def everything_that_may_end(bench: Bench) -> list[Ended]:
    """Attempts in every situation, and what is told of them: the order matters for some."""
    store, epoch = bench.store, bench.epoch
    repeated, drifted, unlucky = (bench.measure(size) for size in (1, 2, 3))
    repeats = {
        trial_id: (trial_id, start_repeat(store, trial_id, epoch))
        for trial_id in (repeated, drifted, unlucky)
    }
    late = bench.start(4)
    record_failure(
        store, *late, epoch=epoch, failure=failure(FailureKind.HUNG), event=TrialEvent.REQUEUED
    )
    on_time = (late[0], start_attempt(store, late[0], epoch))
    running, launching, lost, out_of_memory, crashed, newest = (
        bench.start(size) for size in range(5, 11)
    )
    store.note_first_steps([running], epoch=epoch)
    faster = replace(measurement().step_time, median=0.25)
    return [
        measured(running),
        measured(repeats[repeated], 2000.0, step_time=faster),
        measured(repeats[drifted], torch="9.9"),
        failed(repeats[unlucky], TrialEvent.FAILED, FailureKind.HUNG),
        measured(late, 9999.0),
        measured(on_time, 10.0),
        measured(launching),
        measured(launching, 1.0),  # told twice
        failed(lost, TrialEvent.REQUEUED, FailureKind.NODE_LOST),
        failed(out_of_memory, TrialEvent.OUT_OF_MEMORY, stepped=True),
        failed(crashed, TrialEvent.FAILED, FailureKind.USER_ERROR),
        failed(crashed, TrialEvent.REQUEUED, FailureKind.NODE_LOST),  # told twice, and differently
        # From now on the current fingerprint of the cell.
        measured(newest, torch="9.9"),
    ]


def test_a_batch_comes_to_what_its_ends_come_to_one_after_the_other(store: Store) -> None:
    at_once, in_turn = Bench.on(store, "at once"), Bench.on(store, "in turn")
    ends, same = everything_that_may_end(at_once), everything_that_may_end(in_turn)
    came_to = store.record_ends(ends, epoch=at_once.epoch)
    counts = [recorded.counts for recorded in came_to]
    assert counts == [True, True, True, False, False, True, True, True, *[False] * 4, True]
    # The third has the fingerprint that its cell has with the last.
    counts[2] = False
    assert counts == [store.record_ends([end], epoch=in_turn.epoch)[0].counts for end in same]
    assert [recorded.state for recorded in came_to] == [
        store.trial(end.trial_id).trial.state for end in ends
    ]
    assert everything_of(at_once) == everything_of(in_turn)


def everything_of(bench: Bench) -> list[Any]:
    """All that is stored of the trials, but for ids and times, which no two of them share."""
    store, found = bench.store, []
    for row in store.trials(bench.sweep_id):
        detail = store.trial(row.id)
        trial = replace(
            detail.trial, id=0, cell_id=0, created_at=None, updated_at=None, measured_at=None
        )
        attempts = [
            replace(attempt, started_at=None, ended_at=attempt.ended_at is not None)
            for attempt in detail.attempts
        ]
        events = [replace(event, id=0, trial_id=0, at=None) for event in detail.events]
        repeats = store.repeats(bench.cell_id).get(row.id)
        if repeats is not None:
            repeats = replace(repeats, runs=tuple(replace(run, at=None) for run in repeats.runs))
        found.append((trial, attempts, events, repeats))
    return [found, store.cells(bench.sweep_id)[0].fingerprint_digest]


def test_ends_that_are_told_again_after_a_lost_answer_change_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = everything_that_may_end(bench)
    monkeypatch.setattr(Database, "write", losing_answers(Database.write))
    begun = bench.store.begin_trials(new(bench, 20, 21), epoch=bench.epoch)
    assert [number for _, number in begun] == [1, 1]
    bench.store.note_first_steps(begun, epoch=bench.epoch)
    came_to = bench.store.record_ends(ends, epoch=bench.epoch)
    monkeypatch.undo()
    twin = Bench.on(bench.store, "twin")
    assert came_to == bench.store.record_ends(everything_that_may_end(twin), epoch=twin.epoch)
    bench.store.note_first_steps(
        bench.store.begin_trials(new(twin, 20, 21), epoch=twin.epoch), epoch=twin.epoch
    )
    assert everything_of(bench) == everything_of(twin)


@pytest.mark.parametrize("size", [2, 64])
def test_the_statements_of_a_write_do_not_depend_on_how_many_trials_it_is_of(
    bench: Bench, size: int
) -> None:
    """The numbers of statements in batch.py, changes.py, endings.py; SQLite needs one or two more.

    PostgreSQL holds the sweep with one of its own, before its trials. A fingerprint that is new to
    a cell needs one that reads those of its sweep.
    """
    with counted_statements(bench.store) as begin:
        begun = bench.store.begin_trials(new(bench, *range(1, size + 1)), epoch=bench.epoch)
    with counted_statements(bench.store) as step:
        bench.store.note_first_steps(begun, epoch=bench.epoch)
    oom, *others = begun
    with counted_statements(bench.store) as end:
        bench.store.record_ends(
            [failed(oom, TrialEvent.OUT_OF_MEMORY), *map(measured, others)], epoch=bench.epoch
        )
    assert [
        sum(not one.startswith(("PRAGMA", "BEGIN")) for one in said) for said in (begin, step, end)
    ] == ([4, 3, 10] if bench.store.path is not None else [4, 4, 11])


@pytest.mark.parametrize("count", [0, 1, 3, MOST, MOST + 1])
def test_a_list_of_ids_is_looked_up_whatever_its_length(bench: Bench, count: int) -> None:
    begun = bench.store.begin_trials(new(bench, *range(1, MOST + 3)), epoch=bench.epoch)
    wanted = sorted(trial_id for trial_id, _ in begun)[:count]
    statement = ByIds(
        lambda ids: sa.select(trial.c.id).where(trial.c.id.in_(ids)).order_by(trial.c.id)
    )
    with counted_statements(bench.store) as said:
        rows = bench.store._database.read(lambda connection: statement.rows(connection, wanted))
    assert [row.id for row in rows] == wanted, "each once"
    assert sum(one.startswith("SELECT") for one in said) == -(-count // MOST)


def test_no_write_reads_through_a_whole_table(bench: Bench) -> None:
    """Otherwise a trial costs more the more there are: SQLite uses no index for a list of pairs."""
    if bench.store.path is None:
        pytest.skip("only SQLite says so of a table that is nearly empty")
    said: dict[str, Any] = {}

    def note(
        connection: sa.Connection,
        cursor: object,
        statement: str,
        parameters: Any,
        context: object,
        executemany: bool,
    ) -> None:
        said[statement] = parameters[0] if executemany else parameters

    waiting = bench.add(1).id
    sa.event.listen(bench.store._database.engine, "before_cursor_execute", note)
    begun = bench.store.begin_trials(new(bench, 1, 2, 3, 4), epoch=bench.epoch)
    bench.store.note_first_steps(begun, epoch=bench.epoch)
    bench.store.add_pruned(
        [
            Pruned(cell_id=bench.cell_id, layout=layout(n), why="w", condemned_by=waiting)
            for n in (4, 5)
        ],
        epoch=bench.epoch,
    )
    bench.store.record_ends(
        [failed(begun[0], TrialEvent.OUT_OF_MEMORY), *map(measured, begun[1:])], epoch=bench.epoch
    )
    bench.store.failure_counts([trial_id for trial_id, _ in begun])
    sa.event.remove(bench.store._database.engine, "before_cursor_execute", note)
    asked = {
        statement: parameters
        for statement, parameters in said.items()
        if statement.startswith(("SELECT", "UPDATE"))
    }
    with sqlite3.connect(bench.store.path) as connection:
        plans = {
            statement: [
                row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
            for statement, parameters in asked.items()
        }
    assert len(plans) > 8
    assert {
        statement: plan
        for statement, plan in plans.items()
        if any(step.startswith("SCAN") for step in plan)
    } == {}


def poisoned(attempt: tuple[int, int]) -> Ended:
    return measured(attempt, step_seconds=(0.49, float("nan"), 0.51))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda attempt: measured((4711, 1)), UsageInvalid),
        (lambda attempt: measured((attempt[0], 7)), UsageInvalid),
        (poisoned, (sa.exc.StatementError, ValueError)),
        (
            lambda attempt: measured(attempt, peak_memory_allocated_bytes=1 << 80),
            (sa.exc.StatementError, OverflowError),
        ),
    ],
    ids=[
        "no such trial",
        "no such attempt",
        "a sample that is no number",
        "more bytes than a column holds",
    ],
)
def test_an_end_that_cannot_be_recorded_takes_no_other_with_it(
    bench: Bench,
    bad: Callable[[tuple[int, int]], Ended],
    error: type[Exception] | tuple[type[Exception], ...],
) -> None:
    first, spoilt, last, out_of_memory = bench.store.begin_trials(
        new(bench, 1, 2, 3, 4), epoch=bench.epoch
    )
    with pytest.raises(error):
        bench.store.record_ends(
            [
                measured(first),
                bad(spoilt),
                measured(last),
                failed(out_of_memory, TrialEvent.OUT_OF_MEMORY),
            ],
            epoch=bench.epoch,
        )
    states = [row.state for row in bench.store.trials(bench.sweep_id)]
    assert states == [
        TrialState.MEASURED,
        TrialState.LAUNCHING,
        TrialState.MEASURED,
        TrialState.OUT_OF_MEMORY,
    ]
    assert bench.store.trial(spoilt[0]).attempts[0].state is AttemptState.RUNNING


def test_a_stale_owner_records_nothing_of_a_batch(bench: Bench) -> None:
    begun = bench.store.begin_trials(new(bench, 1, 2), epoch=bench.epoch)
    epoch = bench.store.acquire(bench.sweep_id, host="elsewhere", pid=1)
    before = bench.store.events(bench.sweep_id)
    with pytest.raises(LeaseLost):
        bench.store.record_ends([measured(attempt) for attempt in begun], epoch=bench.epoch)
    assert bench.store.events(bench.sweep_id) == before
    assert {row.id for row in bench.store.mark_lost(bench.sweep_id, epoch)} == {
        trial_id for trial_id, _ in begun
    }


def test_a_batch_of_two_sweeps_of_which_one_is_lost_records_nothing(bench: Bench) -> None:
    other = Bench.on(bench.store, "other")
    begun = [
        *bench.store.begin_trials(new(bench, 1), epoch=bench.epoch),
        *bench.store.begin_trials(new(other, 1), epoch=other.epoch),
    ]
    assert bench.epoch == other.epoch, "else no batch is of both"
    bench.store.acquire(other.sweep_id, host="elsewhere", pid=1)
    with pytest.raises(LeaseLost):
        bench.store.record_ends([measured(attempt) for attempt in begun], epoch=bench.epoch)
    assert [row.state for row in bench.store.trials(bench.sweep_id)] == [TrialState.LAUNCHING]


def test_who_waits_for_the_sweep_that_another_takes_over_records_nothing(bench: Bench) -> None:
    if bench.store.path is not None:
        pytest.skip("on SQLite one transaction writes, and no other has begun")
    begun = bench.store.begin_trials(new(bench, 1), epoch=bench.epoch)
    raised: list[BaseException] = []

    def tell() -> None:
        try:
            bench.store.record_ends([measured(begun[0])], epoch=bench.epoch)
        except LeaseLost as exc:
            raised.append(exc)

    with bench.store._database.engine.begin() as successor:
        successor.execute(
            sa.update(sweep).where(sweep.c.id == bench.sweep_id).values(owner_epoch=bench.epoch + 1)
        )
        late = threading.Thread(target=tell)
        late.start()
        _until_somebody_waits_for_a_lock(successor)
    late.join(timeout=30)
    assert [type(exc) for exc in raised] == [LeaseLost]
    assert [row.state for row in bench.store.trials(bench.sweep_id)] == [TrialState.LAUNCHING]


def _until_somebody_waits_for_a_lock(connection: sa.Connection) -> None:
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    deadline = time.monotonic() + 30
    while not connection.execute(waiting).scalar_one():
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.01)


def test_a_failure_does_not_end_in_anything_but_a_failure() -> None:
    with pytest.raises(
        ValueError,
        match="does not end in measured; it does in one of: failed, out_of_memory, requeued",
    ):
        FailedEnd(failure=failure(), event=TrialEvent.MEASURED)


def test_two_threads_that_tell_the_same_in_opposite_order_record_it_once(bench: Bench) -> None:
    begun = bench.store.begin_trials(new(bench, *range(1, 31)), epoch=bench.epoch)
    came_to: list[list[Recorded]] = []

    def tell(attempts: list[tuple[int, int]]) -> None:
        came_to.append(
            bench.store.record_ends([measured(attempt) for attempt in attempts], epoch=bench.epoch)
        )

    threads = [threading.Thread(target=tell, args=(order,)) for order in (begun, begun[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        came_to
        == [[Recorded(state=TrialState.MEASURED, counts=True, fingerprint=fingerprint())] * 30] * 2
    )
    assert len(bench.store.events(bench.sweep_id)) == 4 * 30
    assert {row.num_measurements for row in bench.store.trials(bench.sweep_id)} == {1}


def ended_with(attempt: tuple[int, int], found: Fingerprint) -> Ended:
    end = measured(attempt)
    return replace(end, facts={**end.facts, "fingerprint": found})


def without_software(whole: Fingerprint) -> Fingerprint:
    """The same of a program whose Python was not found."""
    stack = whole.stack.model_copy(update=dict.fromkeys(("python", "torch", "cuda", "nccl")))
    return whole.model_copy(update={"packages": (), "stack": stack})


@pytest.mark.parametrize("order", ["pww", "wpp", "wpw", "ppw"])
@pytest.mark.parametrize("together", [True, False])
def test_software_that_one_attempt_found_is_that_of_those_that_did_not(
    bench: Bench, order: str, together: bool
) -> None:
    whole = fingerprint()
    kinds = {"w": whole, "p": without_software(whole)}
    attempts = bench.store.begin_trials(new(bench, 1, 2, 4), epoch=bench.epoch)
    ends = [ended_with(one, kinds[kind]) for one, kind in zip(attempts, order, strict=True)]
    record = bench.store.record_ends
    recorded = (
        record(ends, epoch=bench.epoch)
        if together
        else [one for end in ends for one in record([end], epoch=bench.epoch)]
    )
    assert recorded[-1].fingerprint == whole
    rows = bench.store.trials(bench.sweep_id)
    assert {(row.fingerprint_digest, row.is_current_fingerprint) for row in rows} == {
        (whole.digest, True)
    }
    assert bench.store.cells(bench.sweep_id)[0].fingerprint_digest == whole.digest
    assert bench.store.fingerprints(bench.sweep_id) == [whole]


def test_a_repeat_without_software_pools_with_its_trial(bench: Bench) -> None:
    whole = fingerprint()
    (attempt,) = bench.store.begin_trials(new(bench, 1), epoch=bench.epoch)
    for found in (without_software(whole), whole, without_software(whole)):
        bench.store.record_ends([ended_with(attempt, found)], epoch=bench.epoch)
        number = start_repeat(bench.store, attempt[0], bench.epoch)
        attempt = (attempt[0], number)
    assert bench.store.trial(attempt[0]).trial.num_measurements == 3


def test_other_software_is_kept_apart_from_what_is_not_known(bench: Bench) -> None:
    """Unknown software counts as that of the cell's newest measurement."""
    one, two = fingerprint("2.12.0"), fingerprint("2.13.0")
    attempts = bench.store.begin_trials(new(bench, 1, 2, 4), epoch=bench.epoch)
    for attempt, found in zip(attempts, (one, two, without_software(one)), strict=True):
        bench.store.record_ends([ended_with(attempt, found)], epoch=bench.epoch)
    digests = [row.fingerprint_digest for row in bench.store.trials(bench.sweep_id)]
    assert sorted(map(str, digests)) == sorted([one.digest, two.digest, two.digest])


def test_software_of_another_sweep_completes_nothing(store: Store) -> None:
    first, second = Bench.on(store, name="first"), Bench.on(store, name="second")
    whole = fingerprint()
    for bench, found in ((first, whole), (second, without_software(whole))):
        (attempt,) = bench.store.begin_trials(new(bench, 1), epoch=bench.epoch)
        (recorded,) = bench.store.record_ends([ended_with(attempt, found)], epoch=bench.epoch)
        assert recorded.fingerprint == found


def test_a_column_that_one_of_many_new_trials_has_is_stored_for_that_one(bench: Bench) -> None:
    """Inserts of many rows leave out the columns that are empty in all of them."""
    some = new(bench, *range(1, MANY + 1))
    some[-1] = replace(some[-1], predicted_memory_bytes=5.0)
    begun = bench.store.begin_trials(some, epoch=bench.epoch)
    stored = {one.id: one for one in bench.store.trials(bench.sweep_id)}
    predictions = [stored[trial_id].predicted_memory_bytes for trial_id, _ in begun]
    assert predictions == [None] * (MANY - 1) + [5]
    assert {stored[trial_id].predicted_tokens_per_second_per_gpu for trial_id, _ in begun} == {None}

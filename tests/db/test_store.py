"""What a store promises, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from db import schema
from db.connection.engine import Change
from db.read import records
from db.read.rows import OtherRepeat
from db.store import Store
from db.types import AttemptState, SweepState, now
from db.write.batch import Batch
from db.write.writes import Pruned
from orchestrator.core.errors import LeaseLost, SweepChanged, SweepInUse, UsageInvalid
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import POLICIES, FailureKind
from orchestrator.core.trial.lifecycle import IllegalTransition, TrialEvent, TrialState
from orchestrator.core.trial.machine_load import MachineLoad
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import Phase
from tests.db.builders import (
    CONDITIONS,
    Bench,
    add_trial,
    begin_trial,
    cell,
    failure,
    fingerprint,
    layout,
    measurement,
    record_failure,
    record_measurement,
    repeat,
    start_attempt,
    start_repeat,
)


def test_the_same_sweep_is_found_again_and_only_who_takes_it_changes_its_spec(store: Store) -> None:
    narrow, wide = '{"max_trials": 10}', '{"max_trials": 20}'
    sweep_id = store.ensure_sweep("a", narrow, CONDITIONS)
    assert store.ensure_sweep("a", wide, CONDITIONS) == sweep_id
    assert (store.sweep_named("a").spec_json, store.sweep_named("a").state) == (
        narrow,
        SweepState.WAITING,
    )
    store.acquire(sweep_id, host="node-7", pid=1, spec_json=wide)
    assert store.sweep_named("a").spec_json == wide
    with pytest.raises(SweepInUse):
        _another(store).acquire(sweep_id, host="node-8", pid=1, spec_json=narrow)
    assert store.sweep_named("a").spec_json == wide
    store.acquire(sweep_id, host="node-7", pid=1)
    assert store.sweep_named("a").spec_json == wide


def test_a_sweep_of_the_same_name_in_another_store_has_another_run_token(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "two"):
        with Store.open(f"sqlite:///{tmp_path / name}.sqlite") as store:
            store.ensure_sweep("a", "{}", CONDITIONS)
            tokens.append(store.sweep_named("a").run_token)
            store.ensure_sweep("a", "{}", CONDITIONS)
            assert store.sweep_named("a").run_token == tokens[-1]
    assert tokens[0] != tokens[1]
    assert all(re.fullmatch("[0-9a-f]{12}", token) for token in tokens)


def test_other_conditions_are_refused_and_each_difference_is_named(store: Store) -> None:
    sweep_id = store.ensure_sweep("a", "{}", {"precision": "bf16", "seed": 1, "model": "x"})
    epoch = store.acquire(sweep_id, host="node-7", pid=1)
    Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch).measure()
    with pytest.raises(
        SweepChanged,
        match=r"(?s)model: was 'x', is 'absent'.*precision: was 'bf16', is 'fp8'.*"
        r"set these keys of its file back to what they were\..*sweep run FILE name=ANOTHER-NAME$",
    ):
        store.ensure_sweep("a", "{}", {"precision": "fp8", "seed": 1})


def test_a_sweep_without_trials_takes_the_conditions_of_whoever_takes_it(store: Store) -> None:
    sweep_id = store.ensure_sweep("a", "{}", {"device": "h100-sxm"})
    assert store.ensure_sweep("a", "{}", {"device": "cpu"}) == sweep_id
    assert store.sweep_named("a").conditions == {"device": "h100-sxm"}, "somebody may hold it"
    epoch = store.acquire(sweep_id, host="node-7", pid=1, conditions={"device": "cpu"})
    assert store.sweep_named("a").conditions == {"device": "cpu"}
    Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch).measure()
    with pytest.raises(SweepChanged, match="device: was 'cpu', is 'h100-sxm'"):
        store.acquire(sweep_id, host="node-7", pid=1, conditions={"device": "h100-sxm"})
    # Nothing of what was refused is written.
    store.renew(sweep_id, epoch)


def test_conditions_bind_from_the_first_measurement_on(store: Store) -> None:
    """What failed before is kept as superseded, and its trials wait again."""
    sweep_id = store.ensure_sweep("a", "{}", {"argv": "mien.py"})
    epoch = store.acquire(sweep_id, host="node-7", pid=1)
    bench = Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)
    failing, _ = bench.start(1)
    lost, _ = bench.start(2)
    _fail(store, failing, epoch)
    bench.prune([4])

    right = {"argv": "mine.py"}
    assert store.ensure_sweep("a", "{}", right) == sweep_id
    epoch = store.acquire(sweep_id, host="node-7", pid=1, conditions=right, takeover=True)
    assert store.sweep_named("a").conditions == {"argv": "mien.py"}, "its trials are of these"
    store.mark_lost(sweep_id, epoch)
    assert store.bind_conditions(sweep_id, right, epoch=epoch) == 2
    assert store.bind_conditions(sweep_id, right, epoch=epoch) == 0
    assert store.sweep_named("a").conditions == right
    assert {trial.state for trial in store.trials(sweep_id)} == {TrialState.QUEUED}
    for trial_id in (failing, lost):
        (attempt,) = store.trial(trial_id).attempts
        assert attempt.superseded and attempt.failure is not None
    told = store.trial(failing).events[-1].detail
    assert told == {"conditions": {"argv": "was 'mien.py', is 'mine.py'"}}

    number = start_attempt(store, failing, epoch)
    value = measurement()
    record_measurement(store, failing, number, epoch=epoch, measurement=value)
    assert store.trial(failing).trial.state is TrialState.MEASURED
    with pytest.raises(SweepChanged, match=r"argv: was 'mine\.py', is 'mien\.py'"):
        store.bind_conditions(sweep_id, {"argv": "mien.py"}, epoch=epoch)


def test_who_launched_nothing_leaves_the_conditions_that_trials_were_freed_for(
    store: Store,
) -> None:
    sweep_id = store.ensure_sweep("a", "{}", {"argv": "mien.py"})
    epoch = store.acquire(sweep_id, host="node-7", pid=1)
    bench = Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)
    _fail(store, bench.start(1)[0], epoch)
    store.release(sweep_id, epoch)
    for is_bound in (False, True):
        before = store.sweep_named("a")
        epoch = store.acquire(sweep_id, host="node-7", pid=1, conditions={"argv": "mine.py"})
        if is_bound:
            store.bind_conditions(sweep_id, {"argv": "mine.py"}, epoch=epoch)
        store.give_back(before, epoch)
        now_bound = {"argv": "mine.py" if is_bound else "mien.py"}
        assert store.sweep_named("a").conditions == now_bound


def _fail(store: Store, trial_id: int, epoch: int) -> None:
    wrong = failure(FailureKind.USER_ERROR)
    record_failure(store, trial_id, 1, epoch=epoch, failure=wrong, event=TrialEvent.FAILED)


def test_an_unknown_sweep_is_answered_with_the_nearest_name(store: Store) -> None:
    store.ensure_sweep("quickstart", "{}", {})
    with pytest.raises(UsageInvalid, match="did you mean 'quickstart'"):
        store.sweep_named("quikstart")


def test_a_cell_is_one_row_and_keeps_the_name_its_sweep_gives_the_model(bench: Bench) -> None:
    store = bench.store
    assert store.ensure_cell(bench.sweep_id, cell(), bench.epoch) == bench.cell_id
    renamed = cell(model=replace(PRESETS["llama-tiny"], name="mine"), num_gpus=4)
    store.ensure_cell(bench.sweep_id, renamed, bench.epoch)
    assert [row.cell for row in store.cells(bench.sweep_id)] == [cell(), renamed]


def test_two_definitions_under_one_name_are_two_cells(bench: Bench) -> None:
    other = cell(model=replace(PRESETS["llama-tiny"], num_layers=2))
    assert bench.store.ensure_cell(bench.sweep_id, other, bench.epoch) != bench.cell_id


def test_every_field_of_a_layout_comes_back(bench: Bench) -> None:
    rich = Layout(
        data_parallel_size=2,
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        context_parallel_size=2,
        micro_batch_size=3,
        grad_accum_steps=5,
        recompute=Recompute.parse("selective_attention:7"),
        zero_stage=3,
        precision=Precision.FP8,
    )
    row = add_trial(
        bench.store,
        bench.cell_id,
        rich,
        epoch=bench.epoch,
        why="predicted best",
        predicted_memory_bytes=7.9e10,
        predicted_tokens_per_second_per_gpu=9e3,
    )
    assert (row.layout, row.state, row.why, row.predicted_memory_bytes) == (
        rich,
        TrialState.QUEUED,
        "predicted best",
        79_000_000_000,
    )
    again = add_trial(bench.store, bench.cell_id, rich, epoch=bench.epoch, why="other")
    assert again == row


def test_a_prediction_that_is_no_number_is_unknown(bench: Bench) -> None:
    row = add_trial(
        bench.store,
        bench.cell_id,
        layout(),
        epoch=bench.epoch,
        predicted_memory_bytes=float("inf"),
        predicted_tokens_per_second_per_gpu=float("nan"),
    )
    assert row.predicted_memory_bytes is None
    assert row.predicted_tokens_per_second_per_gpu is None


@pytest.mark.parametrize(
    "load",
    [
        MachineLoad(cpu_cores=2.0),
        MachineLoad(foreign_gpu_processes=0),
        MachineLoad(gpu_clock_ratio=0.9),
        MachineLoad(
            gpu_throttled_fraction=0.5, gpu_throttle_reasons=("hw_slowdown", "sw_power_cap")
        ),
        MachineLoad(gpu_temperature_celsius=81.0),
        MachineLoad(),
    ],
)
def test_a_load_of_which_one_thing_is_known_comes_back(load: MachineLoad) -> None:
    assert (
        records.load_of({**dict.fromkeys(records.LOAD_COLUMNS), **records.load_columns(load)})
        == load
    )  # type: ignore[arg-type]


def test_everything_about_a_measurement_comes_back(bench: Bench) -> None:
    store, epoch = bench.store, bench.epoch
    with_settings = fingerprint().model_copy(update={"settings": (("NCCL_ALGO", "Ring"),)})
    environment = {"GLOO_SOCKET_IFNAME": {"node-c": "eth0", "node-d": None}, "NCCL_ALGO": "Ring"}
    load = MachineLoad(
        cpu_cores=2.0,
        own_cpu_cores=0.2,
        others_cpu_cores=1.8,
        foreign_gpu_processes=0,
        gpu_throttle_reasons=("a", "b"),
    )
    usage = GpuUsage(
        busy=0.93,
        power_watts=612.5,
        energy_joules=3062.5,
        clock_mhz=1755.0,
        lowest_clock_mhz=1410.0,
        sm_activity=0.91,
        tensor_activity=0.62,
        dram_activity=0.44,
    )
    trial_id, number = bench.start()
    assert number == 1
    store.note_first_steps([(trial_id, 1)], epoch=epoch)
    assert store.trial(trial_id).trial.state is TrialState.RUNNING
    counts = record_measurement(
        store,
        trial_id,
        1,
        epoch=epoch,
        measurement=measurement(unchecked="all steps arrived at once"),
        gpu=usage,
        memory_by_part={"weights": 16 << 30, "activations": 40 << 30},
        phases={Phase.START: 0.05, Phase.STEADY: 12.5},
        fingerprint=with_settings,
        nodes=["node-c"],
        shared_nodes=False,
        gpu_seconds=25.0,
        processes_killed=1,
        environment=environment,
        load=load,
        bound_cpus={"node-c": ["0-3", "4-7"]},
    )
    assert counts
    detail = store.trial(trial_id)
    (attempt,) = detail.attempts
    assert attempt.measurement == measurement(unchecked="all steps arrived at once")
    assert attempt.gpu == usage
    assert attempt.fingerprint == with_settings
    assert attempt.environment == environment
    assert attempt.bound_cpus == {"node-c": ["0-3", "4-7"]}
    assert attempt.load == detail.trial.load == load
    assert attempt.phase_seconds == {Phase.START: 0.05, Phase.STEADY: 12.5}
    assert attempt.memory_by_part == {"weights": 16 << 30, "activations": 40 << 30}
    assert (attempt.nodes, attempt.shared_nodes, attempt.gpu_seconds, attempt.processes_killed) == (
        ("node-c",),
        False,
        25.0,
        1,
    )
    assert (attempt.state, attempt.superseded) == (AttemptState.MEASURED, False)
    assert attempt.ended_at is not None
    assert attempt.ended_at >= attempt.started_at
    row = detail.trial
    assert (row.state, row.tokens_per_second_per_gpu, row.is_current_fingerprint) == (
        TrialState.MEASURED,
        1000.0,
        True,
    )
    assert [e.event for e in detail.events] == ["added", "gang_placed", "first_step", "measured"]


def test_unknown_numbers_stay_unknown(bench: Bench) -> None:
    trial_id, number = bench.start()
    unknown = measurement(
        mfu=None,
        hfu=None,
        peak_flops=None,
        peak_flops_source=None,
        allocator_retries=None,
        device_memory_bytes=None,
    )
    record_measurement(bench.store, trial_id, number, epoch=bench.epoch, measurement=unknown)
    (attempt,) = bench.store.trial(trial_id).attempts
    assert attempt.measurement == unknown
    assert attempt.fingerprint is None
    assert attempt.gpu_seconds is None
    assert attempt.memory_by_part is None
    assert bench.store.best(bench.sweep_id)[bench.cell_id][
        0
    ].is_current_fingerprint  # unknown equals unknown


def test_a_short_trial_that_reports_no_first_step_has_one_all_the_same(bench: Bench) -> None:
    events = bench.store.trial(bench.measure()).events
    assert [(e.event, e.to_state) for e in events[-2:]] == [
        ("first_step", "running"),
        ("measured", "measured"),
    ]


def test_the_log_folds_to_the_state(bench: Bench) -> None:
    bench.measure(1)
    bench.start(2)
    bench.prune([8])
    states: dict[int | None, str | None] = {}
    for event in bench.store.events(bench.sweep_id):
        assert states.get(event.trial_id) == event.from_state
        states[event.trial_id] = event.to_state
    assert states == {row.id: row.state for row in bench.store.trials(bench.sweep_id)}


def test_an_out_of_memory_is_a_result_with_its_memory(bench: Bench) -> None:
    trial_id, number = bench.start()
    state = record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(),
        event=TrialEvent.OUT_OF_MEMORY,
        peak_memory_bytes=79 << 30,
        device_memory_bytes=80 << 30,
        fingerprint=fingerprint(),
        gpu_seconds=2.0,
    )
    assert state is TrialState.OUT_OF_MEMORY
    (row,) = bench.store.trials(bench.sweep_id, bench.cell_id)
    assert (row.failure_kind, row.peak_memory_allocated_bytes, row.device_memory_bytes) == (
        FailureKind.OOM_GPU,
        79 << 30,
        80 << 30,
    )
    (attempt,) = bench.store.trial(trial_id).attempts
    assert attempt.failure == failure()
    assert attempt.fingerprint == fingerprint()


def test_text_of_a_program_is_stored_whatever_bytes_it_holds(bench: Bench) -> None:
    trial_id, number = bench.start()
    odd = failure(
        FailureKind.USER_ERROR,
        message="nul \0 surrogate \ud800 [/bold] ' ; drop table trial; --",
        log_tail="\x1b[31m\0",
    )
    record_failure(
        bench.store, trial_id, number, epoch=bench.epoch, failure=odd, event=TrialEvent.FAILED
    )
    (attempt,) = bench.store.trial(trial_id).attempts
    assert attempt.failure is not None
    assert attempt.failure.message == "nul \ufffd surrogate ? [/bold] ' ; drop table trial; --"


def test_a_lost_node_lets_the_trial_wait_again_and_counts_by_kind(bench: Bench) -> None:
    trial_id, number = bench.start()
    lost = failure(FailureKind.NODE_LOST)
    assert (
        record_failure(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            failure=lost,
            event=TrialEvent.REQUEUED,
        )
        is TrialState.QUEUED
    )
    assert bench.store.failure_counts([trial_id]) == {trial_id: {FailureKind.NODE_LOST: 1}}
    assert start_attempt(bench.store, trial_id, bench.epoch, ["node-c"]) == 2
    assert record_measurement(
        bench.store, trial_id, 2, epoch=bench.epoch, measurement=measurement()
    )
    assert [a.state for a in bench.store.trial(trial_id).attempts] == [
        AttemptState.REQUEUED,
        AttemptState.MEASURED,
    ]


def test_a_late_result_is_kept_but_does_not_count(bench: Bench) -> None:
    store, epoch = bench.store, bench.epoch
    trial_id, number = bench.start()
    record_failure(
        store,
        trial_id,
        number,
        epoch=epoch,
        failure=failure(FailureKind.HUNG),
        event=TrialEvent.REQUEUED,
    )
    second = start_attempt(store, trial_id, epoch, ["node-b"])
    assert not record_measurement(
        store, trial_id, number, epoch=epoch, measurement=measurement(9999.0)
    )
    assert record_measurement(store, trial_id, second, epoch=epoch, measurement=measurement(10.0))
    detail = store.trial(trial_id)
    assert [a.superseded for a in detail.attempts] == [True, False]
    (event,) = [one for one in store.events(bench.sweep_id) if one.event == "superseded"]
    assert event.detail == {"reason": "the attempt had ended before: requeued"}
    assert detail.attempts[0].measurement == measurement(9999.0)
    assert detail.trial.tokens_per_second_per_gpu == 10.0


def test_what_is_told_twice_is_recorded_once(bench: Bench) -> None:
    store, epoch = bench.store, bench.epoch
    trial_id, number = bench.start()
    for _ in range(2):
        assert record_measurement(store, trial_id, number, epoch=epoch, measurement=measurement())
    assert (
        record_failure(
            store, trial_id, number, epoch=epoch, failure=failure(), event=TrialEvent.FAILED
        )
        is TrialState.MEASURED
    )
    assert len(store.events(bench.sweep_id)) == 4
    assert store.trial(trial_id).attempts[0].failure is None


def test_a_move_that_the_table_lacks_changes_nothing(bench: Bench) -> None:
    trial = bench.add()
    before = bench.store.trial(trial.id)
    with pytest.raises(IllegalTransition, match="first_step is not possible in state queued"):
        bench.store.note_first_steps([(trial.id, 0)], epoch=bench.epoch)
    assert bench.store.trial(trial.id) == before


def test_of_two_threads_that_move_a_trial_from_one_state_the_later_changes_nothing(
    bench: Bench,
) -> None:
    trial = bench.add()

    def overtaken(connection: sa.Connection, change: Change) -> None:
        first, second = (Batch(connection, change, [trial.id], bench.epoch) for _ in range(2))
        first.advance(trial.id, TrialEvent.PRUNED)
        first.write()
        second.advance(trial.id, TrialEvent.GANG_PLACED, begins=1)
        with pytest.raises(
            IllegalTransition,
            match=rf"not every trial was as it was read. Of 1: {trial.id} \(read as queued\)",
        ):
            second.write()

    bench.store._database.write(overtaken)
    detail = bench.store.trial(trial.id)
    assert (detail.trial.state, [e.event for e in detail.events]) == (
        TrialState.PRUNED,
        ["added", "pruned"],
    )


def test_an_event_of_an_older_attempt_is_refused(bench: Bench) -> None:
    trial_id, number = bench.start()
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.HUNG),
        event=TrialEvent.REQUEUED,
    )
    start_attempt(bench.store, trial_id, bench.epoch, ["n"])
    with pytest.raises(IllegalTransition, match="of attempt 1, but its latest is 2"):
        bench.store.note_first_steps([(trial_id, 1)], epoch=bench.epoch)


def test_a_trial_that_waits_again_closes_its_attempt(bench: Bench) -> None:
    trial_id, number = bench.start()
    state = record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.HUNG),
        event=TrialEvent.REQUEUED,
    )
    assert state is TrialState.QUEUED
    assert bench.store.trial(trial_id).attempts[0].state is AttemptState.REQUEUED


def test_condemned_layouts_are_recorded_with_their_proof_and_without_a_launch(bench: Bench) -> None:
    store, epoch = bench.store, bench.epoch
    proof, number = bench.start(4)
    record_failure(
        store, proof, number, epoch=epoch, failure=failure(), event=TrialEvent.OUT_OF_MEMORY
    )
    waiting, measured = bench.add(5).id, bench.measure(1)
    bigger = [
        Pruned(
            cell_id=bench.cell_id,
            layout=layout(size),
            why=f"needs more than {size - 1}",
            condemned_by=proof,
        )
        for size in (5, 6, 7, 4, 1)
    ]
    assert store.add_pruned(bigger, epoch=epoch) == 3
    assert store.add_pruned(bigger, epoch=epoch) == 0
    rows = {row.layout.micro_batch_size: row for row in store.trials(bench.sweep_id)}
    assert {size: row.state for size, row in rows.items()} == {
        4: TrialState.OUT_OF_MEMORY,
        5: TrialState.PRUNED,
        1: TrialState.MEASURED,
        6: TrialState.PRUNED,
        7: TrialState.PRUNED,
    }
    assert (rows[5].id, rows[1].id) == (waiting, measured)
    assert (rows[6].condemned_by, rows[6].why, rows[6].num_attempts) == (
        proof,
        "needs more than 5",
        0,
    )
    assert [e.event for e in store.trial(rows[6].id).events] == ["added", "pruned"]


def test_many_layouts_are_condemned_at_once(bench: Bench) -> None:
    assert bench.prune(range(1, 1302)) == 1301


def test_attempts_that_a_dead_orchestrator_left_are_lost_and_their_trials_wait_again(
    store: Store, store_url: str
) -> None:
    old = Bench.on(store)
    (running, number), (launching, _), measured = old.start(1), old.start(2), old.measure(3)
    store.note_first_steps([(running, number)], epoch=old.epoch)
    with Store.open(store_url) as other:
        epoch = other.acquire(old.sweep_id, host="elsewhere", pid=1, takeover=True)
        assert [row.id for row in other.mark_lost(old.sweep_id, epoch)] == [running, launching]
        assert other.mark_lost(old.sweep_id, epoch) == []
        assert other.trial(measured).trial.state is TrialState.MEASURED
        assert other.trial(running).trial.state is TrialState.QUEUED
        assert other.trial(running).attempts[0].state is AttemptState.LOST
        assert other.failure_counts([running]) == {running: {FailureKind.ORCHESTRATOR_LOST: 1}}
        with pytest.raises(LeaseLost, match="elsewhere"):
            record_measurement(store, running, 1, epoch=old.epoch, measurement=measurement())
        assert start_attempt(other, running, epoch, ["n"]) == 2


def test_a_trial_whose_orchestrators_all_die_is_given_up(store: Store) -> None:
    bench = Bench.on(store)
    trial_id, _ = bench.start()
    epoch, retries = bench.epoch, POLICIES[FailureKind.ORCHESTRATOR_LOST].max_retries
    for _ in range(retries):
        epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1)
        assert [row.id for row in store.mark_lost(bench.sweep_id, epoch)] == [trial_id]
        start_attempt(store, trial_id, epoch)
    epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1)
    assert store.mark_lost(bench.sweep_id, epoch) == []
    detail = store.trial(trial_id)
    assert (detail.trial.state, detail.trial.failure_kind) == (
        TrialState.FAILED,
        FailureKind.ORCHESTRATOR_LOST,
    )
    assert detail.trial.failure_message is not None
    assert f"{retries + 1} times" in detail.trial.failure_message
    assert [a.state for a in detail.attempts] == [AttemptState.LOST] * (retries + 1)
    assert (detail.events[-1].event, detail.events[-1].to_state) == ("failed", "failed")


def test_a_lost_attempt_reserved_its_gpus_until_the_last_sign_of_life_of_its_owner(
    store: Store, store_url: str
) -> None:
    old = Bench.on(store)
    (long_lost, _), (just_lost, _) = old.start(1), old.start(2)
    _set_time(store, "attempt", "started_at", -1000.0)
    # Begun by an owner that slept past its lease.
    _set_time(store, "attempt", "started_at", +1000.0, f"trial_id = {just_lost}")
    _set_time(store, "sweep", "lease_until", -400.0)
    with Store.open(store_url) as other:
        # It released the sweep before it could mark any attempt as lost.
        other.release(old.sweep_id, other.acquire(old.sweep_id, host="elsewhere", pid=1))
        epoch = other.acquire(old.sweep_id, host="elsewhere", pid=1)
        other.mark_lost(old.sweep_id, epoch)
        assert other.trial(long_lost).attempts[0].gpu_seconds == pytest.approx(
            600.0 * cell().num_gpus, abs=60.0
        )
        (never_seen,) = other.trial(just_lost).attempts
        assert (never_seen.gpu_seconds, never_seen.ended_at) == (0.0, never_seen.started_at)
        assert other.reserved(old.sweep_id).total.lost == pytest.approx(1200.0, abs=60.0)


def test_a_lost_attempt_of_an_owner_whose_lease_has_not_ended_reserved_its_gpus_until_now(
    bench: Bench,
) -> None:
    trial_id, _ = bench.start()
    _set_time(bench.store, "attempt", "started_at", -100.0)
    epoch = bench.store.acquire(bench.sweep_id, host="elsewhere", pid=1, takeover=True)
    bench.store.mark_lost(bench.sweep_id, epoch)
    (attempt,) = bench.store.trial(trial_id).attempts
    # The lease would have gone on for another 30 s x 2.
    assert attempt.gpu_seconds == pytest.approx(100.0 * cell().num_gpus, abs=30.0)


def _set_time(
    store: Store, table: str, column: str, seconds_from_now: float, where: str = "1 = 1"
) -> None:
    statement = (
        sa.update(schema.metadata.tables[table])
        .where(sa.text(where))
        .values({column: now(seconds_from_now)})
    )
    store._database.write(lambda connection, change: connection.execute(statement))


def test_what_cannot_be_true_is_marked_and_is_never_the_best(bench: Bench) -> None:
    store = bench.store
    slower, faster = bench.measure(1, 500.0), bench.measure(2, 900.0)
    store.note_implausible({faster: "milliseconds?"}, epoch=bench.epoch)
    (row,) = store.trials_by_id([faster])
    assert (row.implausible, row.confident, row.state) == (
        "milliseconds?",
        False,
        TrialState.MEASURED,
    )
    assert [trial.id for trial in store.best(bench.sweep_id, 5)[bench.cell_id]] == [slower]
    (status,) = store.status(bench.sweep_id)
    assert status.best is not None and status.best.id == slower
    with pytest.raises(LeaseLost):
        store.note_implausible({slower: "milliseconds?"}, epoch=bench.epoch + 1)


def test_status_counts_every_trial_once_and_names_the_best(bench: Bench) -> None:
    bench.measure(1, 500.0)
    best = bench.measure(2, 900.0)
    bench.add(3)
    bench.start(4)
    (status,) = bench.store.status(bench.sweep_id)
    assert sum(status.num_trials.values()) == 4
    assert status.num_trials[TrialState.MEASURED] == 2
    assert status.num_trials[TrialState.PRUNED] == 0
    assert status.best is not None
    assert status.best.id == best
    assert bench.store.reserved(bench.sweep_id).by_cell[bench.cell_id].reserved == 8.0


def test_the_best_come_fastest_first_and_only_of_the_current_fingerprint(bench: Bench) -> None:
    bench.measure(1, 5000.0, torch="2.12.0")
    slow, fast = bench.measure(2, 700.0), bench.measure(3, 800.0)
    assert [row.id for row in bench.store.best(bench.sweep_id, top=5)[bench.cell_id]] == [
        fast,
        slow,
    ]
    old = next(
        row for row in bench.store.trials(bench.sweep_id) if row.layout.micro_batch_size == 1
    )
    assert old.is_current_fingerprint is False


def test_invalidated_trials_wait_again_and_their_attempts_are_kept(bench: Bench) -> None:
    store = bench.store
    slow, fast = bench.measure(1, 10.0), bench.measure(2, 100.0)
    failed, number = bench.start(3)
    record_failure(
        store, failed, number, epoch=bench.epoch, failure=failure(), event=TrialEvent.OUT_OF_MEMORY
    )
    with pytest.raises(SweepInUse):
        Store.invalidate(_another(store), "tokens_per_second_per_gpu < 50")
    store.release(bench.sweep_id, bench.epoch)
    assert store.invalidate("tokens_per_second_per_gpu < 50 OR state = 'out_of_memory'") == 2
    assert store.trial(slow).trial.state is TrialState.QUEUED
    assert store.trial(slow).trial.tokens_per_second_per_gpu is None
    assert store.trial(slow).attempts[0].superseded
    assert store.trial(slow).attempts[0].measurement == measurement(10.0)
    assert store.trial(failed).trial.failure_kind is None
    assert store.failure_counts([failed]) == {failed: {}}
    assert store.trial(fast).trial.state is TrialState.MEASURED
    again = Bench.on(store)
    assert again.start(1) == (slow, 2)
    assert record_measurement(store, slow, 2, epoch=again.epoch, measurement=measurement(11.0))


def test_an_invalidated_out_of_memory_frees_what_it_condemned(bench: Bench) -> None:
    store, epoch = bench.store, bench.epoch
    proofs = {size: bench.start(size) for size in (4, 40)}
    for size, (proof, number) in proofs.items():
        record_failure(
            store, proof, number, epoch=epoch, failure=failure(), event=TrialEvent.OUT_OF_MEMORY
        )
        bench.prune([size + 1], condemned_by=proof)
    store.release(bench.sweep_id, epoch)
    where = f"trial_id = {proofs[4][0]}"
    assert store.count_repeatable(where) == {TrialState.OUT_OF_MEMORY: 1, TrialState.PRUNED: 1}
    assert store.invalidate(where) == 2
    rows = {row.layout.micro_batch_size: row for row in store.trials(bench.sweep_id)}
    assert [rows[size].state for size in (4, 5)] == [TrialState.QUEUED, TrialState.QUEUED]
    assert (rows[5].condemned_by, rows[5].why) == (None, None)
    assert [e.event for e in store.trial(rows[5].id).events] == ["added", "pruned", "invalidated"]
    assert (rows[41].state, rows[41].condemned_by) == (TrialState.PRUNED, proofs[40][0])
    assert store.invalidate("state = 'pruned'") == 1
    assert store.trial(rows[41].id).trial.state is TrialState.QUEUED
    assert store.trial(proofs[40][0]).trial.state is TrialState.OUT_OF_MEMORY


def _another(store: Store) -> Store:
    # The same database under another owner's token.
    return Store(store._database)


@pytest.mark.parametrize(
    "where", ["no_such_column = 1", "1 = 1) ; DELETE FROM trial --", "1 = 1; DELETE FROM trial", ""]
)
def test_a_condition_that_is_no_condition_is_refused(bench: Bench, where: str) -> None:
    bench.measure()
    bench.store.release(bench.sweep_id, bench.epoch)
    with pytest.raises(UsageInvalid):
        bench.store.invalidate(where)
    assert len(bench.store.trials(bench.sweep_id)) == 1


def test_invalidate_keeps_to_the_sweep_it_is_given(store: Store) -> None:
    one, two = Bench.on(store, "one"), Bench.on(store, "two")
    kept, changed = one.measure(), two.measure()
    store.release(one.sweep_id, one.epoch)
    store.release(two.sweep_id, two.epoch)
    assert store.invalidate("1 = 1", sweep="two") == 1
    assert store.trial(kept).trial.state is TrialState.MEASURED
    assert store.trial(changed).trial.state is TrialState.QUEUED


def test_two_attempts_of_one_trial_cannot_both_count_whoever_writes(bench: Bench) -> None:
    trial_id = bench.measure()
    statement = sa.insert(schema.attempt).values(
        trial_id=trial_id, number=2, epoch=1, state="measured", started_at=now()
    )
    with pytest.raises(sa.exc.IntegrityError):
        bench.store._database.write(lambda connection, change: connection.execute(statement))


def test_several_threads_write_at_once(bench: Bench) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for size in range(first, first + 10):
                bench.measure(size)
                bench.store.renew(bench.sweep_id, bench.epoch)
        except BaseException as exc:  # noqa: BLE001  shown below
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(1 + 10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(bench.store.best(bench.sweep_id, top=100)[bench.cell_id]) == 40


def test_what_does_not_exist_is_said_so(bench: Bench) -> None:
    with pytest.raises(UsageInvalid, match="no trial with id 4711"):
        bench.store.trial(4711)
    with pytest.raises(UsageInvalid, match="no trial with id 4711"):
        start_attempt(bench.store, 4711, bench.epoch, [])
    with pytest.raises(UsageInvalid, match="no cell with id 4711"):
        add_trial(bench.store, 4711, layout(), epoch=bench.epoch)


def test_a_new_trial_is_added_and_started_in_one_commit(store: Store) -> None:
    bench = Bench.on(store)
    trial_id, attempt = begin_trial(
        store, bench.cell_id, layout(2), epoch=bench.epoch, why="the first", nodes=["node-a"]
    )
    detail = store.trial(trial_id)
    assert (attempt, detail.trial.state, detail.trial.num_attempts) == (1, TrialState.LAUNCHING, 1)
    assert (detail.trial.why, detail.attempts[0].nodes) == ("the first", ("node-a",))
    assert [(e.event, e.attempt) for e in store.events(bench.sweep_id)] == [
        ("added", None),
        ("gang_placed", 1),
    ]


def test_a_trial_that_waits_without_an_attempt_is_begun_as_it_stands(store: Store) -> None:
    bench = Bench.on(store)
    waiting = bench.add(2)
    assert begin_trial(store, bench.cell_id, layout(2), epoch=bench.epoch) == (waiting.id, 1)
    assert len(store.trials(bench.sweep_id)) == 1


def test_a_layout_that_has_been_measured_is_not_begun_again(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    before = store.events(bench.sweep_id)
    with pytest.raises(IllegalTransition):
        begin_trial(store, bench.cell_id, layout(2), epoch=bench.epoch)
    assert store.trial(trial_id).trial.state is TrialState.MEASURED
    assert store.events(bench.sweep_id) == before


def test_of_several_measurements_of_a_trial_the_median_one_stands_for_it(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2, tokens_per_second_per_gpu=1000.0)  # 0.5 s a step
    assert repeat(bench, trial_id, 500.0, 1.0)
    assert (
        store.trial(trial_id).trial.tokens_per_second_per_gpu,
        store.trial(trial_id).trial.num_measurements,
    ) == (500.0, 2)  # the slower
    assert repeat(bench, trial_id, 900.0, 0.55)
    row = store.trial(trial_id)
    assert (row.trial.state, row.trial.num_attempts, row.trial.num_measurements) == (
        TrialState.MEASURED,
        3,
        3,
    )
    assert row.trial.tokens_per_second_per_gpu == 900.0
    assert [(a.superseded, a.pooled) for a in row.attempts] == [
        (True, True),
        (True, True),
        (False, True),
    ]
    assert [r.step_seconds for r in store.repeats(bench.cell_id)[trial_id].runs] == [0.5, 1.0, 0.55]
    assert store.best(bench.sweep_id)[bench.cell_id][0].tokens_per_second_per_gpu == 900.0
    events = [e.event for e in store.events(bench.sweep_id)]
    assert events[-4:] == ["repeated", "measured", "repeated", "measured"]


def test_a_repeat_that_fails_takes_nothing_from_its_trial(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    attempt = start_repeat(store, trial_id, bench.epoch)
    state = record_failure(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=failure(),
        event=TrialEvent.OUT_OF_MEMORY,
    )
    assert state is TrialState.MEASURED
    row = store.trial(trial_id)
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (1000.0, 1)
    assert [a.state for a in row.attempts] == [AttemptState.MEASURED, AttemptState.OUT_OF_MEMORY]
    assert [e.event for e in store.events(bench.sweep_id)][-2:] == ["repeated", "repeat_failed"]
    assert repeat(bench, trial_id, 900.0, 0.55)


def test_a_repeat_of_a_dead_orchestrator_is_given_back_and_its_trial_stays_measured(
    store: Store,
) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    start_repeat(store, trial_id, bench.epoch)
    epoch = store.acquire(bench.sweep_id, host="elsewhere", pid=1, takeover=True)
    assert store.mark_lost(bench.sweep_id, epoch) == []
    row = store.trial(trial_id)
    assert row.trial.state is TrialState.MEASURED
    assert [a.state for a in row.attempts] == [AttemptState.MEASURED, AttemptState.LOST]
    assert store.mark_lost(bench.sweep_id, epoch) == []
    assert len(store.trial(trial_id).events) == len(row.events)


def test_a_repeat_measured_with_other_software_is_kept_and_does_not_count(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    assert not repeat(bench, trial_id, 2000.0, 0.25, torch="9.9")
    row = store.trial(trial_id)
    assert (row.trial.tokens_per_second_per_gpu, row.trial.num_measurements) == (1000.0, 1)
    assert [(a.state, a.superseded, a.pooled) for a in row.attempts] == [
        (AttemptState.MEASURED, False, True),
        (AttemptState.MEASURED, True, False),
    ]
    (event,) = [one for one in store.events(bench.sweep_id) if one.event == "superseded"]
    assert event.detail == {
        "reason": "measured with other code, software or device than the numbers that count"
    }


def test_an_invalidated_trial_starts_from_no_measurement(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    repeat(bench, trial_id, 900.0, 0.55)
    store.release(bench.sweep_id, bench.epoch)
    assert store.invalidate(f"trial_id = {trial_id}") == 1
    assert store.trial(trial_id).trial.num_measurements == 0
    again = Bench(
        store, bench.sweep_id, bench.cell_id, store.acquire(bench.sweep_id, host="h", pid=1)
    )
    attempt = start_attempt(store, trial_id, again.epoch)
    assert record_measurement(
        store,
        trial_id,
        attempt,
        epoch=again.epoch,
        measurement=measurement(700.0),
        fingerprint=fingerprint(),
    )
    row = store.trial(trial_id).trial
    assert (row.tokens_per_second_per_gpu, row.num_measurements) == (700.0, 1)


def test_only_what_is_measured_is_repeated(store: Store) -> None:
    bench = Bench.on(store)
    waiting = bench.add(2)
    with pytest.raises(IllegalTransition):
        start_repeat(store, waiting.id, bench.epoch)
    with pytest.raises(IllegalTransition):
        start_attempt(store, bench.measure(1), bench.epoch)


def test_a_repeat_told_twice_counts_both_times_though_it_is_not_the_median(store: Store) -> None:
    bench = Bench.on(store)
    trial_id = bench.measure(2)
    attempt = start_repeat(store, trial_id, bench.epoch)
    taken = measurement(2000.0)
    taken = replace(taken, step_time=replace(taken.step_time, median=0.25))
    for _ in range(2):
        assert record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=taken,
            fingerprint=fingerprint(),
        )
    assert store.trial(trial_id).trial.num_measurements == 2


def test_the_peak_that_a_repeat_measured_is_known_though_it_is_not_the_median(store: Store) -> None:
    bench = Bench.on(store)
    trial_id, attempt = bench.start(2)
    source = "measured: matmul, in trial 1"
    first = measurement(1000.0, peak_flops=1e12, peak_flops_source=source)
    record_measurement(
        store, trial_id, attempt, epoch=bench.epoch, measurement=first, fingerprint=fingerprint()
    )
    attempt = start_repeat(store, trial_id, bench.epoch, ["node-a", "node-b"])
    faster = measurement(2000.0, peak_flops=2e12, peak_flops_source=source)
    faster = replace(faster, step_time=replace(faster.step_time, median=0.25))
    record_measurement(
        store, trial_id, attempt, epoch=bench.epoch, measurement=faster, fingerprint=fingerprint()
    )
    assert max(peak.flops for peak in store.measured_peaks(bench.sweep_id)) == 2e12


def test_what_repeats_came_to_is_told_from_the_first_measurement_on(store: Store) -> None:
    bench = Bench.on(store)
    trial_id, attempt = bench.start(2)
    record_failure(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=failure(FailureKind.NODE_LOST),
        event=TrialEvent.REQUEUED,
    )
    attempt = start_attempt(store, trial_id, bench.epoch)
    record_measurement(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(),
        fingerprint=fingerprint(),
    )
    assert store.repeats(bench.cell_id) == {}
    attempt = start_repeat(store, trial_id, bench.epoch)
    record_failure(
        store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        failure=failure(FailureKind.NODE_LOST),
        event=TrialEvent.REQUEUED,
    )
    assert not repeat(bench, trial_id, 900.0, 0.55, torch="9.9")
    found = store.repeats(bench.cell_id)[trial_id]
    assert (len(found.runs), dict(found.failures)) == (1, {FailureKind.NODE_LOST: 1})
    assert found.others == (OtherRepeat(fingerprint=fingerprint("9.9"), failure_kind=None),)
    assert store.trials_that_met(bench.cell_id, FailureKind.NODE_LOST) == {trial_id}
    assert store.trials_that_met(bench.cell_id, FailureKind.OOM_HOST) == set()

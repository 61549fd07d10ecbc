"""The views say what their names say, on both databases."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from db.sql import readonly
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.machine_load import NO_LOAD, MachineLoad
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.purpose import Purpose
from orchestrator.core.trial.reserved_time import outcome_of
from tests.db.builders import (
    Bench,
    begin_trial,
    cell,
    failure,
    fingerprint,
    layout,
    measurement,
    record_failure,
    record_measurement,
    start_attempt,
    start_repeat,
)


def ask(url: str, sql: str) -> list[dict[str, Any]]:
    result = readonly.query(url, sql)
    return [dict(zip(result.columns, row, strict=True)) for row in result.rows]


def test_v_trial_has_one_row_per_trial_however_many_attempts(bench: Bench, store_url: str) -> None:
    trial_id, number = bench.start()
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.HUNG),
        event=TrialEvent.REQUEUED,
    )
    second = start_attempt(bench.store, trial_id, bench.epoch, ["node-b"])
    record_measurement(
        bench.store, trial_id, number, epoch=bench.epoch, measurement=measurement(9999.0)
    )
    record_measurement(
        bench.store,
        trial_id,
        second,
        epoch=bench.epoch,
        measurement=measurement(50.0),
        fingerprint=fingerprint(),
    )
    bench.add(2)
    measured, queued = ask(store_url, "SELECT * FROM v_trial ORDER BY trial_id")
    assert (
        measured["attempt"],
        measured["num_attempts"],
        measured["tokens_per_second_per_gpu"],
    ) == (2, 2, 50.0)
    assert (measured["model"], measured["layout"], measured["is_current_fingerprint"]) == (
        "llama-tiny",
        layout().key,
        True,
    )
    assert (queued["state"], queued["tokens_per_second"], queued["is_current_fingerprint"]) == (
        "queued",
        None,
        None,
    )


def test_v_trial_shows_no_failure_that_was_invalidated(bench: Bench, store_url: str) -> None:
    trial_id, number = bench.start()
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.USER_ERROR),
        event=TrialEvent.FAILED,
        gpu_seconds=2.0,
    )
    columns = "state, last_attempt_state, failure_kind, failure_message, gpu_seconds"
    (before,) = ask(store_url, f"SELECT {columns} FROM v_trial")
    assert list(before.values()) == ["failed", "failed", "user_error", "CUDA out of memory", 2.0]
    bench.store.release(bench.sweep_id, bench.epoch)
    assert bench.store.invalidate("failure_kind = 'user_error'") == 1
    (after,) = ask(store_url, f"SELECT {columns} FROM v_trial")
    assert list(after.values()) == ["queued", None, None, None, None]
    row = bench.store.trial(trial_id).trial
    assert (row.failure_kind, row.failure_message, row.gpu_seconds) == (None, None, None)


def test_v_best_shows_results_of_another_fingerprint_apart(bench: Bench, store_url: str) -> None:
    old = bench.measure(1, 5000.0, torch="2.12.0")
    bench.measure(2, 700.0)
    new = bench.measure(3, 800.0)
    rows = ask(
        store_url,
        "SELECT trial_id, is_current, tokens_per_second_per_gpu FROM v_best ORDER BY is_current",
    )
    assert [
        (row["trial_id"], bool(row["is_current"]), row["tokens_per_second_per_gpu"]) for row in rows
    ] == [
        (old, False, 5000.0),
        (new, True, 800.0),
    ]


def test_v_best_ranks_no_trial_that_was_ended_early(bench: Bench, store_url: str) -> None:
    for size, speed, bound in ((1, 1000.0, None), (2, 2000.0, 0.2)):
        trial_id, number = bench.start(size)
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=measurement(speed, step_seconds_bound=bound),
        )
    rows = ask(store_url, "SELECT tokens_per_second_per_gpu FROM v_best")
    assert [row["tokens_per_second_per_gpu"] for row in rows] == [1000.0]
    (ranked,) = bench.store.best(bench.sweep_id, 10).values()
    assert [trial.tokens_per_second_per_gpu for trial in ranked] == [1000.0]


def test_v_oom_shows_what_ran_out_and_what_it_condemned(bench: Bench, store_url: str) -> None:
    proof, number = bench.start(4)
    record_failure(
        bench.store,
        proof,
        number,
        epoch=bench.epoch,
        failure=failure(),
        event=TrialEvent.OUT_OF_MEMORY,
        peak_memory_bytes=90,
        device_memory_bytes=80,
    )
    bench.prune([8], condemned_by=proof)
    bench.measure(1)
    ran_out, pruned = ask(store_url, "SELECT * FROM v_oom ORDER BY trial_id")
    assert (ran_out["failure_peak_memory_bytes"], ran_out["failure_kind"]) == (90, "oom_gpu")
    assert (pruned["condemned_by"], pruned["condemned_by_layout"], pruned["why"]) == (
        proof,
        layout(4).key,
        "needs more than what ran out of memory",
    )


def test_v_scaling_is_relative_to_the_smallest_number_of_gpus(bench: Bench, store_url: str) -> None:
    store, epoch = bench.store, bench.epoch
    bench.measure(1, 1000.0)
    for num_gpus, per_gpu in ((4, 900.0), (8, 750.0)):
        cell_id = store.ensure_cell(bench.sweep_id, cell(num_gpus=num_gpus), epoch)
        trial_id, number = begin_trial(store, cell_id, layout(), epoch=epoch, nodes=["n"])
        numbers = measurement(per_gpu, tokens_per_second=per_gpu * num_gpus)
        record_measurement(
            store, trial_id, number, epoch=epoch, measurement=numbers, fingerprint=fingerprint()
        )
    rows = ask(
        store_url,
        "SELECT num_gpus, smallest_num_gpus, speed_up, efficiency, is_comparable FROM v_scaling "
        "ORDER BY num_gpus",
    )
    assert [(row["num_gpus"], row["smallest_num_gpus"]) for row in rows] == [(2, 2), (4, 2), (8, 2)]
    # 2000, 3600 and 6000 tokens/s over 2000.
    assert [row["speed_up"] for row in rows] == pytest.approx([1.0, 1.8, 3.0])
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 0.9, 0.75])
    assert all(row["is_comparable"] for row in rows)


def test_v_failure_names_the_node_rank_and_evidence(bench: Bench, store_url: str) -> None:
    trial_id, number = bench.start()
    crash = failure(FailureKind.SEGFAULT, signal=11, log_path="/runs/1/log-1.txt")
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=crash,
        event=TrialEvent.FAILED,
        processes_killed=2,
    )
    (row,) = ask(store_url, "SELECT * FROM v_failure")
    names = (
        "failure_kind",
        "failure_node",
        "failure_rank",
        "failure_signal",
        "failure_log_path",
        "processes_killed",
    )
    assert [row[name] for name in names] == ["segfault", "node-a", 1, 11, "/runs/1/log-1.txt", 2]


def test_v_event_is_the_log_with_names(bench: Bench, store_url: str) -> None:
    bench.measure()
    rows = ask(
        store_url, "SELECT sweep, cell, event, from_state, to_state FROM v_event ORDER BY event_id"
    )
    assert [row["event"] for row in rows] == ["added", "gang_placed", "first_step", "measured"]
    assert rows[0]["cell"] == "llama-tiny_2gpu_s128_gb64"


def test_options_that_vary_are_asked_for_by_name(bench: Bench, store_url: str) -> None:
    eager = bench.add(1, options=(("attention", "eager"), ("fused", True), ("threads", 2)))
    bench.add(1, options=(("attention", "sdpa"), ("fused", False), ("threads", 2)))
    bench.add(1)
    assert eager.layout.options == (("attention", "eager"), ("fused", True), ("threads", 2))
    (row,) = ask(
        store_url, "SELECT trial_id, layout FROM v_trial WHERE options ->> 'attention' = 'eager'"
    )
    assert row == {"trial_id": eager.id, "layout": eager.layout.key}
    assert ask(store_url, "SELECT count(*) AS n FROM v_trial WHERE options IS NULL") == [{"n": 1}]
    assert [trial.layout.options for trial in bench.store.trials(bench.sweep_id)][1:] == [
        (("attention", "sdpa"), ("fused", False), ("threads", 2)),
        (),
    ]


def test_trials_are_measured_again_by_their_options(bench: Bench) -> None:
    for kernel in ("a", "b"):
        varied = layout(options=(("kernel", kernel),))
        trial_id, attempt = begin_trial(
            bench.store, bench.cell_id, varied, epoch=bench.epoch, nodes=["node-a"]
        )
        record_measurement(
            bench.store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=measurement(),
            fingerprint=fingerprint(),
        )
    bench.store.release(bench.sweep_id, bench.epoch)
    assert bench.store.invalidate("options ->> 'kernel' = 'a'") == 1


def test_v_run_shows_how_each_repeat_differs_from_the_first(bench: Bench, store_url: str) -> None:
    trial_id = bench.measure(2, tokens_per_second_per_gpu=1000.0)
    for purpose, seconds in ((Purpose.ANCHOR, 0.8), (Purpose.CONFIRMATION, 0.5)):
        number = start_repeat(bench.store, trial_id, bench.epoch, ["node-a"], purpose=purpose)
        taken = measurement()
        taken = replace(taken, step_time=replace(taken.step_time, median=seconds))
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=taken,
            fingerprint=fingerprint(),
        )
    rows = ask(
        store_url,
        "SELECT attempt, purpose, step_seconds_median, change_since_first FROM v_run ORDER BY "
        "attempt",
    )
    assert [(row["attempt"], row["purpose"], row["step_seconds_median"]) for row in rows] == [
        (1, "new", 0.5),
        (2, "anchor", 0.8),
        (3, "confirmation", 0.5),
    ]
    assert [row["change_since_first"] for row in rows] == [
        None,
        pytest.approx(0.6),
        pytest.approx(0.0),
    ]


def test_v_cell_tells_the_noise_floor_by_repeats_of_one_layout(
    bench: Bench, store_url: str
) -> None:
    first, number = bench.start()
    record_measurement(bench.store, first, number, epoch=bench.epoch, measurement=measurement())
    sql = "SELECT num_runs, num_repeats, noise_floor, largest_change FROM v_cell"
    unknown = {"num_runs": 1, "num_repeats": 0, "noise_floor": None, "largest_change": None}
    assert ask(store_url, sql) == [unknown]
    for median in (0.51, 0.495):
        again = start_repeat(bench.store, first, bench.epoch, purpose=Purpose.ANCHOR)
        step_time = replace(measurement().step_time, median=median)
        record_measurement(
            bench.store,
            first,
            again,
            epoch=bench.epoch,
            measurement=measurement(step_time=step_time),
        )
    (row,) = ask(store_url, sql)
    # 2 % slower and 1 % faster than 0.5 s.
    assert (row["num_runs"], row["num_repeats"]) == (3, 2)
    assert row["noise_floor"] == pytest.approx(0.015)
    assert row["largest_change"] == pytest.approx(0.02)


def test_v_run_shows_which_run_had_another_clock_than_its_cell(
    bench: Bench, store_url: str
) -> None:
    for power, mhz in enumerate((1700.0, 1755.0, 1755.0, None)):
        trial_id, number = bench.start(2**power)
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=measurement(),
            gpu=GpuUsage(clock_mhz=mhz, power_watts=500.0),
        )
    rows = ask(
        store_url,
        "SELECT gpu_clock_off, joules_per_token, usual_gpu_clock_mhz FROM v_run ORDER BY trial_id",
    )
    assert [row["gpu_clock_off"] for row in rows] == [pytest.approx(1700 / 1755 - 1), 0, 0, None]
    assert {row["joules_per_token"] for row in rows} == {0.5}, "500 W at 1,000 tokens a second"
    (of_cell,) = ask(store_url, "SELECT usual_gpu_clock_mhz FROM v_cell")
    assert of_cell["usual_gpu_clock_mhz"] == 1755.0


def test_v_run_shows_the_load_of_each_run(bench: Bench, store_url: str) -> None:
    trial_id, first = bench.start()
    busy = MachineLoad(
        cpu_cores=2.0,
        own_cpu_cores=0.2,
        sweep_cpu_cores=0.1,
        others_cpu_cores=1.7,
        foreign_gpu_processes=3,
        gpu_clock_ratio=0.6,
        gpu_throttled_fraction=0.5,
        gpu_throttle_reasons=("hw_slowdown", "sw_power_cap"),
        gpu_temperature_celsius=91.0,
    )
    for load in (busy, NO_LOAD):
        number = first if load is busy else start_repeat(bench.store, trial_id, bench.epoch)
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=measurement(),
            fingerprint=fingerprint(),
            load=load,
        )
    columns = [field.name for field in fields(MachineLoad)]
    rows = ask(store_url, f"SELECT {', '.join(columns)} FROM v_run ORDER BY attempt")
    known = {name: getattr(busy, name) for name in columns}
    known["gpu_throttle_reasons"] = "hw_slowdown, sw_power_cap"
    assert rows == [known, dict.fromkeys(columns)]


def test_an_attempt_says_why_it_was_made(bench: Bench) -> None:
    trial_id, number = bench.start()
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.HUNG),
        event=TrialEvent.REQUEUED,
    )
    start_attempt(bench.store, trial_id, bench.epoch, ["node-b"])
    assert [attempt.purpose for attempt in bench.store.trial(trial_id).attempts] == [
        Purpose.NEW,
        Purpose.RETRY,
    ]


@pytest.mark.parametrize("kind", FailureKind)
def test_v_gpu_seconds_sorts_failures_as_the_core_does(
    bench: Bench, store_url: str, kind: FailureKind
) -> None:
    trial_id, number = bench.start()
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(kind),
        event=TrialEvent.REQUEUED,
        gpu_seconds=2.0,
    )
    part = outcome_of(kind, counts=False)
    (row,) = ask(
        store_url,
        f"SELECT {part}_gpu_seconds AS own, reserved_gpu_seconds AS held FROM v_gpu_seconds "
        "WHERE cell_id IS NOT NULL",
    )
    assert (row["own"], row["held"]) == (2.0, 2.0)

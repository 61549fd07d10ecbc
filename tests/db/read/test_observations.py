"""The data for calibration: measurements that count and out-of-memories of all sweeps."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from db.read import observations
from db.store import Store
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.protocol import Phase
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
    start_repeat,
)

H100 = "NVIDIA H100 80GB HBM3"


def out_of_memory(
    bench: Bench, micro_batch_size: int, kind: FailureKind = FailureKind.OOM_GPU
) -> int:
    trial_id, number = bench.start(micro_batch_size)
    record_failure(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        failure=failure(kind),
        event=TrialEvent.OUT_OF_MEMORY,
        peak_memory_bytes=81 << 30,
        device_memory_bytes=80 << 30,
        gpu_seconds=20.0,
    )
    return trial_id


def another_sweep(store: Store, name: str, conditions: dict[str, object]) -> Bench:
    sweep_id = store.ensure_sweep(name, "{}", conditions)
    epoch = store.acquire(sweep_id, host=socket.gethostname(), pid=os.getpid())
    return Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)


def test_what_was_measured_and_what_ran_out_of_memory_are_observations_and_nothing_else_is(
    bench: Bench,
) -> None:
    measured = bench.measure(1)
    oom = out_of_memory(bench, 4)
    host = out_of_memory(bench, 8, FailureKind.OOM_HOST)  # says nothing of the device's memory
    failed, number = bench.start(2)
    record_failure(
        bench.store,
        failed,
        number,
        epoch=bench.epoch,
        failure=failure(FailureKind.USER_ERROR),
        event=TrialEvent.FAILED,
    )
    bench.start(16)
    bench.prune([32], condemned_by=oom)
    found = bench.store.observations()
    assert [(row.trial_id, row.out_of_memory) for row in found] == [(measured, False), (oom, True)]
    assert host not in [row.trial_id for row in found]


def test_a_counter_that_reads_zero_was_not_read(bench: Bench) -> None:
    trial_id, number = bench.start(2)
    zeros = measurement(peak_memory_reserved_bytes=0, device_memory_bytes=0, peak_flops=0.0)
    record_measurement(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        measurement=zeros,
        fingerprint=fingerprint(),
        gpu_seconds=4.0,
    )
    (row,) = bench.store.observations()
    assert (row.peak_memory_bytes, row.is_peak_reserved) == (
        70 << 30,
        False,
    )  # what was allocated was read
    assert (row.device_memory_bytes, row.peak_flops) == (None, None)


def test_a_measurement_comes_with_its_cell_layout_device_stack_and_cost(bench: Bench) -> None:
    trial_id, number = bench.start(2)
    record_measurement(
        bench.store,
        trial_id,
        number,
        epoch=bench.epoch,
        measurement=measurement(),
        fingerprint=fingerprint(),
        phases={Phase.START: 1.0, Phase.STEADY: 30.0},
        gpu_seconds=94.0,
    )
    (row,) = bench.store.observations()
    assert (row.sweep.name, row.cell, row.layout) == ("tiny", cell(), layout(2))
    assert (row.step_seconds, row.num_steps, row.thrashing) == (0.5, 3, False)
    assert (row.device_name, row.torch, row.cuda, row.driver) == (H100, "2.13.0", "13.0", "580.1")
    assert (row.peak_flops, row.peak_flops_source) == (989e12, "table: h100-sxm bf16")
    assert row.num_nodes == 2  # a GPU on each
    assert (row.reserved_seconds, row.steady_seconds) == (47.0, 30.0)  # 94 GPU-seconds of two GPUs


def test_reserved_memory_counts_where_it_is_known_and_allocated_memory_elsewhere(
    bench: Bench,
) -> None:
    for micro_batch_size, reserved in ((1, 75 << 30), (2, None)):
        trial_id, number = bench.start(micro_batch_size)
        value = measurement(peak_memory_reserved_bytes=reserved)
        record_measurement(bench.store, trial_id, number, epoch=bench.epoch, measurement=value)
    found = bench.store.observations()
    assert [(row.peak_memory_bytes, row.is_peak_reserved) for row in found] == [
        (75 << 30, True),
        (70 << 30, False),
    ]


def test_what_a_driver_saw_is_no_peak_of_the_allocator(bench: Bench) -> None:
    trial_id, number = bench.start(1)
    value = measurement(peak_memory_allocated_bytes=None, peak_memory_reserved_bytes=None)
    assert value.peak_memory_driver_bytes is not None
    record_measurement(bench.store, trial_id, number, epoch=bench.epoch, measurement=value)
    (row,) = bench.store.observations()
    assert (row.peak_memory_bytes, row.is_peak_reserved) == (None, None)
    (trial,) = bench.store.trials(bench.sweep_id)
    assert (trial.peak_memory_allocated_bytes, trial.peak_memory_driver_bytes) == (None, 77 << 30)


def test_an_out_of_memory_has_the_limit_that_it_met_and_the_device_of_its_cell(
    bench: Bench,
) -> None:
    out_of_memory(bench, 4)
    (alone,) = bench.store.observations()
    assert (
        alone.device_name,
        alone.device_memory_bytes,
        alone.step_seconds,
        alone.peak_memory_bytes,
    ) == (None, 80 << 30, None, None)
    bench.measure(1)
    oom, measured = bench.store.observations()
    assert oom.out_of_memory
    assert oom.device_name == measured.device_name == H100


def test_what_was_invalidated_is_no_observation(bench: Bench) -> None:
    bench.measure(1)
    out_of_memory(bench, 4)
    bench.store.release(bench.sweep_id, bench.epoch)
    bench.store.invalidate("micro_batch_size >= 1")
    assert bench.store.observations() == []


def test_a_trial_measured_again_is_one_observation_with_the_median(bench: Bench) -> None:
    trial_id = bench.measure(1, 1000.0)
    for seconds in (0.7, 0.9):
        number = start_repeat(bench.store, trial_id, bench.epoch, ["node-a", "node-b"])
        value = measurement(step_time=replace(measurement().step_time, median=seconds))
        record_measurement(
            bench.store,
            trial_id,
            number,
            epoch=bench.epoch,
            measurement=value,
            fingerprint=fingerprint(),
        )
    (row,) = bench.store.observations()
    assert row.step_seconds == 0.7  # of 0.5, 0.7 and 0.9


def test_sweeps_workloads_and_devices_can_be_asked_for(store: Store) -> None:
    first = another_sweep(
        store, "first", {"workload": "llama", "workload.options.attention": "sdpa"}
    )
    second = another_sweep(store, "second", {"workload": "command"})
    mine, other = first.measure(1), second.measure(2)
    oom = out_of_memory(second, 8)

    def ids(**choice: object) -> list[int]:
        return [row.trial_id for row in store.observations(**choice)]  # type: ignore[arg-type]

    assert ids() == [mine, other, oom]
    assert ids(workload="llama") == ids(sweep="first") == [mine]
    assert ids(workload="synthetic") == []
    assert ids(is_relative=lambda conditions: "workload.options.attention" in conditions) == [mine]
    assert ids(
        is_device=lambda name, sources: (name, list(sources)) == (H100, ["table: h100-sxm bf16"])
    ) == [mine, other, oom]
    assert ids(is_device=lambda name, sources: False) == []
    assert (
        store.observations(workload="llama")[0].sweep.conditions["workload.options.attention"]
        == "sdpa"
    )


def test_of_a_large_cell_an_even_selection_is_given_and_of_all_the_newest(bench: Bench) -> None:
    ids = [bench.measure(size) for size in range(1, 11)]
    small = bench.store.ensure_cell(bench.sweep_id, cell(model=PRESETS["llama-60m"]), bench.epoch)
    number = begin_trial(bench.store, small, Layout(data_parallel_size=2), epoch=bench.epoch)
    record_measurement(
        bench.store,
        *number,
        epoch=bench.epoch,
        measurement=measurement(),
        fingerprint=fingerprint(),
    )

    def chosen(**limits: int) -> list[int]:
        rows = bench.store._database.read(
            lambda connection: observations.observations(connection, **limits)
        )  # type: ignore[arg-type]
        return [row.trial_id for row in rows]

    assert chosen(per_cell=5) == [*ids[1::2], number[0]]
    assert chosen(per_cell=3) == [ids[3], ids[6], ids[9], number[0]]
    assert chosen(most=2) == [ids[-1], number[0]]

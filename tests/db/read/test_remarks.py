"""What is not ranked or looks unusual, on SQLite and PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from db.read.rows import EndedEarlyRow, ImplausibleRow
from db.store import Store
from orchestrator.core.trial.node_report import GpuUsage
from tests.db.builders import (
    Bench,
    cell,
    fingerprint,
    layout,
    measurement,
    record_measurement,
    start_repeat,
)


def measure(bench: Bench, micro_batch_size: int, **facts: Any) -> int:
    """Measure a layout, whose value is replaced by `facts`; returns the trial's id."""
    trial_id, attempt = bench.start(micro_batch_size)
    value = measurement(100.0 * micro_batch_size, **facts.pop("value", {}))
    conditions = facts.pop("fingerprint", fingerprint())
    record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=value,
        fingerprint=conditions,
        **facts,
    )
    return trial_id


def test_implausible_trials_are_counted_for_each_cell_without_a_best_by_itself(
    store: Store,
) -> None:
    one = Bench.on(store)
    others = [
        replace(one, cell_id=store.ensure_cell(one.sweep_id, cell(sequence_length=n), one.epoch))
        for n in (256, 512)
    ]

    def counts() -> list[int | None]:
        return [status.num_implausible for status in store.status(one.sweep_id)]

    assert counts() == [None, None, None]
    for bench in (one, *others):
        measure(bench, 1, value={"implausible": "too fast"})
    assert counts() == [1, 1, 1]
    measure(others[0], 2)
    assert counts() == [1, None, 1]


def test_trials_that_are_not_ranked_say_why_and_only_of_their_sweep(store: Store) -> None:
    bench, other = Bench.on(store), Bench.on(store, "other")
    measure(bench, 1)
    measure(other, 1, value={"implausible": "another sweep"})
    untrue = measure(bench, 2, value={"implausible": "too fast"})
    slow = measure(bench, 4, value={"step_seconds_bound": 0.7})
    assert store.implausible(bench.sweep_id) == [
        ImplausibleRow(
            cell_id=bench.cell_id,
            trial_id=untrue,
            layout=layout(2).key,
            tokens_per_second_per_gpu=200.0,
            implausible="too fast",
        )
    ]
    assert store.ended_early(bench.sweep_id) == [
        EndedEarlyRow(
            cell_id=bench.cell_id, trial_id=slow, layout=layout(4).key, step_seconds_bound=0.7
        )
    ]


def test_a_run_at_another_clock_is_found_beyond_a_bound(store: Store) -> None:
    bench = Bench.on(store)
    # The median of the cell is 1755 MHz.
    low, *_ = [
        measure(bench, 2**power, gpu=GpuUsage(clock_mhz=mhz, power_watts=None))
        for power, mhz in enumerate((1700.0, 1755.0, 1755.0))
    ]
    (found,) = store.other_clocks(bench.sweep_id, beyond=0.03)
    assert (found.cell_id, found.trial_id, found.attempt) == (bench.cell_id, low, 1)
    assert (found.gpu_clock_mhz, found.gpu_clock_off) == (1700.0, pytest.approx(1700 / 1755 - 1))
    assert store.other_clocks(bench.sweep_id, beyond=0.04) == []


def test_the_best_under_each_other_fingerprint_comes_the_fastest_first(store: Store) -> None:
    bench = Bench.on(store)
    measured = {
        size: measure(bench, size, fingerprint=fingerprint(torch))
        for size, torch in ((1, "2.9.0"), (2, "2.9.0"), (8, "2.10.0"), (4, "2.13.0"))
    }
    found = store.best_of_other_fingerprints(bench.sweep_id)
    assert [trial.id for trial in found] == [measured[8], measured[2]]


def test_the_noise_floor_is_known_for_cells_with_repeats(store: Store) -> None:
    bench, quiet = Bench.on(store), Bench.on(store, "quiet")
    measure(quiet, 1)
    trial_id = measure(bench, 1)
    for median in (0.51, 0.49):
        attempt = start_repeat(store, trial_id, bench.epoch)
        again = measurement(step_time=replace(measurement().step_time, median=median))
        record_measurement(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            measurement=again,
            fingerprint=fingerprint(),
        )
    assert store.noise_floors(quiet.sweep_id) == {}
    floor = store.noise_floors(bench.sweep_id)[bench.cell_id]
    # 2 % slower and 2 % faster than the first run, of 0.5 s.
    assert (floor.relative, floor.num_repeats) == (pytest.approx(0.02), 2)


def test_attempts_with_more_seconds_of_steps_than_reserved_are_counted(store: Store) -> None:
    bench = Bench.on(store)
    # Two GPUs for two seconds.
    for size, timed_seconds in ((1, 1.0), (2, 2.0), (4, 3.0)):
        measure(bench, size, gpu_seconds=4.0, timed_seconds=timed_seconds, warmup_seconds=0.0)
    assert store.num_with_longer_steps(bench.sweep_id) == 2

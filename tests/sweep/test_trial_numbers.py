"""The numbers of a stored trial from which its objectives follow."""

from __future__ import annotations

import pytest

from db.store import Store
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.sweep.trial_numbers import numbers_of
from tests.db.builders import Bench, measurement, record_measurement


@pytest.mark.parametrize(("told", "free"), [(80 << 30, 0.25), (None, 0.4)])
def test_the_memory_of_the_device_is_the_trials_else_the_given_one(
    sqlite_store: Store, told: int | None, free: float
) -> None:
    bench = Bench.on(sqlite_store)
    trial_id, number = bench.start(1)
    measured = measurement(
        peak_memory_reserved_bytes=60 << 30,
        peak_memory_driver_bytes=None,
        peak_memory_driver_kind=None,
        device_memory_bytes=told,
    )
    record_measurement(sqlite_store, trial_id, number, epoch=bench.epoch, measurement=measured)
    (trial,) = sqlite_store.trials(bench.sweep_id)
    numbers = numbers_of(trial, device_memory_bytes=float(100 << 30), price_per_gpu_hour=3.6)
    assert numbers.value(Objective.MEMORY_HEADROOM) == pytest.approx(free)
    assert numbers.value(Objective.STEP_SECONDS) == 0.5
    assert numbers.value(Objective.DOLLARS_PER_BILLION_TOKENS) == pytest.approx(1000.0)

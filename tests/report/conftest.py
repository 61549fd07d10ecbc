"""A store with a trial in every state and with hostile texts, and the rows of its sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from db.sql import readonly
from db.store import Store
from db.write.writes import ProfileEnd
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent
from orchestrator.core.trial.memory_timeline import MemoryKind
from orchestrator.core.trial.rank_profile import MemoryMoment
from orchestrator.core.trial.step_part import StepPart
from orchestrator.core.trial.trace_split import Part
from orchestrator.report.sweep_rows import SweepRows, read_rows
from tests.cli.cli_store import Filled, fill
from tests.core.trial.rank_profiles import rank_profile
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
)

STEPS = measurement().step_time
TOKENS = cell().tokens_per_step
Query = Callable[[str], list[Any]]


@pytest.fixture(scope="session")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return f"sqlite:///{folder}/sweep.sqlite"


@pytest.fixture(scope="session")
def filled(report_url: str, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    with Store.open(report_url) as store:
        found = fill(store, tmp_path_factory.mktemp("logs"))
        _scale(store)
        return found


def _scale(store: Store) -> None:
    """A second sweep: one problem on 2 and on 4 GPUs, some repeated, some failed."""
    bench = Bench.on(store, "scaling")
    larger = store.ensure_cell(bench.sweep_id, cell(num_gpus=4), bench.epoch)
    for cell_id, num_gpus, factor in ((bench.cell_id, 2, 1.0), (larger, 4, 0.8)):
        for size, speed in ((1, 700.0), (2, 900.0), (4, 1000.0)):
            shape = layout(size, grad_accum_steps=64 // size // 2)
            predicted = speed * factor * (1.1 if size == 2 else 0.95)
            trial_id, attempt = begin_trial(
                store,
                cell_id,
                shape,
                epoch=bench.epoch,
                predicted_tokens_per_second_per_gpu=predicted,
                predicted_memory_bytes=(10 + 20 * size) << 30,
                nodes=["node-a", "node-b"],
            )
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=bench.epoch,
                measurement=measurement(
                    speed * factor,
                    step_time=replace(STEPS, median=TOKENS / (num_gpus * speed * factor)),
                    mfu=speed * factor / 2500,
                    peak_memory_allocated_bytes=(12 + 15 * size) << 30,
                    peak_memory_reserved_bytes=(13 + 15 * size) << 30,
                ),
                fingerprint=fingerprint(),
                memory_by_part={"parameters": 4 << 30, "activations": (15 * size) << 30},
                gpu_seconds=30.0 * size,
                timed_seconds=5.0,
                warmup_seconds=1.0,
            )
        trial_id, attempt = begin_trial(
            store, cell_id, layout(8), epoch=bench.epoch, nodes=["node-b"]
        )
        record_failure(
            store,
            trial_id,
            attempt,
            epoch=bench.epoch,
            failure=failure(FailureKind.OOM_GPU, node="node-b"),
            event=TrialEvent.OUT_OF_MEMORY,
            device_memory_bytes=80 << 30,
            gpu_seconds=12.0,
        )
    _profile(store, bench.cell_id)


def _profile(store: Store, cell_id: int) -> None:
    """A profile of the fastest trial, with the memory of its first steps."""
    trial_id = store.best(2)[cell_id][0].id
    moments = [
        MemoryMoment(step=step, part=part, num_bytes={MemoryKind.PARAMETERS: size << 30})
        for step in (1, 2)
        for part, size in ((StepPart.FORWARD, 2), (StepPart.BACKWARD, 3 + step))
    ]
    found = rank_profile({Part.EXPOSED_DP: 300_000}, is_slowest=True, memory=moments)
    store.end_profile(
        ProfileEnd(
            trial_id=trial_id,
            number=store.begin_profile(trial_id),
            nodes=("node-a",),
            gpu_seconds=1.0,
            ranks={0: rank_profile(memory=moments), 1: found},
            advice=("overlap the gradients",),
            failure=None,
        )
    )


@pytest.fixture(scope="session")
def tiny(report_url: str, filled: Filled) -> SweepRows:
    """A sweep with a trial in every state and hostile texts."""
    with Store.open(report_url, to_read=True) as store:
        return read_rows(store, store.sweep_named("tiny"))


@pytest.fixture(scope="session")
def scaling(report_url: str, filled: Filled) -> SweepRows:
    """A sweep of one problem on 2 and on 4 GPUs."""
    with Store.open(report_url, to_read=True) as store:
        return read_rows(store, store.sweep_named("scaling"))


@pytest.fixture(scope="session")
def empty(report_url: str, filled: Filled) -> SweepRows:
    """A sweep that has not begun."""
    with Store.open(report_url) as store:
        store.ensure_sweep("empty", "{}", {})
        return read_rows(store, store.sweep_named("empty"))


@pytest.fixture(scope="session")
def query(report_url: str, filled: Filled) -> Query:
    """Rows by SQL: what pictures are checked against."""
    return lambda statement: [tuple(row) for row in readonly.query(report_url, statement).rows]

"""Small values for the tests of the store: what a test does not say is filled in here."""

from __future__ import annotations

import datetime as dt
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import sqlalchemy as sa

from db import schema
from db.connection.engine import Change, Database
from db.read import trials
from db.read.rows import TrialRow
from db.store import Store
from db.write.writes import (
    NO_USAGE,
    AttemptFacts,
    Ended,
    FailedEnd,
    MeasuredEnd,
    NewAttempt,
    NewTrial,
    Pruned,
)
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import Failure, FailureKind, MemoryShortage
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.measurement import Measurement, StepTime
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import DriverMemoryKind
from orchestrator.core.trial.purpose import Purpose

CONDITIONS = {"measurement": {"warmup_steps": 3}, "precision": "bf16"}


def cell(**changes: Any) -> Cell:
    return replace(
        Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=128, global_batch_size=64),
        **changes,
    )


def layout(micro_batch_size: int = 1, **changes: Any) -> Layout:
    return Layout(data_parallel_size=2, micro_batch_size=micro_batch_size, **changes)


def measurement(tokens_per_second_per_gpu: float = 1000.0, **changes: Any) -> Measurement:
    value = Measurement(
        tokens_per_second=2 * tokens_per_second_per_gpu,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        step_time=StepTime(median=0.5, iqr=0.01, num_steps=3, relative_confidence=0.015),
        step_seconds=(0.49, 0.5, 0.51),
        confident=True,
        mfu=0.41,
        hfu=0.52,
        mfu_formula="6*N_matmul+12*L*d_attn*s",
        peak_flops=989e12,
        peak_flops_source="table: h100-sxm bf16",
        peak_memory_allocated_bytes=70 << 30,
        peak_memory_reserved_bytes=75 << 30,
        device_memory_bytes=80 << 30,
        allocator_retries=0,
        thrashing=False,
        loss_first=10.5,
        loss_last=9.25,
        peak_memory_driver_bytes=77 << 30,
        peak_memory_driver_kind=DriverMemoryKind.NVML,
        attention_kernel="flash",
        compile_seconds=9.5,
        extra={"tflops": 239.8, "by_layer": [1, None]},
    )
    return replace(value, **changes)


def fingerprint(torch: str = "2.13.0") -> Fingerprint:
    stack = Stack(
        python="3.11.2",
        torch=torch,
        cuda="13.0",
        nccl="2.29",
        driver="580.1",
        device_name="NVIDIA H100 80GB HBM3",
    )
    packages = (("numpy", "2.1"), ("torch", torch))
    return Fingerprint(
        orchestrator_version="0.1.0", git_sha="0123abcd", stack=stack, packages=packages
    )


def edited(digest: str) -> Fingerprint:
    """The same fingerprint with other code."""
    return fingerprint().model_copy(update={"dirty_diff_digest": digest})


def failure(kind: FailureKind = FailureKind.OOM_GPU, **changes: Any) -> Failure:
    value = Failure(
        kind=kind,
        message="CUDA out of memory",
        rank=1,
        node="node-a",
        phase="first_step",
        step=0,
        evidence="OutOfMemoryError",
        memory=MemoryShortage(is_reported=True) if kind is FailureKind.OOM_GPU else None,
    )
    return replace(value, **changes)


def begin_trial(
    store: Store,
    cell_id: int,
    layout: Layout,
    *,
    epoch: int,
    why: str | None = None,
    predicted_tokens_per_second_per_gpu: float | None = None,
    predicted_memory_bytes: float | None = None,
    nodes: Sequence[str] | None = None,
) -> tuple[int, int]:
    """`begin_trials` of one."""
    new = NewTrial(
        cell_id=cell_id,
        layout=layout,
        why=why,
        predicted_tokens_per_second_per_gpu=predicted_tokens_per_second_per_gpu,
        predicted_memory_bytes=predicted_memory_bytes,
        nodes=nodes,
    )
    return store.begin_trials([new], epoch=epoch)[0]


def start_attempt(
    store: Store,
    trial_id: int,
    epoch: int,
    nodes: Sequence[str] | None = None,
    *,
    shared_nodes: bool | None = None,
) -> int:
    """`begin_trials` of one that is QUEUED: the number of its new attempt."""
    return store.begin_trials(
        [NewAttempt(trial_id=trial_id, nodes=nodes, shared_nodes=shared_nodes)], epoch=epoch
    )[0][1]


def start_repeat(
    store: Store,
    trial_id: int,
    epoch: int,
    nodes: Sequence[str] | None = None,
    *,
    why: str | None = None,
    purpose: Purpose = Purpose.CONFIRMATION,
) -> int:
    """`begin_trials` of a MEASURED trial; the median of its measurements counts."""
    return store.begin_trials(
        [NewAttempt(trial_id=trial_id, nodes=nodes, purpose=purpose, why=why)], epoch=epoch
    )[0][1]


def record_measurement(
    store: Store,
    trial_id: int,
    attempt: int,
    *,
    epoch: int,
    measurement: Measurement,
    gpu: GpuUsage = NO_USAGE,
    memory_by_part: Mapping[str, int] | None = None,
    **facts: Unpack[AttemptFacts],
) -> bool:
    """`record_ends` of a measured attempt. True: it counts; False: another came first."""
    outcome = MeasuredEnd(measurement=measurement, gpu=gpu, memory_by_part=memory_by_part)
    return store.record_ends(
        [Ended(trial_id=trial_id, attempt=attempt, outcome=outcome, facts=facts)], epoch=epoch
    )[0].counts


def end_of(
    attempt: tuple[int, int], code: Fingerprint, tokens_per_second_per_gpu: float = 1000.0
) -> Ended:
    """The end of a measured attempt."""
    trial_id, number = attempt
    taken = measurement(tokens_per_second_per_gpu)
    taken = replace(
        taken, step_time=replace(taken.step_time, median=500.0 / taken.tokens_per_second_per_gpu)
    )
    outcome = MeasuredEnd(measurement=taken)
    return Ended(trial_id=trial_id, attempt=number, outcome=outcome, facts={"fingerprint": code})


def record_failure(
    store: Store,
    trial_id: int,
    attempt: int,
    *,
    epoch: int,
    failure: Failure,
    event: TrialEvent,
    peak_memory_bytes: int | None = None,
    device_memory_bytes: int | None = None,
    **facts: Unpack[AttemptFacts],
) -> TrialState:
    """`record_ends` of a failed attempt; returns its trial's new state."""
    outcome = FailedEnd(
        failure=failure,
        event=event,
        peak_memory_bytes=peak_memory_bytes,
        device_memory_bytes=device_memory_bytes,
    )
    return store.record_ends(
        [Ended(trial_id=trial_id, attempt=attempt, outcome=outcome, facts=facts)], epoch=epoch
    )[0].state


def add_trial(
    store: Store,
    cell_id: int,
    layout: Layout,
    *,
    epoch: int,
    why: str | None = None,
    predicted_tokens_per_second_per_gpu: float | None = None,
    predicted_memory_bytes: float | None = None,
) -> TrialRow:
    """A QUEUED trial without an attempt, as `free_pruned` leaves one.

    The layout has no trial yet, or a QUEUED one, which is returned as it was.
    """
    trial_id, _ = begin_trial(
        store,
        cell_id,
        layout,
        epoch=epoch,
        why=why,
        predicted_tokens_per_second_per_gpu=predicted_tokens_per_second_per_gpu,
        predicted_memory_bytes=predicted_memory_bytes,
    )
    trial, attempt, event = schema.trial, schema.attempt, schema.event

    def without_attempt(connection: sa.Connection, _: Change) -> TrialRow:
        placed = (event.c.trial_id == trial_id, event.c.event == TrialEvent.GANG_PLACED)
        connection.execute(sa.delete(attempt).where(attempt.c.trial_id == trial_id))
        connection.execute(sa.delete(event).where(*placed))
        connection.execute(
            sa.update(trial)
            .where(trial.c.id == trial_id)
            .values(state=TrialState.QUEUED, num_attempts=0, updated_at=trial.c.created_at)
        )
        return trials.trials_by_id(connection, [trial_id])[0]

    return store._database.write(without_attempt)


@dataclass(frozen=True)
class Bench:
    """A sweep with one cell, held by this process."""

    store: Store
    sweep_id: int
    cell_id: int
    epoch: int

    @classmethod
    def on(cls, store: Store, name: str = "tiny") -> Bench:
        sweep_id = store.ensure_sweep(name, "{}", CONDITIONS)
        epoch = store.acquire(sweep_id, host=socket.gethostname(), pid=os.getpid())
        return cls(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)

    def add(self, micro_batch_size: int = 1, **changes: Any) -> TrialRow:
        """A trial that waits and has no attempt yet."""
        return add_trial(
            self.store, self.cell_id, layout(micro_batch_size, **changes), epoch=self.epoch
        )

    def start(self, micro_batch_size: int = 1) -> tuple[int, int]:
        """A trial under way: its id and the attempt's number."""
        return begin_trial(
            self.store,
            self.cell_id,
            layout(micro_batch_size),
            epoch=self.epoch,
            nodes=["node-a", "node-b"],
        )

    def prune(self, micro_batch_sizes: Iterable[int], *, condemned_by: int | None = None) -> int:
        """Prune layouts that another trial proves too large; returns how many are newly pruned."""
        why = "needs more than what ran out of memory"
        some = [
            Pruned(cell_id=self.cell_id, layout=layout(size), why=why, condemned_by=condemned_by)
            for size in micro_batch_sizes
        ]
        return self.store.add_pruned(some, epoch=self.epoch)

    def measure(
        self,
        micro_batch_size: int = 1,
        tokens_per_second_per_gpu: float = 1000.0,
        torch: str = "2.13.0",
        **changes: Any,
    ) -> int:
        """A measured trial's id. `changes`: fields of its measurement."""
        trial_id, attempt = self.start(micro_batch_size)
        record_measurement(
            self.store,
            trial_id,
            attempt,
            epoch=self.epoch,
            measurement=measurement(tokens_per_second_per_gpu, **changes),
            fingerprint=fingerprint(torch),
            gpu_seconds=4.0,
        )
        return trial_id


def repeat(
    bench: Bench,
    trial_id: int,
    tokens_per_second_per_gpu: float,
    step_seconds: float,
    torch: str = "2.13.0",
) -> bool:
    """Measure a measured trial once more; return whether that counts."""
    attempt = start_repeat(bench.store, trial_id, bench.epoch, ["node-a"])
    taken = measurement(tokens_per_second_per_gpu)
    taken = replace(taken, step_time=replace(taken.step_time, median=step_seconds))
    return record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=taken,
        fingerprint=fingerprint(torch),
    )


@contextmanager
def counted_statements(store: Store) -> Iterator[list[str]]:
    said: list[str] = []

    def note(connection: sa.Connection, cursor: object, statement: str, *_: object) -> None:
        said.append(statement)

    sa.event.listen(store._database.engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        sa.event.remove(store._database.engine, "before_cursor_execute", note)


def losing_answers(write: Callable[..., object]) -> Callable[..., object]:
    """`Database.write` with every commit's answer lost, so that each write is tried again."""

    def lossy(
        self: Database, work: Callable[[sa.Connection, Change], object], *, durable: bool = False
    ) -> object:
        changes: list[Change] = []

        def remember(connection: sa.Connection, change: Change) -> object:
            changes.append(change)
            return work(connection, change)

        write(self, remember, durable=durable)
        repeat = Change(id=changes[-1].id, is_retry=True)
        return write(self, lambda connection, change: work(connection, repeat), durable=durable)

    return lossy


# Seconds of a step, and when it was measured in minutes, for each run of a layout, which is named
# by its micro-batch size.
Runs = dict[int, list[tuple[float, float]]]
# The machine becomes 1.6 times slower after the second layout was measured: it has the best
# numbers, and the fourth is the fastest now.
SLOW_END: Runs = {1: [(1.0, 0), (1.6, 10), (1.605, 12)], 2: [(1.1, 1)], 4: [(1.2, 9)]}


def measure_runs(store: Store, runs: Runs) -> dict[int, int]:
    """Measure layouts; return their trials by micro-batch size."""
    bench, ids = Bench.on(store), {}
    start = dt.datetime(2026, 11, 1, tzinfo=dt.UTC)
    for micro_batch_size, some in runs.items():
        trial_id, attempt = bench.start(micro_batch_size)
        ids[micro_batch_size] = trial_id
        for place, (seconds, minutes) in enumerate(some):
            if place:
                attempt = start_repeat(store, trial_id, bench.epoch, ["node-a", "node-b"])
            steps = StepTime(median=seconds, iqr=0.0, num_steps=9, relative_confidence=0.01)
            record_measurement(
                store,
                trial_id,
                attempt,
                epoch=bench.epoch,
                measurement=measurement(1000 / seconds, step_time=steps),
                fingerprint=fingerprint(),
                measured_at=start + dt.timedelta(minutes=minutes),
            )
    return ids

"""A sweep whose numbers are drawn, written row by row into a store, and kept as plain values."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from db import schema
from db.connection.engine import Change
from db.read import records
from db.store import Store
from db.types import now
from db.write.inserts import insert_absent
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Recompute, to_columns
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint, Stack
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.protocol import DriverMemoryKind
from tests.db.builders import measurement

BEGAN = dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
PRICE = 2.5
OLD, NEW = (
    Fingerprint(
        orchestrator_version="0.1.0",
        git_sha=sha,
        stack=Stack(python="3.11.2", torch=torch, device_name="H100"),
    )
    for sha, torch in (("0123abcd", "2.12.0"), ("89abcdef", "2.13.0"))
)
NODES = ("node-a", "node-b", "node-c")


@dataclass(kw_only=True)
class MadeUpAttempt:
    """One launch, with the columns that the named queries read."""

    id: int
    number: int
    state: str
    nodes: list[str]
    ended_at: dt.datetime
    gpu_seconds: float
    superseded: bool = False
    pooled: bool = False
    fingerprint: Fingerprint | None = None
    timed_seconds: float | None = None
    warmup_seconds: float | None = None
    failure_kind: str | None = None
    # The columns of its measurement; empty: there is none.
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        return self.state == "measured" and not self.superseded


@dataclass(kw_only=True)
class MadeUpTrial:
    id: int
    cell: Cell
    layout: Layout
    state: str
    predicted_speed: float | None = None
    predicted_memory: int | None = None
    attempts: list[MadeUpAttempt] = field(default_factory=list)

    @property
    def counting(self) -> MadeUpAttempt | None:
        """The attempt that gives the trial its numbers, if they are current and can be compared."""
        found = next((one for one in self.attempts if one.counts), None)
        if self.state != "measured" or found is None or found.fingerprint is not NEW:
            return None
        is_comparable = found.numbers["implausible"] is None
        return found if is_comparable and found.numbers["step_seconds_bound"] is None else None


@dataclass(kw_only=True)
class MadeUpSweep:
    name: str
    sweep_id: int
    trials: list[MadeUpTrial]
    idle_seconds: float

    @property
    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(trial.cell for trial in self.trials))

    def of(self, cell: Cell) -> list[MadeUpTrial]:
        return [trial for trial in self.trials if trial.cell == cell]


def write(store: Store, name: str, *, seed: int, trials_per_cell: int = 16) -> MadeUpSweep:
    """Draw a sweep of three cells, and write it. Two of them differ in the number of GPUs alone."""
    drawn = random.Random(seed)
    tiny = Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=128, global_batch_size=64)
    cells = [tiny, replace(tiny, num_gpus=4), replace(tiny, sequence_length=256)]
    sweep_id = store.ensure_sweep(name, "{}", {})
    epoch = store.acquire(sweep_id, host="here", pid=1)
    ids = {cell: store.ensure_cell(sweep_id, cell, epoch) for cell in cells}
    first = store._database.read(
        lambda connection: [
            1 + (connection.scalar(sa.select(sa.func.max(table.c.id))) or 0)
            for table in (schema.trial, schema.attempt)
        ]
    )
    trials: list[MadeUpTrial] = []
    num_attempts = 0
    for place in range(trials_per_cell * len(cells)):
        trial = _trial(drawn, first[0] + place, cells[place % len(cells)], place // len(cells))
        for attempt in trial.attempts:
            attempt.id = first[1] + num_attempts
            # Two attempts end in the same moment: their numbers tell the order.
            attempt.ended_at = BEGAN + dt.timedelta(seconds=60 * (num_attempts // 2))
            num_attempts += 1
        trials.append(trial)
    found = MadeUpSweep(name=name, sweep_id=sweep_id, trials=trials, idle_seconds=17.5)
    store._database.write(lambda connection, change: _insert(connection, change, found, ids))
    return found


def _trial(drawn: random.Random, trial_id: int, cell: Cell, place: int) -> MadeUpTrial:
    layout = Layout(
        data_parallel_size=cell.num_gpus,
        micro_batch_size=2 ** (place % 4),
        grad_accum_steps=64 // cell.num_gpus // 2 ** (place % 4),
        zero_stage=place // 4 % 3,
        recompute=Recompute.parse("full" if place // 12 else "none"),
    )
    state = drawn.choices(
        ("measured", "out_of_memory", "pruned", "failed", "queued"), (10, 3, 2, 1, 1)
    )[0]
    is_predicted = drawn.random() < 0.8
    trial = MadeUpTrial(
        id=trial_id,
        cell=cell,
        layout=layout,
        state="measured" if place < 3 else state,
        predicted_speed=drawn.uniform(500, 4000) if is_predicted else None,
        predicted_memory=drawn.randrange(1 << 30, 80 << 30) if is_predicted else None,
    )
    kinds = {
        "out_of_memory": ("out_of_memory", FailureKind.OOM_GPU),
        "failed": ("failed", FailureKind.USER_ERROR),
    }
    if trial.state in kinds:
        trial.attempts = [_failed(drawn, trial, 1, *kinds[trial.state])]
    elif trial.state == "measured":
        _measure(drawn, trial)
    return trial


def _measure(drawn: random.Random, trial: MadeUpTrial) -> None:
    """Failures of the machine, runs with older software, and one to three runs that count."""
    if drawn.random() < 0.3:
        kind = drawn.choice((FailureKind.XID, FailureKind.NODE_LOST, FailureKind.HUNG))
        trial.attempts.append(_failed(drawn, trial, 1, "requeued", kind))
    kept = drawn.random()
    if kept < 0.4:
        old = _measured(drawn, trial, OLD)
        # A third of them was never measured again.
        old.superseded = kept > 0.13
        old.pooled = not old.superseded
        trial.attempts.append(old)
        if not old.superseded:
            return
    runs = [_measured(drawn, trial, NEW) for _ in range(drawn.choice((1, 1, 2, 3)))]
    by_speed = sorted(runs, key=lambda run: run.numbers["tokens_per_second_per_gpu"])
    middle = by_speed[(len(runs) - 1) // 2]  # of two, the slower
    for run in runs:
        run.pooled, run.superseded = True, run is not middle
    trial.attempts += runs


def _failed(
    drawn: random.Random, trial: MadeUpTrial, number: int, state: str, kind: FailureKind
) -> MadeUpAttempt:
    return MadeUpAttempt(
        id=0,
        number=number,
        state=state,
        nodes=drawn.sample(NODES, drawn.choice((1, 2))),
        ended_at=BEGAN,
        gpu_seconds=drawn.uniform(1, 50),
        failure_kind=kind.value,
    )


def _measured(drawn: random.Random, trial: MadeUpTrial, fingerprint: Fingerprint) -> MadeUpAttempt:
    speed = float(drawn.randrange(1000, 3000, 50))
    timed = drawn.uniform(1, 5)
    drawn_numbers = {
        "tokens_per_second_per_gpu": speed,
        "tokens_per_second": speed * trial.cell.num_gpus,
        "step_seconds_median": 500 / speed,
        "relative_confidence": drawn.choice((0.01, 0.05, None)),
        "implausible": "faster than light" if drawn.random() < 0.06 else None,
        "step_seconds_bound": 0.1 if drawn.random() < 0.06 else None,
        "peak_memory_allocated_bytes": drawn.choice((10, 20, 30, 40, 50)) << 30,
        "peak_memory_reserved_bytes": drawn.choice((None, 0, 45 << 30, 55 << 30)),
        "joules_per_token": drawn.choice((0.3, 0.4, None)),
    }
    by_trial = random.Random(trial.id)
    if by_trial.random() < 0.3:
        # It tells nothing of its allocator: the driver's number is all that is known.
        drawn_numbers |= {
            "peak_memory_allocated_bytes": by_trial.choice((0, None)),
            "peak_memory_reserved_bytes": None,
            "peak_memory_driver_bytes": by_trial.choice((0, 35 << 30, None)),
            "peak_memory_driver_kind": by_trial.choice(tuple(DriverMemoryKind)),
        }
    columns = records.measurement_columns(measurement(), GpuUsage(), None)
    return MadeUpAttempt(
        id=0,
        number=0,
        state="measured",
        nodes=drawn.sample(NODES, drawn.choice((1, 2))),
        ended_at=BEGAN,
        gpu_seconds=trial.cell.num_gpus * (timed + 8),
        fingerprint=fingerprint,
        timed_seconds=timed,
        warmup_seconds=1.5,
        numbers=columns | drawn_numbers,
    )


def _insert(
    connection: sa.Connection, change: Change, found: MadeUpSweep, ids: Mapping[Cell, int]
) -> None:
    for fingerprint in (OLD, NEW):
        columns = {**records.fingerprint_columns(fingerprint), "first_seen_at": now()}
        insert_absent(connection, schema.fingerprint, columns)
    connection.execute(
        sa.insert(schema.session).values(
            sweep_id=found.sweep_id, epoch=1, host="here", pid=1, num_gpus=8, started_at=now(),
            seen_at=now(), ended_at=now(), price_per_gpu_hour=PRICE,
            idle_gpu_seconds=found.idle_seconds,
        )
    )  # fmt: skip
    connection.execute(
        sa.update(schema.cell)
        .where(schema.cell.c.sweep_id == found.sweep_id)
        .values(fingerprint_digest=NEW.digest)
    )
    for trial in found.trials:
        connection.execute(
            sa.insert(schema.trial).values(
                id=trial.id, sweep_id=found.sweep_id, cell_id=ids[trial.cell], state=trial.state,
                layout_key=trial.layout.key, **to_columns(trial.layout),
                num_attempts=len(trial.attempts), created_at=now(), updated_at=now(),
                num_measurements=sum(one.pooled for one in trial.attempts),
                predicted_tokens_per_second_per_gpu=trial.predicted_speed,
                predicted_memory_bytes=trial.predicted_memory,
            )
        )  # fmt: skip
        for number, one in enumerate(trial.attempts, start=1):
            failed = {}
            if one.failure_kind is not None:
                kind = FailureKind(one.failure_kind)
                failed = records.failure_columns(
                    Failure(kind=kind, message="it broke", node=one.nodes[0])
                )
            connection.execute(
                sa.insert(schema.attempt).values(
                    id=one.id, trial_id=trial.id, number=number, epoch=1, state=one.state,
                    superseded=one.superseded, pooled=one.pooled, started_at=one.ended_at,
                    ended_at=one.ended_at, nodes=one.nodes, gpu_seconds=one.gpu_seconds,
                    timed_seconds=one.timed_seconds, warmup_seconds=one.warmup_seconds,
                    fingerprint_digest=one.fingerprint and one.fingerprint.digest, **failed,
                )
            )  # fmt: skip
            if one.numbers:
                connection.execute(
                    sa.insert(schema.measurement).values(attempt_id=one.id, **one.numbers)
                )
    if connection.dialect.name == "postgresql":
        # The rows have explicit ids, so the sequences are behind.
        for table in ("trial", "attempt"):
            connection.execute(
                sa.text(f"SELECT setval('{table}_id_seq', (SELECT max(id) FROM {table}))")
            )

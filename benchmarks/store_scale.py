"""Measures how the store scales: `status`, `best`, the views and the named queries.

python -m benchmarks.store_scale --out benchmarks/results/store-scale_cpu-2core_DATE.json
python -m benchmarks.store_scale --url postgresql://...    # an empty database
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.store_cells import cells
from db import schema
from db.connection.engine import Change
from db.read import records
from db.sql import readonly
from db.sql.named_queries import SWEEP, NamedQuery, named_queries
from db.store import Store
from db.types import now
from db.write.inserts import insert_absent
from orchestrator.core.problem.layout import Layout, to_columns
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.measurement import Measurement, StepTime
from orchestrator.core.trial.node_report import GpuUsage
from orchestrator.core.trial.purpose import Purpose

NUM_CELLS = 12
# One trial in so many; the others are measured.
OOM_EVERY, PRUNED_EVERY = 5, 3
# In so many measured trials, one had a node fail before, one was measured with the older
# fingerprint before, one was repeated after, and a repeat of one failed.
FAULT_EVERY, OLDER_EVERY, REPEAT_EVERY = 50, 10, 20
NUM_NODES = 64
# Trials in a transaction.
AT_ONCE = 5000
FAILURE_COLUMNS = [*Failure.__dataclass_fields__, "step_part"]
FINGERPRINTS = [Fingerprint(orchestrator_version=version) for version in ("0.1.0", "0.1.1")]


def measurement(tokens_per_second_per_gpu: float, peak_gib: int) -> Measurement:
    samples = tuple(0.5 + 0.001 * i for i in range(20))
    return Measurement(
        tokens_per_second=8 * tokens_per_second_per_gpu,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        step_time=StepTime(median=0.51, iqr=0.01, num_steps=len(samples), relative_confidence=0.01),
        step_seconds=samples,
        confident=True,
        mfu=0.4,
        hfu=0.5,
        mfu_formula="6*N_matmul+12*L*d_attn*s",
        peak_flops=989e12,
        peak_flops_source="table: h100-sxm bf16",
        peak_memory_allocated_bytes=(peak_gib - 4) << 30,
        peak_memory_reserved_bytes=peak_gib << 30,
        device_memory_bytes=80 << 30,
        allocator_retries=0,
        thrashing=False,
        loss_first=10.0,
        loss_last=9.0,
    )


@dataclass(kw_only=True)
class _Rows:
    """Rows of the three tables of trials, to be inserted together."""

    trials: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def add(self, i: int, *, trial_id: int, attempt_ids: Iterator[int], **of: int) -> None:
        """Add trial i of its sweep, with its attempts. `of`: the sweep and the cell, by column."""
        state = _state(i)
        launched = [] if state == "pruned" else launches(i, state)
        self.trials.append(
            {
                **_trial_columns(i, state),
                **of,
                "id": trial_id,
                "num_attempts": len(launched),
                "num_measurements": sum(launch["pooled"] for launch in launched),
            }
        )
        for number, launch in enumerate(launched, start=1):
            attempt = _attempt_columns(i, launch)
            attempt |= {"id": next(attempt_ids), "trial_id": trial_id, "number": number}
            self.attempts.append(attempt)
            if launch["state"] == "measured":
                numbers = _measurement_columns(i, number)
                self.measurements.append({"attempt_id": attempt["id"], **numbers})

    def insert(self, connection: sa.Connection, change: Change) -> None:
        """Insert them in one transaction."""
        connection.execute(
            sa.insert(schema.trial).values(created_at=now(), updated_at=now()), self.trials
        )
        connection.execute(
            sa.insert(schema.attempt).values(started_at=now(), ended_at=now()), self.attempts
        )
        connection.execute(sa.insert(schema.measurement), self.measurements)


def fill(store: Store, sweep_id: int, cell_ids: list[int], num_trials: int) -> None:
    """Insert a finished sweep: a third pruned, a fifth out of memory, the rest measured."""
    database = store._database
    first = database.write(_begin)
    attempt_ids = itertools.count(first)
    for start in range(0, num_trials, AT_ONCE):
        rows = _Rows()
        for i in range(start, min(start + AT_ONCE, num_trials)):
            cell_id = cell_ids[i % len(cell_ids)]
            rows.add(
                i,
                trial_id=first + i,
                attempt_ids=attempt_ids,
                sweep_id=sweep_id,
                cell_id=cell_id,
            )
        database.write(rows.insert)
    database.write(_end)


def _begin(connection: sa.Connection, change: Change) -> int:
    """Insert the fingerprints; return an id above those of all trials and attempts."""
    for fingerprint in FINGERPRINTS:
        columns = {**records.fingerprint_columns(fingerprint), "first_seen_at": now()}
        insert_absent(connection, schema.fingerprint, columns)
    newest = [
        connection.scalar(sa.select(sa.func.max(table.c.id))) or 0
        for table in (schema.trial, schema.attempt)
    ]
    return 1 + max(newest)


def _end(connection: sa.Connection, change: Change) -> None:
    connection.execute(sa.update(schema.cell).values(fingerprint_digest=FINGERPRINTS[1].digest))
    if connection.dialect.name == "postgresql":
        # The rows have explicit ids, so the sequences are behind.
        for table in ("trial", "attempt"):
            connection.execute(
                sa.text(f"SELECT setval('{table}_id_seq', (SELECT max(id) FROM {table}))")
            )


def _state(i: int) -> str:
    if i % PRUNED_EVERY == 0:
        return "pruned"
    return "out_of_memory" if i % OOM_EVERY == 0 else "measured"


def _trial_columns(i: int, state: str) -> dict[str, Any]:
    layout = Layout(data_parallel_size=8, micro_batch_size=1 + i, zero_stage=i % 4)
    return {
        "state": state,
        "predicted_tokens_per_second_per_gpu": 1000.0 + i * 6007 % 9973,
        "predicted_memory_bytes": (30 + i * 17 % 50) << 30,
        "why": "best predicted of those left",
        "layout_key": layout.key,
        **to_columns(layout),
    }


def _attempt_columns(i: int, launch: Mapping[str, Any]) -> dict[str, Any]:
    failure = launch["failure"]
    return {
        "epoch": 1,
        "nodes": [f"node-{i % NUM_NODES}"],
        "gpu_seconds": 80.0,
        "timed_seconds": 5.0,
        "warmup_seconds": 1.0,
        **{name: value for name, value in launch.items() if name != "failure"},
        **(
            records.failure_columns(failure)
            if failure is not None
            else {f"failure_{name}": None for name in FAILURE_COLUMNS}
        ),
    }


def _measurement_columns(i: int, number: int) -> dict[str, Any]:
    speed, peak_gib = 1000.0 + (i * 7919 + number) % 9973, 40 + i * 31 % 40
    return records.measurement_columns(
        measurement(speed, peak_gib), GpuUsage(), {"weights": 1 << 30}
    )


def launches(i: int, state: str) -> list[dict[str, Any]]:
    """The attempts of trial i, each with its failure or None."""
    node = f"node-{i % NUM_NODES}"
    if state != "measured":
        oom = Failure(
            kind=FailureKind.OOM_GPU, message="CUDA out of memory", log_tail="x" * 2000, node=node
        )
        return [_launch(state, FINGERPRINTS[1], failure=oom)]
    found = []
    if i % FAULT_EVERY == 7:
        fault = Failure(kind=FailureKind.XID, message="Xid 79", log_tail="x" * 2000, node=node)
        found.append(_launch("requeued", FINGERPRINTS[1], failure=fault))
    if i % OLDER_EVERY == 1:
        found.append(_launch(state, FINGERPRINTS[0], superseded=True))
    found.append(_launch(state, FINGERPRINTS[i % 10 > 0], pooled=True))
    if i % REPEAT_EVERY == 11:
        found.append(_launch(state, FINGERPRINTS[1], superseded=True, pooled=True))
    if i % REPEAT_EVERY == 13:
        hung = Failure(kind=FailureKind.HUNG, message="no step in 600 s", node=node)
        found.append(_launch("failed", FINGERPRINTS[1], failure=hung, purpose=Purpose.CONFIRMATION))
    return found


def _launch(
    state: str,
    fingerprint: Fingerprint,
    *,
    failure: Failure | None = None,
    superseded: bool = False,
    pooled: bool = False,
    purpose: Purpose | None = None,
) -> dict[str, Any]:
    return {
        "state": state,
        "fingerprint_digest": fingerprint.digest,
        "failure": failure,
        "superseded": superseded,
        "pooled": pooled,
        "purpose": purpose,
    }


def seconds(
    work: Callable[[], object],
    repeat: int = 3,
    of_all: Callable[[list[float]], float] = statistics.median,
) -> float:
    """The median time, which is that of a warm cache."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(of_all(times), 4)


def measure(url: str, num_trials: int) -> dict[str, Any]:
    with Store.open(url) as store:
        sweep_id = store.ensure_sweep("scale", "{}", {})
        epoch = store.acquire(
            sweep_id, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=3600
        )
        cell_ids = [store.ensure_cell(sweep_id, cell, epoch) for cell in cells(NUM_CELLS)]
        small = store.ensure_sweep("ten-thousand", "{}", {})
        small_epoch = store.acquire(
            small, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=3600
        )
        small_cells = [store.ensure_cell(small, cell, small_epoch) for cell in cells(NUM_CELLS)]
        fill(store, small, small_cells[:1], 10_000)
        of_a_cell = seconds(lambda: store.trials(small, small_cells[0]))
        return {
            "trials_of_a_cell_10000_seconds": of_a_cell,
            **_large(store, url, sweep_id, cell_ids, num_trials),
        }


def _analyze(url: str) -> None:
    """Have PostgreSQL count what its tables hold, as it does by itself within a minute.

    Rows that a sweep writes one by one are counted meanwhile; these came in seconds.
    """
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.execute(sa.text("ANALYZE"))
    engine.dispose()


def _keep_uncounted(url: str) -> None:
    """Have PostgreSQL not count the rows of these tables by itself."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        for name in schema.metadata.tables:
            connection.execute(sa.text(f'ALTER TABLE "{name}" SET (autovacuum_enabled = off)'))
    engine.dispose()


def _ask(url: str, query: NamedQuery) -> Callable[[], object]:
    parameters = {**query.values(()), SWEEP: "scale"}
    return partial(readonly.query, url, query.sql, parameters=parameters, timeout_seconds=120.0)


def _large(
    store: Store, url: str, sweep_id: int, cell_ids: list[int], num_trials: int
) -> dict[str, Any]:
    uncounted = None
    if url.startswith("postgresql"):
        _keep_uncounted(url)
    fill(store, sweep_id, cell_ids, num_trials)
    if url.startswith("postgresql"):
        uncounted = {
            name: seconds(_ask(url, query), repeat=2, of_all=min)
            for name, query in named_queries().items()
        }
        _analyze(url)
    views = {
        view: seconds(lambda view=view: readonly.own_query(url, f"SELECT count(*) FROM {view}"), 1)
        for view in schema.VIEWS
    }
    queries, cpu = {}, {}
    for query in named_queries().values():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        queries[query.name] = seconds(_ask(url, query), repeat=5, of_all=min)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cpu[query.name] = round(spent / 5, 4)
    leading = [one.id for some in store.best(sweep_id, top=10).values() for one in some]
    return {
        "num_trials": num_trials,
        "num_cells": len(cell_ids),
        "status_seconds": seconds(lambda: (store.status(sweep_id), store.reserved(sweep_id))),
        "best_seconds": seconds(lambda: store.best(sweep_id, top=10)),
        "failed_repeats_seconds": seconds(lambda: store.failed_repeats(leading)),
        "fingerprint_counts_seconds": seconds(lambda: store.fingerprint_counts(sweep_id)),
        "trial_seconds": seconds(lambda: store.trial(5)),
        "v_best_seconds": seconds(
            lambda: readonly.own_query(url, "SELECT * FROM v_best WHERE is_current")
        ),
        "count_of_view_seconds": views,
        "named_query_fastest_of_5_seconds": queries,
        # As above, of 2: before PostgreSQL has counted a row, as in the first minute of a table.
        "named_query_before_statistics_seconds": uncounted,
        # Mean CPU time of the process that asks. On SQLite that is all; the server's is not in it.
        "named_query_cpu_seconds": cpu,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--url", help="an empty database; without it a SQLite file in a temporary folder"
    )
    parser.add_argument("--trials", type=int, default=100_000)
    arguments = parser.parse_args()
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.url or f"sqlite:///{folder}/scale.sqlite"
        result = {
            "database": url.split(":")[0],
            **measure(url, arguments.trials),
            "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="store_scale", machine=machine, result=result)


if __name__ == "__main__":
    main()

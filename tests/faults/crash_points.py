"""Has an orchestrator die at its statements in turn, without a word: before each, and before and after each commit.

Processes are forked, so that each finds everything imported; a point is counted by the process that dies there.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from db import url as urls
from db.store import Store
from orchestrator.core.spec import SweepSpec
from tests import new_store
from tests.faults import forks, small_sweep
from tests.faults.history import Log, Seen, judge
from tests.faults.witness import WitnessedStore

DIED = 100  # what a child ends with at its point; within a method of the store, one more for each of those before it
WORKERS = 2  # processes that work through the points, each on a database of its own

Fresh = Callable[[int], str]  # empties the store of a worker, and gives its URL: always the same


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """What came of dying everywhere."""

    num_points: int
    num_acknowledged: int  # by the orchestrators that died
    within: Mapping[str, int]  # how many of them died in each of the store's methods, where only those were asked for
    complaints: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Play:
    """A sweep, and how it is run."""

    of: SweepSpec
    num_trials: int
    before: Callable[[WitnessedStore, Path], None] | None = None  # what an earlier orchestrator had done
    run: Callable[[WitnessedStore, Path], object]  # with a folder for its run folders
    within: Sequence[str] = ()  # methods of the store, where only their statements are to die at


def small_play(of: SweepSpec, *, num_trials: int) -> Play:
    return Play(of=of, num_trials=num_trials, run=lambda store, _: small_sweep.run(store, of=of))


def die_everywhere(play: Play, *, fresh: Fresh, folder: Path, every: int = 1) -> Deaths:
    """Run a sweep once for each point, to its death there, and each time once more to its end. `every`: of so many points one."""
    workers = [forks.start(partial(_work_through, worker, play, fresh, folder, every)) for worker in range(WORKERS)]
    codes = [forks.wait(pid) for pid in workers]
    told = [json.loads(line) for worker in range(WORKERS) for line in (folder / f"told-{worker}.jsonl").read_text().splitlines()]
    complaints = [f"point {point}: {text}" for point, _, _, complaints in told for text in complaints]
    complaints += [f"worker {worker} ended with {code}" for worker, code in enumerate(codes) if code]
    return Deaths(
        num_points=len(told),
        num_acknowledged=sum(acknowledged for _, acknowledged, _, _ in told),
        within=Counter(method for _, _, method, _ in told if method is not None),
        complaints=complaints,
    )


def fresh_sqlite(folder: Path) -> Fresh:
    """A file for each worker, put back as it was for each point."""
    template = folder / "template.sqlite"
    Store.open(f"sqlite:///{template}").close()

    def put_back(worker: int) -> str:
        file = folder / f"sweep-{worker}.sqlite"
        for old in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
            old.unlink(missing_ok=True)
        shutil.copy(template, file)
        return f"sqlite:///{file}"

    return put_back


def fresh_postgresql(server_url: str) -> Fresh:
    """A database for each worker, emptied for each point."""
    with sa.create_engine(urls.resolve(server_url), isolation_level="AUTOCOMMIT").connect() as connection:
        for worker in range(WORKERS):
            connection.exec_driver_sql(f"DROP DATABASE IF EXISTS crash_{worker} WITH (FORCE)")
            connection.exec_driver_sql(f"CREATE DATABASE crash_{worker}")
    databases = [server_url.replace("/postgres?", f"/crash_{worker}?") for worker in range(WORKERS)]
    for url in databases:
        Store.open(url).close()

    connections: dict[int, psycopg.Connection] = {}  # kept: a new one has all of the catalogue to read

    def emptied(worker: int) -> str:
        if worker not in connections:
            connections[worker] = psycopg.connect(databases[worker], autocommit=True)
        connections[worker].execute(new_store.EMPTY)
        return databases[worker]

    return emptied


def _work_through(worker: int, play: Play, fresh: Fresh, folder: Path, every: int) -> None:
    """One worker's share of the points, until one is beyond the end of the sweep."""
    log, into, runs = Log(folder / f"seen-{worker}.jsonl"), folder / f"complaints-{worker}.json", folder / f"runs-{worker}"
    with WitnessedStore.seen_by(log, fresh(worker)) as store, (folder / f"told-{worker}.jsonl").open("w") as told:
        # Forks find everything imported and every statement compiled: that is two thirds of what a sweep costs.
        play.run(store, runs)
        store._database.close()
        gc.freeze()
        for point in itertools.count(worker * every, WORKERS * every):
            fresh(worker)
            log.path.unlink()
            shutil.rmtree(runs, ignore_errors=True)
            if play.before is not None:
                forks.outcome(partial(_earlier, play.before, store, runs))
            code = forks.outcome(partial(die_at, point, lambda: play.run(store.as_another(), runs), play.within))
            if code == 0:
                return
            acknowledged = sum(entry.seen is not Seen.LAUNCHED for entry in log.entries())
            method = next((name for number, name in enumerate(play.within) if code == DIED + number), None)
            complaints = [] if code == DIED or method is not None else [f"the orchestrator ended with {code}"]
            if (code := forks.outcome(partial(_finish, store, play, runs, into))) != 0:
                complaints.append(f"the next one ended with {code}")
            else:
                complaints += json.loads(into.read_text())
            told.write(json.dumps([point, acknowledged, method, complaints]) + "\n")
            told.flush()


def _earlier(before: Callable[[WitnessedStore, Path], None], store: WitnessedStore, runs: Path) -> None:
    before(store.as_another(), runs)


def die_at(fatal: int, work: Callable[[], object], within: Sequence[str] = ()) -> None:
    """Do something up to its statement of this number, and no further. Only in a fork: nobody takes the watch off again.

    `within`: count only statements that these methods of the store make.
    """
    passed = 0
    inside = list[int]() if within else [0]  # the methods that are being called, by their places

    def point(*_: object) -> None:
        nonlocal passed
        if not inside:
            return
        if passed == fatal:
            os._exit(DIED + inside[-1])
        passed += 1

    commit = DefaultDialect.do_commit

    def watched(dialect: DefaultDialect, connection: Any) -> None:
        point()
        commit(dialect, connection)  # type: ignore[no-untyped-call]
        point()

    for number, name in enumerate(within):
        setattr(WitnessedStore, name, _noted(getattr(WitnessedStore, name), inside, number))
    DefaultDialect.do_commit = watched  # type: ignore[method-assign]
    sa.event.listen(Engine, "before_cursor_execute", point)
    work()


def _noted(method: Callable[..., Any], inside: list[int], number: int) -> Callable[..., Any]:
    """The method, which is inside while it is called."""

    def call(*args: Any, **options: Any) -> Any:
        inside.append(number)
        try:
            return method(*args, **options)
        finally:
            inside.pop()

    return call


def _finish(store: WitnessedStore, play: Play, runs: Path, into: Path) -> None:
    raised = []
    try:
        play.run(store.as_another(), runs)
    except Exception as exc:  # noqa: BLE001  what it stumbled over is what the judge is to name
        raised = [f"the next one raised {type(exc).__name__}: {exc}"]
    verdict = judge(store, play.of.name, store.log.entries(), num_trials=play.num_trials)
    into.write_text(json.dumps([*raised, *verdict.complaints]))

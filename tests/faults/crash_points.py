"""Has an orchestrator die at its statements in turn: before each, and around each commit.

Processes are forked, with all imports done; the process that dies counts the points. With SQLite a
death may be a copy of the files at a point: so one orchestrator goes through all points.
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
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

from orchestrator.core.sweepfile.spec import SweepSpec
from tests.faults import forks, small_sweep
from tests.faults.fresh_stores import WORKERS, Fresh, home
from tests.faults.history import Log, Seen, judge
from tests.faults.witness import WitnessedStore

MOST_POINTS = 1_000_000  # of which a sweep has hundreds
# What a child ends with at its point; within a method of the store, one more for each of those
# before it
DIED = 100


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """What came of dying everywhere."""

    num_points: int
    num_acknowledged: int  # by the orchestrators that died
    within: Mapping[str, int]  # deaths by method of the store
    complaints: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Play:
    """A sweep, and how it is run."""

    of: SweepSpec
    num_trials: int
    before: Callable[[WitnessedStore, Path], None] | None = (
        None  # what an earlier orchestrator had done
    )
    run: Callable[[WitnessedStore, Path], object]  # with a folder for run folders
    # Methods of the store to die in: in all calls, or in the first one only.
    within: Sequence[str] = ()
    within_first_call: Sequence[str] = ()

    @property
    def methods(self) -> Mapping[str, bool]:
        """The methods to die in, and whether only in their first call. None: die everywhere."""
        return dict.fromkeys(self.within, False) | dict.fromkeys(self.within_first_call, True)


def small_play(of: SweepSpec, *, num_trials: int) -> Play:
    return Play(of=of, num_trials=num_trials, run=lambda store, _: small_sweep.run(store, of=of))


def die_everywhere(
    play: Play,
    *,
    fresh: Fresh,
    folder: Path,
    every: int = 1,
    first: int = 0,
    copied: bool = False,
) -> Deaths:
    """Run a sweep for each point to its death there, and once more to its end.

    `every`: take one of so many points, from `first` on. `copied`: each death is a copy of SQLite's
    files.
    """
    of_worker = [
        range(first + worker * every, MOST_POINTS, WORKERS * every) for worker in range(WORKERS)
    ]
    workers = [
        forks.start(partial(_work_through, worker, play, fresh, folder, points, copied))
        for worker, points in enumerate(of_worker)
    ]
    codes = [forks.wait(pid) for pid in workers]
    told = [
        json.loads(line)
        for worker in range(WORKERS)
        for line in (folder / f"told-{worker}.jsonl").read_text().splitlines()
    ]
    complaints = [
        f"point {point}: {text}" for point, _, _, complaints in told for text in complaints
    ]
    complaints += [
        f"worker {worker} ended with {code}" for worker, code in enumerate(codes) if code
    ]
    return Deaths(
        num_points=len(told),
        num_acknowledged=sum(acknowledged for _, acknowledged, _, _ in told),
        within=Counter(method for _, _, method, _ in told if method is not None),
        complaints=complaints,
    )


def _work_through(
    worker: int, play: Play, fresh: Fresh, folder: Path, points: range, copied: bool
) -> None:
    """One worker's share of the points, until one is beyond the end of the sweep."""
    at_home = home(folder, worker)
    at_home.mkdir(exist_ok=True)
    log, into = Log(at_home / "seen.jsonl"), folder / f"complaints-{worker}.json"
    with (
        WitnessedStore.seen_by(log, fresh(worker)) as store,
        (folder / f"told-{worker}.jsonl").open("w") as told,
    ):
        stage = _Stage(play, store, home=at_home, fresh=partial(fresh, worker))
        # Forks find everything imported and every statement compiled: that is two thirds of what a
        # sweep costs.
        stage.run()
        store._database.close()
        gc.freeze()
        die = _Copies(stage, points, folder / f"copies-{worker}").die if copied else stage.die
        for point in points:
            if (code := die(point)) == 0:
                return
            acknowledged = sum(entry.seen is not Seen.LAUNCHED for entry in log.entries())
            method = next(
                (name for number, name in enumerate(play.methods) if code == DIED + number), None
            )
            complaints = (
                []
                if code == DIED or method is not None
                else [f"the orchestrator ended with {code}"]
            )
            if (code := forks.outcome(partial(_finish, stage, into))) != 0:
                complaints.append(f"the next one ended with {code}")
            else:
                complaints += json.loads(into.read_text())
            told.write(json.dumps([point, acknowledged, method, complaints]) + "\n")
            told.flush()


class _Stage:
    """A store and a folder in which a worker runs a play repeatedly."""

    def __init__(
        self, play: Play, store: WitnessedStore, *, home: Path, fresh: Callable[[], str]
    ) -> None:
        self.play, self.store, self.home, self._fresh = play, store, home, fresh

    def run(self) -> None:
        self.play.run(self.store.as_another(), self._runs)

    def clear(self) -> None:
        """Restore the state before the play: an earlier orchestrator's, if the play has one."""
        self._fresh()
        self.store.log.path.unlink(missing_ok=True)
        shutil.rmtree(self._runs, ignore_errors=True)
        if self.play.before is not None:
            forks.outcome(partial(self._before, self.play.before))

    def die(self, point: int) -> int:
        """Run an orchestrator that dies at a point, if it gets there. Returns its exit code."""
        self.clear()
        return forks.outcome(partial(die_at, point, self.run, self.play.methods))

    @property
    def _runs(self) -> Path:
        return self.home / "runs"

    def _before(self, before: Callable[[WitnessedStore, Path], None]) -> None:
        before(self.store.as_another(), self._runs)


class _Copies:
    """The files of an orchestrator at each of its points, as a kill there would leave them.

    Without the index of SQLite's log: the next process makes it anew, and a copy would drop locks.
    """

    def __init__(self, stage: _Stage, points: Sequence[int], folder: Path) -> None:
        self._stage, self._points, self._folder, self._passed = (
            stage,
            points,
            folder,
            folder / "passed",
        )
        stage.clear()
        folder.mkdir()
        if (
            code := forks.outcome(partial(at_points, self._keep, stage.run, stage.play.methods))
        ) != 0:
            raise RuntimeError(f"the orchestrator ended with {code}")

    def die(self, point: int) -> int:
        """As of the stage."""
        home = self._stage.home
        for kept in self._folder.glob(f"{point}-*"):
            shutil.rmtree(home)
            kept.rename(home)
            return DIED + int(kept.name.partition("-")[2])
        if point <= int(self._passed.read_text()):
            raise RuntimeError(f"of point {point} there is no copy")
        return 0

    def _keep(self, point: int, method: int) -> None:
        self._passed.write_text(str(point))
        if point in self._points:
            shutil.copytree(
                self._stage.home,
                self._folder / f"{point}-{method}",
                ignore=shutil.ignore_patterns("*-shm"),
            )


def die_at(
    fatal: int, work: Callable[[], object], within: Mapping[str, bool] = MappingProxyType({})
) -> None:
    """Do something up to its statement of this number, and no further."""

    def at(point: int, method: int) -> None:
        if point == fatal:
            os._exit(DIED + method)

    at_points(at, work, within)


def at_points(
    at: Callable[[int, int], None],
    work: Callable[[], object],
    within: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Do something in a fork, and call `at` with a number around statements and commits.

    `within`: only for statements of these methods of the store, with the method's index; True:
    only in the method's first call.
    """
    numbers = itertools.count()
    inside = list[int]() if within else [0]  # the running methods, by place

    def point(*_: object) -> None:
        if inside:
            at(next(numbers), inside[-1])

    commit = DefaultDialect.do_commit

    def watched(dialect: DefaultDialect, connection: Any) -> None:
        point()
        commit(dialect, connection)  # type: ignore[no-untyped-call]
        point()

    for number, (name, once) in enumerate(within.items()):
        method = getattr(WitnessedStore, name)
        setattr(WitnessedStore, name, _noted(method, inside, number, once=once))
    DefaultDialect.do_commit = watched  # type: ignore[method-assign]
    sa.event.listen(Engine, "before_cursor_execute", point)
    work()


def _noted(
    method: Callable[..., Any], inside: list[int], number: int, *, once: bool
) -> Callable[..., Any]:
    """The method, which is inside while it is called."""
    calls = itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) and once:
            return method(*args, **options)
        inside.append(number)
        try:
            return method(*args, **options)
        finally:
            inside.pop()

    return call


def _finish(stage: _Stage, into: Path) -> None:
    raised = []
    try:
        stage.run()
    except Exception as exc:  # noqa: BLE001
        raised = [f"the next one raised {type(exc).__name__}: {exc}"]  # the judge names the mistake
    verdict = judge(
        stage.store, stage.play.of.name, stage.store.log.entries(), num_trials=stage.play.num_trials
    )
    into.write_text(json.dumps([*raised, *verdict.complaints]))

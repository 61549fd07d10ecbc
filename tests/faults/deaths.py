"""Dies at statements of a play or a migration: `python -m tests.faults.deaths PLAY URL FOLDER
EVERY FIRST`.

EVERY: one of so many statements, from FIRST on. A program that prints one line of JSON: forks of a
test session would copy torch and Ray.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from db import migrate
from db.connection import url as urls
from db.store import Store
from tests.db import next_version
from tests.db.builders import Bench
from tests.faults import forks, small_sweep
from tests.faults.crash_points import DIED, Play, die_at, die_everywhere, small_play
from tests.faults.faulty_nodes import AMONG_FAULTY_NODES
from tests.faults.fresh_stores import fresh_postgresql, fresh_sqlite


def some_points(every: int) -> tuple[str, str]:
    """The arguments EVERY FIRST of this program, for one of so many points from a random one on."""
    return str(every), str(random.SystemRandom().randrange(every))


def of_play(
    play: Play, url: str, folder: Path, *, every: int = 1, first: int = 0
) -> dict[str, Any]:
    """`url`: a database server, or SQLite, where deaths are copies."""
    is_sqlite = url.startswith("sqlite")
    deaths = die_everywhere(
        play,
        fresh=fresh_sqlite(folder) if is_sqlite else fresh_postgresql(url),
        folder=folder,
        every=every,
        first=first,
        copied=is_sqlite,
    )
    return vars(deaths) | {"within": dict(deaths.within)}


def of_making(url: str, folder: Path, *, every: int = 1, first: int = 0) -> dict[str, Any]:
    """A program dies while it makes the tables of a store, and the next one uses it."""
    _open(url)  # forks find alembic imported
    return _until_it_is_done(
        itertools.count(first, every),
        partial(_empty, url),
        partial(_open, url),
        lambda _: partial(_use, url, measured=0),
    )


def of_upgrade(url: str, folder: Path, *, every: int = 1, first: int = 0) -> dict[str, Any]:
    """A program dies while it upgrades a store, which gains a trial with each death."""
    _open(url)
    # It must end with all that it has open.
    _in_a_fork(partial(_use, url, measured=0))

    def go_on(num_deaths: int) -> Callable[[], None]:
        migrate.upgrade(url)
        return partial(_use, url, measured=num_deaths)

    with next_version.in_force(folder):
        return _until_it_is_done(
            itertools.count(first, every),
            partial(next_version.take_back, url),
            partial(migrate.upgrade, url),
            go_on,
        )


def _until_it_is_done(
    points: Iterable[int],
    before: Callable[[], None],
    work: Callable[[], object],
    after: Callable[[int], Callable[[], None]],
) -> dict[str, Any]:
    """Have a fork die at each of these statements, and another continue, until one finishes.

    `after` is given the number of deaths so far.
    """
    for num_deaths, point in enumerate(points, start=1):
        before()
        code = forks.outcome(partial(die_at, point, work))
        if code == 0:
            return {"num_points": point, "complaints": []}
        complaints = [] if code == DIED else [f"point {point}: it ended with {code}"]
        if not complaints and (code := forks.outcome(after(num_deaths))) != 0:
            complaints = [f"point {point}: the next one ended with {code}"]
        if complaints:
            return {"num_points": point, "complaints": complaints}
    raise AssertionError("there is a point beyond the last")


def _open(url: str) -> None:
    Store.open(url).close()


def _use(url: str, *, measured: int) -> None:
    """It holds what it held, and takes more."""
    with Store.open(url) as store:
        bench = Bench.on(store)
        assert len(store.trials(bench.sweep_id)) == measured
        bench.measure(measured + 1)


def _empty(url: str) -> None:
    if url.startswith("sqlite"):
        for file in Path(url.removeprefix("sqlite:///")).parent.glob("*"):
            file.unlink()
        return
    engine = sa.create_engine(urls.resolve(url))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


def _in_a_fork(work: Callable[[], object]) -> None:
    if (code := forks.outcome(work)) != 0:
        raise AssertionError(f"it ended with {code}")


PLAYS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "one-cell": partial(of_play, small_play(small_sweep.spec(gpus=[1]), num_trials=6)),
    "sick-nodes": partial(of_play, AMONG_FAULTY_NODES),
    "making": of_making,
    "upgrade": of_upgrade,
}


if __name__ == "__main__":
    _, name, url, folder, every, first = sys.argv
    told = PLAYS[name](url, Path(folder), every=int(every), first=int(first))
    print("OUT " + json.dumps(told))

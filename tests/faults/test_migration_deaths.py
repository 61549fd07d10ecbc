"""A program that dies at any statement while it makes or upgrades a store: the next one finds it usable, with all that was in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from db import migrate
from db import url as urls
from db.store import Store
from tests.db.builders import Bench
from tests.faults import forks
from tests.faults.crash_points import DIED, die_at

pytestmark = pytest.mark.timeout(400)

OLDEST = "0001"


@pytest.fixture
def emptied(store_url: str) -> Callable[[], None]:
    def empty() -> None:
        if store_url.startswith("sqlite"):
            for file in Path(store_url.removeprefix("sqlite:///")).parent.glob("*"):
                file.unlink()
            return
        engine = sa.create_engine(urls.resolve(store_url))
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
        engine.dispose()

    return empty


def open_it(url: str) -> None:
    Store.open(url).close()


def use(url: str, *, measured: int) -> None:
    """It holds what it held, and takes more."""
    with Store.open(url) as store:
        bench = Bench.on(store)
        assert len(store.trials(bench.sweep_id)) == measured
        bench.measure(measured + 1)


def test_a_store_whose_making_was_cut_short_is_made_by_the_next(store_url: str, emptied: Callable[[], None]) -> None:
    open_it(store_url)  # forks find alembic imported
    for point in itertools.count():
        emptied()
        if forks.outcome(partial(die_at, point, partial(open_it, store_url))) != DIED:
            break
        assert forks.outcome(partial(use, store_url, measured=0)) == 0, f"point {point}"
    assert point > 20  # of a dozen tables and views


def test_an_upgrade_that_was_cut_short_is_done_by_the_next(store_url: str) -> None:
    """Of one store, which gains a trial with each death."""
    open_it(store_url)
    assert forks.outcome(partial(use, store_url, measured=0)) == 0  # a process of its own: what holds a sweep has to be gone
    for point in itertools.count():
        migrate.downgrade(store_url, OLDEST)
        if forks.outcome(partial(die_at, point, partial(migrate.upgrade, store_url))) != DIED:
            break
        migrate.upgrade(store_url)
        assert forks.outcome(partial(use, store_url, measured=point + 1)) == 0, f"point {point}"
    assert point > 10

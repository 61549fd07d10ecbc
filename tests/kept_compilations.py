"""Keeps the compiled statements of a store for all stores of a test run, not for each alone.

Nearly every test opens a store, and compiled the same two dozen statements for it: a fifth of the
time of tests of the loop. A program opens one store.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import sqlalchemy as sa
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.util import LRUCache

from db.connection import engine

MOST_STATEMENTS = 2000


class KeptCompilations(LRUCache[Hashable, Any]):
    """Compiled statements by database and statement: SQLAlchemy's keys begin with a dialect.

    Each engine has a dialect of its own, but all engines of `db.connection` set theirs up alike.
    """

    def get(self, key: Hashable, default: Any = None) -> Any:
        return super().get(_of_any_engine(key), default)

    def __setitem__(self, key: Hashable, compiled: Any) -> None:
        super().__setitem__(_of_any_engine(key), compiled)


@contextmanager
def kept() -> Iterator[KeptCompilations]:
    """Let the engines that are created meanwhile share their compiled statements."""
    compilations = KeptCompilations(MOST_STATEMENTS)

    def sharing(create: Callable[..., sa.Engine]) -> Callable[..., sa.Engine]:
        def created(*arguments: Any) -> sa.Engine:
            made = create(*arguments)
            made.update_execution_options(compiled_cache=compilations)
            return made

        return created

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_sqlite_engine", "_postgresql_engine"):
            patch.setattr(engine, name, sharing(getattr(engine, name)))
        yield compilations


def _of_any_engine(key: Hashable) -> Hashable:
    dialect, *statement = cast("tuple[Dialect, ...]", key)
    return dialect.name, *statement

"""Statements that take a list of ids, built once for each length of the list.

Building such a statement for each list costs as much as running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db.connection.portions import portions
from db.types import Id

Ids = Sequence[sa.BindParameter[int]]


class ByIds:
    """A statement for any number of ids, which `make` builds for a list of ids.

    Lists are filled up with their last id to a power of two, so that there are few statements; a
    long list is split into portions. So the statement must use the ids in an IN only, and no limit,
    order or sum of it may depend on more than one id.
    """

    def __init__(self, make: Callable[[Ids], sa.Select[Any]]) -> None:
        self._make = make
        self._made: dict[int, sa.Select[Any]] = {}

    def rows(self, connection: Connection, ids: Sequence[int]) -> list[sa.Row[*tuple[Any, ...]]]:
        """The rows that the statement finds for the ids, one portion after the other."""
        found: list[sa.Row[*tuple[Any, ...]]] = []
        for some in portions(ids):
            length = 1 << (len(some) - 1).bit_length()
            values = {f"id_{place}": some[min(place, len(some) - 1)] for place in range(length)}
            found += connection.execute(self._of(length), values).fetchall()
        return found

    def _of(self, length: int) -> sa.Select[Any]:
        if length not in self._made:
            self._made[length] = self._make(
                [sa.bindparam(f"id_{place}", type_=Id) for place in range(length)]
            )
        return self._made[length]

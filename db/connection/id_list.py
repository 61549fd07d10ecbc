"""Statements that take a list of ids, made once for each length of it: to write the list into the statement anew costs as much as to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db.connection.portions import portions
from db.types import Id

Ids = Sequence[sa.BindParameter[int]]


class ByIds:
    """`make` gives the statement for a list of so many ids. Lengths are powers of two, the last id filling up, so that they stay few.

    The statement asks for them in an IN alone, where an id that is repeated changes nothing, and has no limit, order or sum beyond one
    id's rows that matters: of a long list, each portion is a statement.
    """

    def __init__(self, make: Callable[[Ids], sa.Select[Any]]) -> None:
        self._make = make
        self._made: dict[int, sa.Select[Any]] = {}

    def rows(self, connection: Connection, ids: Sequence[int]) -> list[sa.Row[*tuple[Any, ...]]]:
        """What the statement finds of any number of ids, a portion after the other; of none, nothing is asked."""
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

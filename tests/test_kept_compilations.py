"""A statement is compiled once for all stores of a test run; each store fills in its own values."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

from db.connection.engine import Database
from tests.kept_compilations import kept


def names_of(url: str, name: str) -> list[str]:
    database = Database(sa.make_url(url))
    try:
        return database.read(
            lambda connection: list(
                connection.execute(sa.select(sa.literal(name).label("name"))).scalars()
            )
        )
    finally:
        database.close()


def test_two_stores_share_a_compiled_statement_but_not_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_statement = SQLCompiler.__init__

    def counted(self: SQLCompiler, *arguments: object, **named: object) -> None:
        compiled.append(self)
        compile_statement(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(SQLCompiler, "__init__", counted)
    with kept():
        found = [names_of(f"sqlite:///{tmp_path}/{name}.sqlite", name) for name in ("a", "b")]
    assert found == [["a"], ["b"]]
    assert len(compiled) == 1

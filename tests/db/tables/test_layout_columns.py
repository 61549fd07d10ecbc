"""The tables follow from what the core says about its values."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from db import schema
from db.store import Store
from orchestrator.core.problem.layout import LAYOUT_COLUMNS, Layout, to_columns

TYPES = {int: sa.Integer, str: sa.Text, dict: sa.JSON}


def test_the_columns_of_a_layout_are_those_that_the_core_lists() -> None:
    columns = list(schema.trial.c)
    first = schema.trial.c.keys().index("layout_key") + 1
    for column, wanted in zip(columns[first:], LAYOUT_COLUMNS, strict=False):
        assert (column.name, column.comment) == (wanted.name, wanted.means)
        assert (type(column.type), column.nullable) == (TYPES[wanted.type], wanted.is_nullable)
    assert columns[first + len(LAYOUT_COLUMNS)].name == "state"


@pytest.mark.parametrize("relation", ["trial", "v_trial"])
def test_table_and_view_have_the_columns_of_a_layout_in_its_order(
    store: Store, relation: str
) -> None:
    found = store._database.read(lambda connection: sa.inspect(connection).get_columns(relation))
    wanted = list(to_columns(Layout()))
    assert [each["name"] for each in found if each["name"] in wanted] == [
        column.name for column in LAYOUT_COLUMNS
    ]

"""What a column holds if a row is inserted without it."""

from __future__ import annotations

from db import schema


def test_a_column_that_may_be_null_is_null_if_an_insert_leaves_it_out() -> None:
    """Inserts of many rows leave out the columns that are NULL in all of them."""
    with_defaults = {
        str(column)
        for table in schema.metadata.tables.values()
        for column in table.columns
        if column.nullable and (column.default, column.server_default) != (None, None)
    }
    assert with_defaults == set()

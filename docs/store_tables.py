"""Tables of the store: its queries, views, tables and columns, as a new one has them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from db import migrate, schema
from db.sql import own_queries, readonly
from db.sql.named_queries import SWEEP, named_queries
from db.store import Store
from db.types import Json
from docs.markdown import markdown_table

PROJECT = Path(__file__).parent.parent


def query_table() -> str:
    """Each query with a name: its question, its parameters, and its columns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        Store.open(url).close()
        for query in named_queries().values():
            values = {**query.values(()), SWEEP: "none"}
            columns = readonly.own_query(url, query.sql, parameters=values).columns
            parameters = [f"`{each.name}=`: {each.means}" for each in query.parameters]
            rows.append(
                (
                    f"`@{query.name}`",
                    "<br>".join([query.question, *parameters]),
                    ", ".join(f"`{column}`" for column in columns),
                )
            )
    return markdown_table("query | question and parameters | columns", rows)


def view_list() -> str:
    """Each view with the first sentence of its SQL file, and its columns."""
    lines = []
    for view, columns in view_columns().items():
        source = (PROJECT / "db" / "views" / f"{view}.sql").read_text()
        about = source.splitlines()[0].removeprefix("-- ")
        lines += [f"**`{view}`**: {about}", "", ", ".join(f"`{column}`" for column in columns), ""]
    return "\n".join(lines).rstrip()


def table_list() -> str:
    lines = []
    for table in schema.metadata.sorted_tables:
        columns = ", ".join(
            f"`{column.name}`{' (JSON)' if column.type is Json else ''}" for column in table.columns
        )
        lines.append(f"- **`{table.name}`**: {columns}")
    return "\n".join(lines)


def column_table() -> str:
    """Every column of tables and views with its meaning."""
    places: dict[str, None] = {}
    for table in schema.metadata.tables.values():
        places |= dict.fromkeys(column.name for column in table.columns)
    for columns in view_columns().values():
        places |= dict.fromkeys(columns)
    means = migrate.meanings()
    return markdown_table(
        "column | meaning", [(f"`{name}`", means[name]) for name in sorted(places)]
    )


def view_columns() -> dict[str, tuple[str, ...]]:
    """The columns of each view, as a new store has them."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        Store.open(url).close()
        return own_queries.view_columns(url)

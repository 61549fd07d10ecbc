"""The program's own questions that need no opened store: names, columns of views, whole exports.

They run read-only and with limits, as a person's statement, but in this process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from db import schema
from db.sql import readonly
from db.sql.bounded_answer import Answer

# The shell waits for the names at each press of the Tab key.
MAX_NAMES = 200
NAMES_SECONDS = 2.0
MAX_EXPORTED = 10_000_000
EXPORT_SECONDS = 600.0  # 100,000 trials take about 8 s
_BOOLEANS = frozenset({"confident", "thrashing", "is_current_fingerprint"})
_TIMES = frozenset({"created_at", "updated_at"})


def sweep_names() -> list[str]:
    """Return the names of the newest sweeps of the default store, newest first.

    Raises SweepError if there is no store.
    """
    answer = readonly.own_query(
        None,
        "SELECT name FROM sweep ORDER BY id DESC",
        max_rows=MAX_NAMES,
        timeout_seconds=NAMES_SECONDS,
    )
    return [str(name) for (name,) in answer.rows]


def view_columns(database_url: str | None) -> dict[str, tuple[str, ...]]:
    """The columns of each view."""
    return {view: readonly.columns_of(database_url, view) for view in schema.VIEWS}


def exported_trials(database_url: str | None, sweep_id: int | None) -> Answer:
    """All columns of `v_trial` for each trial of a sweep; None: of all sweeps."""
    condition = "" if sweep_id is None else f" WHERE sweep_id = {sweep_id}"
    answer = readonly.own_query(
        database_url,
        f"SELECT * FROM v_trial{condition} ORDER BY trial_id",
        max_rows=MAX_EXPORTED,
        timeout_seconds=EXPORT_SECONDS,
    )
    return replace(answer, rows=[_typed(answer.columns, values) for values in answer.rows])


def _typed(columns: Sequence[str], values: Sequence[Any]) -> tuple[Any, ...]:
    """A row of v_trial with the same types from every database.

    SQLite has no booleans, times or JSON, and PostgreSQL orders the keys of JSON in its own way.
    """

    def typed(name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in _BOOLEANS:
            return bool(value)
        if name in _TIMES:
            at = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
            return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        if name in ("options", "extra"):
            fields = json.loads(value) if isinstance(value, str) else value
            return dict(sorted(fields.items()))
        return value

    return tuple(map(typed, columns, values))

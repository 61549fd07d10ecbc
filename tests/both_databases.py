"""Runs a long test on SQLite for `make test`, and on PostgreSQL too for `make test-all`."""

from __future__ import annotations

import pytest

POSTGRESQL_IS_LONG = pytest.mark.parametrize(
    "store_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fresh_stores import Fresh, fresh_postgresql, fresh_sqlite


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    """Empty stores to be had again and again, on each of the two databases."""
    if request.param == "sqlite":
        return fresh_sqlite(tmp_path)
    return fresh_postgresql(request.getfixturevalue("postgresql_server"))

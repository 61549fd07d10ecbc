"""What the tests of the store share."""

from __future__ import annotations

import pytest

from db.store import Store
from tests.db.builders import Bench


@pytest.fixture
def bench(store: Store) -> Bench:
    """A sweep with one cell, held by the test."""
    return Bench.on(store)

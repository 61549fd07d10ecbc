"""A store with a trial in every state and hostile texts, and a server that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.store import Store
from tests.cli.cli_store import Filled, fill
from tests.cli.ui.served import Visitor, served


@pytest.fixture(scope="module")
def shown_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('ui')}/sweep.sqlite"


@pytest.fixture(scope="module")
def shown(shown_url: str, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    folder: Path = tmp_path_factory.mktemp("logs")
    with Store.open(shown_url) as store:
        found = fill(store, folder)
        fill(store, folder, "other")
        return found


@pytest.fixture(scope="module")
def visitor(shown_url: str, shown: Filled) -> Iterator[Visitor]:
    """A visitor with a session of a server that the tests of a module share."""
    with served(shown_url) as found:
        found.enter()
        yield found


@pytest.fixture
def either_store(store_url: str) -> Iterator[Store]:
    """An empty store, on each of the two databases."""
    with Store.open(store_url) as opened:
        yield opened

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.command import Command, CommandHere


@pytest.fixture
def command(tmp_path: Path, sqlite_url: str) -> Command:
    return Command(tmp_path, sqlite_url)


@pytest.fixture
def here(command: Command) -> CommandHere:
    """The command in this process, on the store of `command`."""
    return command.here


@pytest.fixture
def command_on(tmp_path: Path, store_url: str) -> Command:
    """The command on each of the two databases."""
    return Command(tmp_path, store_url)

"""The commands in this process, on a store of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from db.store import Store
from orchestrator import cli
from orchestrator.cli.doctor import machine_checks
from tests.acceptance.command import CommandHere
from tests.kept_loggers import kept_loggers

Sweep = Callable[..., tuple[str, str]]


@pytest.fixture
def store(
    sqlite_store: Store, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Store:
    monkeypatch.setenv("SWEEP_DB", sqlite_url)
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    return sqlite_store


@pytest.fixture
def command(tmp_path: Path, sqlite_url: str) -> CommandHere:
    return CommandHere(tmp_path, sqlite_url)


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str]) -> Iterator[Sweep]:
    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert cli.main(arguments) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out, err

    with kept_loggers():
        yield run


@pytest.fixture
def quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and Ray, which take seconds to import, cannot be imported."""
    real = machine_checks.start
    monkeypatch.setattr(
        machine_checks, "start", lambda program: real("raise ImportError('No module named x')")
    )

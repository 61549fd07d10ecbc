"""The folders of a sweep on this machine, without a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.store.home import run_root
from orchestrator.cli.store.sweep_folders import (
    NOTES,
    Removal,
    finish_removal,
    folder_bytes,
    link_folder,
    note_removal,
    noted_removals,
)

MINE = Removal(name="mine", run_token="0a1b", store="here")


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of sweep `mine`."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    path = run_root("mine-0a1b") / "trial-1" / "log-0.txt"
    path.parent.mkdir(parents=True)
    path.write_text("x" * 10)
    return path


def test_the_size_is_that_of_all_files_also_by_another_name() -> None:
    (run_root("mine-0a1b") / "log-1.txt").write_text("x" * 5)
    link_folder("mine-0a1b", "yours-0a1b")
    assert folder_bytes("mine-0a1b") == folder_bytes("yours-0a1b") == 15
    assert folder_bytes("nobody-0a1b") is None


def test_another_name_leads_to_the_same_files_however_often_it_is_given(log: Path) -> None:
    for old, new in (("mine", "yours"), ("mine", "yours"), ("yours", "ours"), ("ours", "mine")):
        link_folder(f"{old}-0a1b", f"{new}-0a1b")
        assert (run_root(f"{new}-0a1b") / "trial-1" / log.name).read_text() == log.read_text()
    link_folder("nobody-ffff", "somebody-ffff")
    assert not run_root("somebody-ffff").exists()


def test_a_removal_is_finished_only_once_the_store_has_forgotten_the_sweep(log: Path) -> None:
    link_folder("mine-0a1b", "yours-0a1b")
    other = run_root("mine-ffff")
    other.mkdir()
    note_removal(MINE)
    assert noted_removals("here") == [MINE]
    assert finish_removal(MINE, {"0a1b"}) is False
    assert log.is_file() and noted_removals("here") == []
    note_removal(MINE)
    assert finish_removal(MINE, {"ffff"}) is True
    assert sorted(path.name for path in run_root("").iterdir()) == [NOTES, "mine-ffff"]
    # Once more, as after a kill between the last two steps.
    assert finish_removal(MINE, set()) is True


def test_the_notes_of_other_stores_and_torn_ones_are_left_alone() -> None:
    note_removal(MINE)
    (run_root("") / NOTES / "ffff").write_text('{"name": "mi')
    assert noted_removals("elsewhere") == []
    assert noted_removals("here") == [MINE]

"""What `sweep run` checks before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.run.checks import check_home


def test_a_new_folder_for_runs_in_a_new_folder_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "mistyped" / "home"
    monkeypatch.setenv("SWEEP_HOME", str(home))
    check_home()
    assert capsys.readouterr().err == f"New folder for runs: {home} (SWEEP_HOME)\n"
    check_home()
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "other"))
    check_home()
    assert capsys.readouterr().err == ""

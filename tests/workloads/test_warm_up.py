"""A rank that is run once in the process that forks ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from orchestrator.core.trial.protocol import Phase, RankResult
from workloads.rank import Rank
from workloads.warm_up import run_once


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_is_run_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    seen: list[Path] = []

    def pretend(rank: Rank) -> RankResult:
        rank.heartbeat(Phase.RENDEZVOUS)
        seen.append(rank.run_dir)
        return RankResult(step_seconds=[0.5])

    parent = tmp_path if is_there else Path("/tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path) if is_there else str(tmp_path / "elsewhere"))
    # Nobody has asked for the usual folder yet.
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    run_once(pretend, "mine")
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before
    assert tempfile.tempdir is None
    assert [(folder.parent, folder.exists()) for folder in seen] == [(parent, False)]

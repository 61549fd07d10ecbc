"""The files of ended attempts that the database does not have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.cluster.contract import Finished
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.node_report import NodeReport, RankOutcome
from orchestrator.core.trial.protocol import RankResult
from orchestrator.sweep.spool import Spool, Spooled


def end_of(trial_id: int) -> Finished:
    rank = RankOutcome(rank=0, exit_code=0, result=RankResult(step_seconds=[0.5] * 6))
    return Finished(
        trial_id=trial_id,
        reports=[NodeReport(node="here", ranks=[rank])],
        failure=None,
        gpu_seconds=2.0,
    )


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_ends_are_read_back_oldest_first_and_a_dropped_one_is_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    ends = [Spooled(attempt=1, end=end_of(trial_id)) for trial_id in (9, 7, 8)]
    for age, spooled in zip((30, 20, 10), ends, strict=True):
        spool.keep(spooled)
        os.utime(tmp_path / spooled.name, (1e9 - age, 1e9 - age))
    later = Spool(tmp_path)
    assert list(later.left()) == ends
    later.drop(ends[1])
    assert names_in(tmp_path) == ["trial-8-attempt-1.json", "trial-9-attempt-1.json"]
    later.drop(ends[1])
    assert list(Spool(tmp_path).left()) == [ends[0], ends[2]]


def test_an_end_is_written_once_until_it_is_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spooled = Spooled(attempt=1, end=end_of(7))
    spool.keep(spooled)
    (tmp_path / spooled.name).write_text("kept")
    spool.keep(spooled)
    assert (tmp_path / spooled.name).read_text() == "kept"
    spool.drop(spooled)
    spool.keep(spooled)
    assert list(Spool(tmp_path).left()) == [spooled]


def test_a_spool_removes_no_file_that_it_has_not_kept_or_read(tmp_path: Path) -> None:
    spooled = Spooled(attempt=1, end=end_of(7))
    Spool(tmp_path).keep(spooled)
    Spool(tmp_path).drop(spooled)
    assert names_in(tmp_path) == [spooled.name]


def test_a_refused_end_stays_under_another_name_and_is_not_read_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spooled = Spooled(attempt=2, end=end_of(7))
    spool.keep(spooled)
    assert spool.set_aside(spooled) == tmp_path / "trial-7-attempt-2.refused"
    assert names_in(tmp_path) == ["trial-7-attempt-2.refused"]
    assert list(Spool(tmp_path).left()) == []


def test_a_spool_that_was_never_made_is_empty_and_one_that_cannot_be_read_ends_the_call(
    tmp_path: Path,
) -> None:
    assert list(Spool(tmp_path / "spool").left()) == []
    (tmp_path / "spool").write_text("where the folder should be: as unreadable, also for root")
    with pytest.raises(
        UsageInvalid, match=f"Not a directory: {tmp_path}/spool. .* make it readable"
    ):
        list(Spool(tmp_path / "spool").left())


def test_what_is_no_spooled_end_is_set_aside_and_a_torn_file_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    kept = Spooled(attempt=1, end=end_of(7))
    spool.keep(kept)
    (tmp_path / "spool" / "trial-8-attempt-1.json").write_text('{"attempt": 1, "end"')
    (tmp_path / "spool" / "trial-9-attempt-1.json.123.tmp").write_text("{")
    assert list(Spool(tmp_path / "spool").left()) == [kept]
    assert "trial-8-attempt-1.unreadable" in caplog.text

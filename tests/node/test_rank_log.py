"""A rank's log: bounded in file and memory, and complete within these bounds."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import pytest

from orchestrator.core.trial.redaction import Secrets
from orchestrator.node.rank_log import RankLog

HEAD, TAIL = 100, 50


def log(folder: Path) -> RankLog:
    found = RankLog(folder / "log.txt", head_bytes=HEAD, tail_bytes=TAIL)
    found.create()
    return found


def letters(count: int) -> bytes:
    return bytes(ord("a") + i % 26 for i in range(count))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 60, 1000])
@pytest.mark.parametrize("count", [0, HEAD - 1, HEAD, HEAD + 1, HEAD + TAIL])
def test_what_fits_is_kept_whole(tmp_path: Path, count: int, chunk_bytes: int) -> None:
    written, kept = letters(count), log(tmp_path)
    for start in range(0, count, chunk_bytes):
        kept.write(written[start : start + chunk_bytes])
    kept.close()
    assert kept.path.read_bytes() == written


@pytest.mark.parametrize("chunk_bytes", [1, 7, 60, 1000])
def test_of_what_does_not_fit_the_head_and_the_tail_are_kept_and_the_gap_is_told(
    tmp_path: Path, chunk_bytes: int
) -> None:
    written, kept = letters(1000), log(tmp_path)
    for start in range(0, len(written), chunk_bytes):
        kept.write(written[start : start + chunk_bytes])
    kept.close()
    head, note, tail = (
        kept.path.read_bytes()[:HEAD],
        kept.path.read_bytes()[HEAD:-TAIL],
        kept.path.read_bytes()[-TAIL:],
    )
    assert (head, tail) == (written[:HEAD], written[-TAIL:])
    assert b"850 bytes cut here" in note
    assert len(note) < 100


def test_a_rank_that_never_stops_writing_grows_neither_the_file_nor_the_launcher(
    tmp_path: Path,
) -> None:
    kept = log(tmp_path)
    for _ in range(100):
        kept.write(letters(70))
        assert len(kept._recent) <= 2 * TAIL + 70
        assert kept.path.stat().st_size <= HEAD
    assert kept.tail(10) == letters(70)[-10:].decode()


def test_a_pipe_is_taken_in_turns_and_its_end_is_told(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    kept = log(tmp_path)
    os.write(writer, b"first ")
    assert kept.copy(reader)
    os.write(writer, b"second")
    os.close(writer)
    assert not kept.copy(reader)
    os.close(reader)
    kept.close()
    assert kept.path.read_bytes() == b"first second"


def test_a_full_disk_takes_the_log_but_not_the_launcher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    kept = log(tmp_path)
    assert kept._file is not None
    kept._file.close()
    kept._file = FileIO("/dev/full", "w")
    for _ in range(20):
        kept.write(letters(300))
    assert kept.tail(20) == letters(300)[-20:].decode()
    kept.close()
    assert len(caplog.records) == 1, "said once, not once a line"


def test_without_a_file_the_tail_is_kept_and_the_launcher_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = log(tmp_path / "missing")
    for _ in range(20):
        kept.write(letters(300))
    kept.close()
    assert kept.tail(20) == letters(300)[-20:].decode()
    assert len(caplog.records) == 1 and "No such file" in caplog.text


@pytest.mark.parametrize("chunk_bytes", [1, 7, 60, 1000])
def test_a_secret_is_in_neither_the_file_nor_the_tail_however_it_arrives(
    tmp_path: Path, chunk_bytes: int
) -> None:
    written = letters(90) + b" s3cr3t-t0ken " + letters(200) + b"\ns3cr3t-\nt0ken and s3cr3t-t0ke"
    kept = RankLog(
        tmp_path / "log.txt",
        secrets=Secrets({"TOKEN": "s3cr3t-t0ken"}),
        head_bytes=HEAD,
        tail_bytes=1000,
    )
    kept.create()
    for start in range(0, len(written), chunk_bytes):
        kept.write(written[start : start + chunk_bytes])
    kept.close()
    assert (
        kept.path.read_bytes() == letters(90) + b" *** " + letters(200) + b"\n*** and s3cr3t-t0ke"
    )
    assert kept.tail(40).endswith("\n*** and s3cr3t-t0ke")

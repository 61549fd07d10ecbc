"""An export goes to a file in one piece, to a pipe as it is, or to stdout."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from orchestrator.cli.export.output_file import write_bytes, write_text
from orchestrator.core.errors import UsageInvalid


def test_a_file_is_replaced_in_one_piece_and_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "trials.csv", tmp_path / "newest.csv"
    file.write_text("old")
    link.symlink_to(file)
    before = file.stat().st_ino
    write_text("new\n", str(link))
    assert link.is_symlink() and file.read_text() == "new\n"
    assert file.stat().st_ino != before, "written under another name, and renamed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest.csv", "trials.csv"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(b"rows", str(pipe))
    reader.join(timeout=30.0)
    assert read == [b"rows"] and pipe.is_fifo()


def test_without_a_file_a_text_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_text("a,b\n1,2\n", None)
    assert capsys.readouterr().out == "a,b\n1,2\n"


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "trials.csv"
    with pytest.raises(UsageInvalid, match=f"cannot write {missing}: No such file or directory"):
        write_text("a", str(missing))

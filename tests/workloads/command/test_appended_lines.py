"""Lines that a program appends to a file while it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.core.trial.protocol import MAX_RESULT_BYTES
from workloads.command.appended_lines import AppendedLines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_line_is_returned_once_when_it_is_complete(path: Path) -> None:
    lines = AppendedLines(path)
    assert lines.read() == ([], True)  # there is no file yet
    path.write_bytes(b"one\ntw")
    assert lines.read() == ([b"one"], True)
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert lines.read() == ([b"two"], True)
    assert lines.read_to_the_end() == [b"three"]
    assert lines.lost is None
    assert not lines.may_have_lost_lines


def test_of_a_line_that_is_too_long_only_the_beginning_is_returned(path: Path) -> None:
    lines = AppendedLines(path)
    path.write_bytes(b"x" * (MAX_RESULT_BYTES + 5) + b"\nnext\n")
    found = []
    are_all = False
    while not are_all:
        some, are_all = lines.read()
        found += some
    assert [line[:4] for line in found] == [b"xxxx", b"next"]


def test_a_file_that_is_written_anew_has_lost_lines(path: Path) -> None:
    lines = AppendedLines(path)
    path.write_bytes(b"one\n")
    lines.read()
    path.write_bytes(b"two\nthree\n")
    lines.read()
    assert lines.lost is not None
    assert "was written anew" in lines.lost


def test_a_file_that_changes_without_growing_may_have_lost_lines(path: Path) -> None:
    lines = AppendedLines(path)
    path.write_bytes(b"one\n")
    lines.read()
    os.utime(path, ns=(1, 1))
    lines.read()
    assert lines.may_have_lost_lines
    assert lines.lost is None


def test_what_is_no_regular_file_is_not_read(path: Path) -> None:
    os.mkfifo(path)
    lines = AppendedLines(path)
    assert lines.read() == ([], True)
    assert lines.lost is not None

"""Whatever somebody names as a file is read at once, within bounds, or refused."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from orchestrator.cli.sweep_file import load
from orchestrator.cluster.replayed import table_text
from orchestrator.core.errors import SpecInvalid, UsageInvalid
from orchestrator.node import text_file
from orchestrator.node.text_file import TooLarge, read_text


def test_a_file_of_just_the_size_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("x" * 100)
    assert read_text(file, most_bytes=100) == "x" * 100
    with pytest.raises(TooLarge):
        read_text(file, most_bytes=99)


def test_a_device_without_end_is_given_up() -> None:
    with pytest.raises(TooLarge):
        read_text(Path("/dev/zero"), most_bytes=1 << 20)


def test_a_pipe_that_nobody_writes_to_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    began = time.monotonic()
    assert read_text(tmp_path / "p", most_bytes=100) == ""
    assert time.monotonic() - began < 5.0


def test_a_pipe_is_read_to_its_end_however_slowly_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()

    def write() -> None:
        for piece in (b"a: ", b"1\n", b"b: 2"):
            time.sleep(0.05)
            os.write(writer, piece)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert (
            read_text(Path(f"/dev/fd/{reader}"), most_bytes=100) == "a: 1\nb: 2"
        )  # as the shell's <(...)
    finally:
        thread.join()
        os.close(reader)


def test_a_pipe_whose_writer_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "PIPE_SECONDS", 0.1)
    reader, writer = os.pipe()
    try:
        with pytest.raises(TimeoutError, match="nothing came out of it"):
            read_text(Path(f"/dev/fd/{reader}"), most_bytes=100)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_sweep_file_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name, says in (
        ("/dev/zero", "larger than 1024 KiB"),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "loop.yaml"), "symbolic links"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises((SpecInvalid, UsageInvalid), match=says) as caught:
            load(Path(name), None)
        assert "\n" not in str(caught.value)


def test_a_table_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, says in (("/dev/zero", "larger than 64 MiB"), (str(tmp_path), "Is a directory")):
        with pytest.raises(UsageInvalid, match=says):
            table_text(name)

"""The search of a program's output for steps that nobody reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workloads.command.own_log import why_steps_are_unread

STEPS = b"step_seconds=0.07\n" * 10
NOT_READ = "its steps are in what it prints, which is not read"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe: its end to read, and its end to write."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_lines_are_waited_for_while_the_launcher_has_not_read_them(
    tmp_path: Path, pipe: tuple[int, int], delay: float
) -> None:
    """On a busy machine it reads them later than half a second after the program has ended."""
    log, (reader, writer) = tmp_path / "log-0.txt", pipe
    log.write_bytes(b"")
    os.write(writer, STEPS)

    def copy() -> None:
        time.sleep(delay)
        log.write_bytes(os.read(reader, 1 << 16))

    launcher = threading.Thread(target=copy)
    launcher.start()
    why = why_steps_are_unread(log, pipe=writer)
    launcher.join()
    assert why is not None and NOT_READ in why


@pytest.mark.parametrize("text", [b"", b"loading the model\n"])
def test_a_program_that_prints_no_steps_is_not_waited_for(
    tmp_path: Path, pipe: tuple[int, int], text: bytes
) -> None:
    log = tmp_path / "log-0.txt"
    log.write_bytes(text)
    assert why_steps_are_unread(log, pipe=pipe[1]) is None
    # Nothing more comes from a file, or without a log.
    with log.open("ab") as file:
        assert why_steps_are_unread(tmp_path / "missing", pipe=file.fileno()) is None

"""The children of a process, whichever of its threads has started them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from layout_sweep.child_processes import children

WAITING = [sys.executable, "-c", "input()"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(found: list[subprocess.Popen[bytes]]) -> None:
    found.append(subprocess.Popen(WAITING, stdin=subprocess.PIPE))


def test_a_child_of_another_thread_is_found(started: list[subprocess.Popen[bytes]]) -> None:
    before = set(children(os.getpid()))
    start(started)
    is_over = threading.Event()

    def other() -> None:
        start(started)
        is_over.wait()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        while len(started) < 2:
            thread.join(0.01)
        found = set(children(os.getpid())) - before
    finally:
        is_over.set()
        thread.join()
    assert found == {process.pid for process in started}


def test_a_process_without_children_or_that_is_gone_has_none(
    started: list[subprocess.Popen[bytes]],
) -> None:
    start(started)
    [process] = started
    assert children(process.pid) == []
    process.kill()
    process.wait()
    assert children(process.pid) == []

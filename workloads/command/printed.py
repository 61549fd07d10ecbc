"""Reads numbers from what the program prints, and passes its output on to the rank's log unchanged.

The program's stdout and stderr are a pipe to this process, as they are a pipe to the launcher
otherwise, so the program buffers as ever. A thread copies the pipe to the log at once. The patterns
are applied in the main thread, between the rank's other work: only there can a slow one be stopped.
"""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.core.sweepfile.metrics_section import LinePatterns
from orchestrator.core.trial.redaction import Secrets, redacted
from orchestrator.core.trial.terminal_text import plain_text
from workloads.command.known_steps import KnownSteps
from workloads.rank import ConfigRejected

# The rest of a longer line is not searched.
MAX_LINE_BYTES = 4096
# CPU time for the patterns on this many lines, which take some milliseconds.
PATTERN_SECONDS = 1.0
_LINES_AT_ONCE = 100
_READ_BYTES = 1 << 16
# How often the thread looks whether the program has ended while its children keep the pipe open.
_POLL_SECONDS = 0.02
# Chunks that wait for the patterns. A program that prints more than that at once has to wait.
_MAX_CHUNKS = 256
# For the other ranks of a node, when the program of rank 0 has ended.
_OTHERS_SECONDS = 10.0
# For what children of a program that has ended still print.
_LAST_SECONDS = 1.0
_LINE_ENDS = re.compile(rb"[\r\n]")


class PrintedMetrics:
    """The output of one program. Its numbers become lines of the node's metrics file."""

    def __init__(
        self,
        patterns: LinePatterns,
        *,
        rank: int,
        others: Sequence[int] = (),
        metrics_file: Path,
        secrets: Secrets,
        several_ranks: bool = False,
        log_fd: int = 1,
    ) -> None:
        """`others`: the other ranks of this node whose output is read, each by its own rank.

        `several_ranks`: the program starts several ranks, which all print into its output.
        """
        self._patterns = patterns
        self._others = others
        self._secrets = secrets
        self._rank = rank
        self._metrics_file = metrics_file
        self._log_fd = log_fd
        # For the program; `start` closes it here.
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        self._chunks: queue.Queue[bytes] = queue.Queue(_MAX_CHUNKS)
        self._has_ended = threading.Event()
        self._is_searched = True
        self._thread = threading.Thread(target=self._copy, name="program-output", daemon=True)
        self._rest = b""
        self._claimed: bool | None = None
        self._known = KnownSteps(several_ranks=several_ranks, began=time.monotonic())
        self.num_lines = 0
        self.num_steps = 0  # told by this program's lines
        self.last_line = ""

    def start(self) -> None:
        """Start to copy, after the program has started: a fork needs a process with one thread."""
        os.close(self.writer)
        self._thread.start()

    def read(self) -> None:
        """Search the lines that have come since. Raises ConfigRejected if a pattern is too slow."""
        found: list[bytes] = []
        with suppress(queue.Empty):
            while True:
                found += self._lines(self._chunks.get_nowait())
        self._search(found)

    def finish(self) -> None:
        """Read what is left of a program that has ended, also if its children keep the pipe open.

        Raises ConfigRejected as `read` does.
        """
        self._has_ended.set()
        while self._thread.is_alive():
            self.read()
            self._thread.join(0.002)
        self.read()
        if self._rest:
            self._search([self._rest])
            self._rest = b""
        # The program may have removed the folder.
        with suppress(OSError):
            self._end_of(self._rank).touch()

    def await_others(self) -> None:
        """Wait, but not for long, until the rank that prints the steps has read all its output."""
        until = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < until and not all(
            self._end_of(rank).exists() for rank in self._awaited()
        ):
            time.sleep(_POLL_SECONDS)

    def search_no_more(self) -> None:
        """Only copy from now on: the numbers are in."""
        self._is_searched = False
        with suppress(queue.Empty):
            while True:
                self._chunks.get_nowait()

    def close(self) -> None:
        """Let what was printed so far reach the log, without a search."""
        self.search_no_more()
        self._has_ended.set()
        self._thread.join(_LAST_SECONDS)

    def why_no_steps(self) -> str | None:
        """Return why the lines told no step; None if they did."""
        if self.num_steps:
            return None
        if not self.num_lines:
            return f"rank {self._rank} printed nothing"
        lines = "line" if self.num_lines == 1 else "lines"
        return (
            f"rank {self._rank} printed {self.num_lines} {lines}, and workload.options.metrics.log"
            f" found a number in none; the last: {self.last_line[:200]}"
        )

    def _copy(self) -> None:
        """Copy until the pipe is closed, or is empty after the program's end."""
        until = float("inf")
        while time.monotonic() < until:
            has_ended = self._has_ended.is_set()
            ready, _, _ = select.select([self._reader], [], [], 0.0 if has_ended else _POLL_SECONDS)
            if has_ended and until == float("inf"):
                until = time.monotonic() + _LAST_SECONDS
            if not ready and has_ended:
                return
            if not ready:
                continue
            chunk = os.read(self._reader, _READ_BYTES)
            if not chunk:
                return
            _write_all(self._log_fd, chunk)
            if self._is_searched:
                self._chunks.put(chunk)

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the complete lines, cut to MAX_LINE_BYTES; a carriage return ends a line too."""
        *complete, rest = _LINE_ENDS.split(chunk)
        for line in complete:
            yield (self._rest + line)[:MAX_LINE_BYTES]
            self._rest = b""
        self._rest = (self._rest + rest)[:MAX_LINE_BYTES]

    def _search(self, lines: list[bytes]) -> None:
        """Note what lines tell. Raises ConfigRejected if a pattern is too slow."""
        self._known.begin_read(time.monotonic())
        for first in range(0, len(lines), _LINES_AT_ONCE):
            try:
                with _cpu_time_limit(PATTERN_SECONDS):
                    told = self._told(lines[first : first + _LINES_AT_ONCE])
            except _TooSlow:
                raise ConfigRejected(
                    f"the patterns in workload.options.metrics took more than {PATTERN_SECONDS:g} s"
                    " on a few lines: one of them tries very many ways to match a line (as (a+)+"
                    f" does); make it simpler. The line: {self.last_line[:200]}"
                ) from None
            self._write(told)

    def _told(self, lines: list[bytes]) -> list[dict[str, Any]]:
        told = []
        for line in lines:
            if not line.strip():
                continue
            self.num_lines += 1
            self.last_line = plain_text(line)
            if values := self._patterns.values_of(self.last_line):
                told.append(values)
        return told

    def _write(self, told: list[dict[str, Any]]) -> None:
        """Append to the node's metrics file; the steps of the first rank there that prints some."""
        lines = []
        for values in told:
            if "step_seconds" in values:
                self.num_steps += 1
                # Another rank gives the steps, or another one of this stream gave this step.
                seconds, number = values["step_seconds"], values.get("step")
                if not self._is_reporter() or not self._known.is_new(number, seconds):
                    del values["step_seconds"]
            if values:
                lines.append(json.dumps(redacted(values, self._secrets)) + "\n")
        if lines:
            with self._metrics_file.open("a") as file:
                file.write("".join(lines))

    def _awaited(self) -> Sequence[int]:
        """The ranks whose output may still have steps: the one that prints them, or any other."""
        try:
            reporter = int(self._claim.read_text())
        except (OSError, ValueError):
            return self._others
        return [reporter] if reporter in self._others else []

    @property
    def _claim(self) -> Path:
        """The file with the number of the rank whose lines give the steps of this node."""
        return self._metrics_file.with_name("printed-by")

    def _end_of(self, rank: int) -> Path:
        """A file that appears when all output of a rank's program was read."""
        return self._metrics_file.with_name(f"printed-end-{rank}")

    def _is_reporter(self) -> bool:
        if self._claimed is None:
            try:
                with self._claim.open("x") as file:
                    file.write(f"{self._rank}\n")
                self._claimed = True
            except FileExistsError:
                self._claimed = False
        return self._claimed


class _TooSlow(Exception):
    """The patterns used up their CPU time."""


@contextmanager
def _cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in the main thread after this CPU time, even inside of a match.

    The regular expressions of CPython look for signals every few thousand steps.
    """

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    # The launcher may be gone; then this rank ends anyway.
    with suppress(OSError):
        while view:
            view = view[os.write(fd, view) :]

"""Numbers read from a program's output: all of it reaches the log, and a slow pattern ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.sweepfile.metrics_section import LinePatterns, MetricsSection
from orchestrator.core.trial.redaction import Secrets
from workloads.command.printed import MAX_LINE_BYTES, PrintedMetrics
from workloads.rank import ConfigRejected


class Node:
    """The run folder of a node, and a log for each of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.metrics_file = folder / "program-metrics.jsonl"
        self._folder = folder

    def printed(self, rank: int = 0, secrets: dict[str, str] | None = None, **section: Any) -> Run:
        patterns = LinePatterns(
            MetricsSection.model_validate({"log": r"time ([\d.]+)ms", "unit": "ms", **section}),
            tokens_per_step=1,
            world_size=1,
        )
        return Run(self, patterns, rank, secrets or {})

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]


class Run:
    """One program whose output is read."""

    def __init__(
        self, node: Node, patterns: LinePatterns, rank: int, secrets: dict[str, str]
    ) -> None:
        self._log = os.memfd_create("log")
        self.metrics = PrintedMetrics(
            patterns,
            rank=rank,
            metrics_file=node.metrics_file,
            secrets=Secrets(secrets),
            log_fd=self._log,
        )

    def of(self, source: str) -> bytes:
        """Run a program to its end, and return what reached the log."""
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdout=self.metrics.writer, stderr=self.metrics.writer
        )
        self.metrics.start()
        while process.poll() is None:
            self.metrics.read()
            time.sleep(0.005)
        self.metrics.finish()
        return self.log

    @property
    def log(self) -> bytes:
        size = os.fstat(self._log).st_size
        return os.pread(self._log, size, 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_every_byte_reaches_the_log_and_each_matching_line_becomes_a_step(node: Node) -> None:
    run = node.printed(also={"loss": r"loss ([\d.]+)"})
    log = run.of(
        "import sys\n"
        "sys.stdout.buffer.write(bytes(range(256)) + b'\\n')\n"
        "for step in range(3):\n"
        "    print(f'iter {step}: loss {9 - step}.5, time {100 + step}.5ms')\n"
        "sys.stdout.flush()\n"
        "sys.stderr.write('time 7ms without an end')\n"
    )
    assert (
        log
        == bytes(range(256))
        + b"\n"
        + b"".join(
            f"iter {step}: loss {9 - step}.5, time {100 + step}.5ms\n".encode() for step in range(3)
        )
        + b"time 7ms without an end"
    )
    assert node.lines == [
        {"step_seconds": pytest.approx(0.1005), "loss": 9.5},
        {"step_seconds": pytest.approx(0.1015), "loss": 8.5},
        {"step_seconds": pytest.approx(0.1025), "loss": 7.5},
        {"step_seconds": pytest.approx(0.007)},
    ]
    assert run.metrics.why_no_steps() is None


def test_bars_colours_and_long_lines_are_read_too(node: Node) -> None:
    run = node.printed()
    run.of(
        "import sys\n"
        "print('\\x1b[33mtime \\x1b[31m5ms\\x1b[0m')\n"
        "print('10% time 6ms', end='\\r'); print('20% time 7ms', end='\\r')\n"
        f"print('x' * {2 * MAX_LINE_BYTES} + 'time 8ms')\n"
        f"print('time 9ms' + 'x' * {1 << 20})\n"
    )
    assert [line["step_seconds"] for line in node.lines] == pytest.approx(
        [0.005, 0.006, 0.007, 0.009]
    )


def test_the_number_of_a_step_is_kept_with_its_line(node: Node) -> None:
    also = {"step": r"iter +(\d+)"}
    node.printed(also=also).of("print('iter 10 time 5ms'); print('iter 20 time 6ms')")
    assert [line["step"] for line in node.lines] == [10, 20]


def test_ranks_that_print_the_same_step_into_one_stream_give_it_once(node: Node) -> None:
    also = {"step": r"iter +(\d+)", "peak_memory": r"memory (\d+)"}
    node.printed(also=also).of(
        "for step, rank in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 2), (1, 1), (2, 0), (2, 3)]:\n"
        "    print(f'iter {step} time 5.{rank}ms memory {rank}')\n"
    )
    assert len(node.lines) == 8
    steps = [line for line in node.lines if "step_seconds" in line]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert max(line["peak_memory_allocated_bytes"] for line in node.lines) == 3


def test_a_counter_of_the_steps_in_an_epoch_counts_further_steps(node: Node) -> None:
    run = node.printed(also={"step": r"step (\d+)"})
    run.of(
        "import time\n"
        "for epoch in range(2):\n"
        "    for step in range(1, 9):\n"
        "        time.sleep(0.02)\n"
        "        print(f'step {step}: time 20ms', flush=True)\n"
    )
    assert [line["step"] for line in node.lines if "step_seconds" in line] == [*range(1, 9)] * 2


def test_the_steps_are_those_of_the_first_rank_that_prints_some_and_memory_that_of_all(
    node: Node,
) -> None:
    also = {"peak_memory": r"memory (\S+)"}
    node.printed(rank=0, also=also).of("print('memory 3GiB')")
    node.printed(rank=3, also=also).of("print('time 5ms memory 1GiB')")
    node.printed(rank=2, also=also).of("print('time 6ms memory 2GiB')")
    assert node.lines == [
        {"peak_memory_allocated_bytes": 3 << 30},
        {"step_seconds": 0.005, "peak_memory_allocated_bytes": 1 << 30},
        {"peak_memory_allocated_bytes": 2 << 30},
    ]


def test_a_child_that_keeps_the_output_open_does_not_delay_the_end(node: Node) -> None:
    run = node.printed()
    began = time.monotonic()
    run.of(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '30'])\n"
        "print('time 5ms')\n"
        "print('child', child.pid)\n"
    )
    pid = int(run.log.split()[-1])
    try:
        assert time.monotonic() - began < 10
        assert len(node.lines) == 1
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_pattern_that_tries_too_much_is_refused_and_the_output_is_in_the_log(node: Node) -> None:
    run = node.printed(log=r"((?:a+)+)b", unit="ms")
    with pytest.raises(
        ConfigRejected, match=r"more than 1 s on a few lines.*make it simpler.*aaaa"
    ):
        run.of(f"print('a' * {MAX_LINE_BYTES})")
    assert run.log == b"a" * MAX_LINE_BYTES + b"\n"
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_very_many_lines_are_no_slow_pattern(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.command.printed.PATTERN_SECONDS", 0.1)
    run = node.printed(also={f"other_{n}": rf"other{n} (\d+)" for n in range(20)})
    run.of("print(('nothing of interest here ' * 5 + chr(10)) * 30_000, 'time 5ms')")
    # All of it takes longer than the limit; a few lines do not.
    assert len(node.lines) == 1 and run.metrics.num_lines == 30_001


def test_a_secret_that_a_pattern_finds_is_written_nowhere(node: Node) -> None:
    run = node.printed(also={"url": r"url (\S+)"}, secrets={"TOKEN": "hunter2hunter2"})
    run.of("print('time 5ms url https://hunter2hunter2/x')")
    assert node.lines[0]["url"] == "https://***/x"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("pass", "rank 0 printed nothing"),
        (
            "print('hello'); print('step took 5 ms')",
            "printed 2 lines, and .* the last: step took 5 ms",
        ),
    ],
)
def test_why_there_are_no_steps_is_told(source: str, said: str, node: Node) -> None:
    run = node.printed()
    run.of(source)
    why = run.metrics.why_no_steps()
    assert why is not None and re.search(said, why), why

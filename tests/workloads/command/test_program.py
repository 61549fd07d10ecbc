"""A program that is started runs from that moment on, however late its starter goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.sweepfile.command_options import CommandOptions
from tests.node.launching import order
from workloads.command import program
from workloads.command.metrics import Metrics
from workloads.rank import Rank

HELD_UP_SECONDS = 0.3


def test_a_starter_that_is_held_up_counts_the_time_that_its_program_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_wait(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        time.sleep(HELD_UP_SECONDS)
        return process

    argv = [sys.executable, "-c", "pass"]
    request = order("workloads.command", trial_id=1, world_size=1, options={"argv": argv}).request
    rank = Rank(
        request=request, rank=0, local_rank=0, world_size=1, local_world_size=1, run_dir=tmp_path
    )
    for name in ("GROUP_RANK", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(program.subprocess, "Popen", start_and_wait)
    started = program.start(CommandOptions(argv=argv), rank)
    started.process.wait()
    metrics = Metrics(tmp_path / "metrics.jsonl", rank, began=started.began)
    assert metrics.seen(ended_itself=True).seconds >= HELD_UP_SECONDS

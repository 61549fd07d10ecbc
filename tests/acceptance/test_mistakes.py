"""Mistakes and mishaps that need Ray: one clear line, the right exit code, and no traceback.

Others: tests/cli/test_mistakes.py.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.node.processes import descendants
from tests.acceptance.command import Command, CommandHere, measured, write_sweep

pytestmark = pytest.mark.acceptance


def said(command: Command, *arguments: str | Path, code: int, **options: object) -> str:
    done = command.run(*arguments, **options)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_cluster_that_is_not_there(command: Command, tmp_path: Path) -> None:
    text = said(
        command, "run", write_sweep(tmp_path), "--ray-address", "127.0.0.1:9", code=75, timeout=100
    )
    assert "127.0.0.1:9" in text


@pytest.mark.long
def test_a_sweep_that_was_refused_at_its_start_may_be_mended_under_its_name(
    command: Command, here: CommandHere, tmp_path: Path
) -> None:
    said(here, "run", write_sweep(tmp_path), "device=h100-sxm", "search.max_trials=1", code=2)
    # As on a cluster, which is looked at once the sweep is held.
    with Store.open(command.store_url) as store:
        store.ensure_sweep("t", "{}", {"device": "h100-sxm"})
    command.ok("run", write_sweep(tmp_path), "search.max_trials=1")
    assert command.sql("select count(*) from v_trial where state = 'measured'") == [[1]]


def test_a_disk_that_fills_up_loses_nothing_acknowledged(command: Command, tmp_path: Path) -> None:
    slow = {"name": "synthetic", "options": {"sleep": True, "time_scale": 15.0}}
    axes = {"micro_batch_size": [1, 8], "recompute": ["none", "full"], "zero_stage": [0, 1]}
    file = write_sweep(tmp_path, workload=slow, axes=axes)
    with Store.open(command.store_url) as store:
        running = command.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 2)
        # A limit of the orchestrator alone: what it writes next is refused, as on a full disk.
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        code, _, err = running.end()
        assert code == 75, err
        assert "Traceback" not in err
        assert err.strip().splitlines()[-1].startswith("error:")
        assert len(measured(store, "t")) >= 2
    command.ok("run", file)
    assert command.sql("select count(*) from v_trial where state = 'measured'") == [[8]]


@pytest.mark.long
def test_ray_that_is_ended_from_outside_is_said_and_nothing_hangs(
    command: Command, tmp_path: Path
) -> None:
    slow = {"name": "synthetic", "options": {"sleep": True, "time_scale": 100.0}}
    file = write_sweep(tmp_path, workload=slow)
    with Store.open(command.store_url) as store:
        running = command.start("run", file)
        running.until(lambda: len(measured(store, "t")) >= 1)
        raylet = next(
            pid
            for pid in descendants(running.process.pid)
            if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"
        )
        running.look()
        os.kill(raylet, signal.SIGKILL)
        code, _, err = running.end()
        assert code == 75, err
        assert "the same command continues" in err
        assert running.survivors(seconds=10) == []
        assert store.sweep_named("t").holder is None

"""The batch script of deploy/slurm, with real bash, `ray symmetric-run` and sweep.

Two scripts play Slurm's own programs.

Allocations, signals at the time limit and Slurm's killing of what is left are not tested.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.acceptance.command import write_sweep
from tests.multi_host.hosts import PROJECT, Host, Network
from tests.multi_host.ray_hosts import BIN, SWEEP, runs_one

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(900)]

SBATCH = PROJECT / "deploy/slurm/sweep.sbatch"
JOB_SECONDS = 300.0
# What follows srun's own options runs once per node; here there is one.
_SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
_SCONTROL = """#!/usr/bin/env bash
case $1 in show) echo "$3" ;; requeue) echo "$2" >>"$HOME/requeued" ;; esac
"""


@dataclass
class Told:
    """What was seen of a job that was told that its time runs out."""

    code: int
    said: str
    requeued: str
    after: Any


@pytest.fixture(scope="module")
def told(namespaces: None) -> Iterator[Told]:
    with Network(["node-1"]) as network:
        (host,) = network.hosts
        _play_slurm(host)
        write_sweep(
            host.folder,
            "mine",
            axes={"micro_batch_size": [1], "recompute": ["none", "full"], "zero_stage": [0, 1]},
            # Eight steps of 8 ms or more, times 100.
            workload={"name": "synthetic", "options": {"sleep": True, "time_scale": 100}},
        )
        first = host.start("bash", SBATCH, "mine.yaml")
        _until_one_runs(host)
        host.signal(first, signal.SIGUSR1)
        said, errors = first.communicate(timeout=JOB_SECONDS)
        after = json.loads(host.ok(SWEEP, "status", "--json"))["sweeps"][0]
        yield Told(
            code=first.returncode,
            said=said + errors,
            requeued=(host.folder / "requeued").read_text(),
            after=after,
        )


def test_when_the_time_runs_out_what_runs_may_finish_and_the_job_is_queued_again(
    told: Told,
) -> None:
    assert told.code == 130, told.said
    assert told.after["state"] == "stopped"
    trials = told.after["num_trials"]
    assert 1 <= trials["measured"] < 4  # of the four layouts
    assert (trials["running"], trials["launching"]) == (0, 0)
    assert told.requeued == "4711\n"


def _play_slurm(host: Host) -> None:
    programs = host.folder / "bin"
    programs.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    host.environment |= {
        "PATH": f"{host.base / 'bin'}:{BIN}:{host.environment['PATH']}",
        "USER": "me",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": host.address,
        "SLURM_JOB_NUM_NODES": "1",
        "SWEEP_DB": f"sqlite:///{host.base}/sweep.sqlite",
        "RAY_TMPDIR": str(host.base),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _until_one_runs(host: Host) -> None:
    deadline = time.monotonic() + JOB_SECONDS
    while not runs_one(host.folder / "sweep.sqlite"):
        assert time.monotonic() < deadline, f"no trial runs after {JOB_SECONDS} s"
        time.sleep(0.1)

"""What the batch script of deploy/slurm does with its signals.

Bash is real; scripts play all programs that it calls.

The sweep itself under this script is in test_slurm.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multi_host.hosts import PROJECT

pytestmark = pytest.mark.timeout(600)

SBATCH = PROJECT / "deploy/slurm/sweep.sbatch"
MOST_SECONDS = 60.0
# Runs until it is asked for $ENDS_ON, and refuses a stop $REFUSED times.
_SWEEP = """#!/usr/bin/env bash
case $1 in
    validate) echo '{"name": "mine"}' ;;
    run) touch running; until [[ -e $ENDS_ON ]]; do sleep 0.05; done; exit 130 ;;
    cancel)
        echo "$*" >>asked
        [[ $(wc -l <asked) -gt $REFUSED ]] || { echo "$ANSWER"; exit "$REFUSAL"; }
        [[ $* == *--drain* ]] && touch drain || touch now
        echo '{"accepted": true}' ;;
esac
"""
_PLAYED = {
    "sweep": _SWEEP,
    "srun": '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "ray": '#!/usr/bin/env bash\nwhile [[ $1 != -- ]]; do shift; done\nshift\nexec "$@"\n',
    "scontrol": """#!/usr/bin/env bash
case $1 in show) echo node-1 ;; requeue) echo "$2" >>requeued ;; esac
""",
}
_REFUSALS = {
    "fails": {"ANSWER": "", "REFUSAL": "75"},
    "is not accepted": {"ANSWER": '{"accepted": false}', "REFUSAL": "0"},
}


@dataclass
class Told:
    code: int
    asked: list[str]
    requeued: bool


def run(folder: Path, number: signal.Signals, **environment: str) -> Told:
    """The script from its start to its end, with a signal when the sweep runs."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in _PLAYED.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    known = {
        "SWEEP_DB": "postgresql://me@db.example/sweeps",
        "USER": "me",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "1",
    }
    known |= {
        "SLURM_JOB_NODELIST": "node-1",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "REFUSED": "0",
        "ANSWER": "",
        "REFUSAL": "0",
    }
    job = subprocess.Popen(["bash", SBATCH, "mine.yaml"], cwd=folder, env=known | environment)
    try:
        until = time.monotonic() + MOST_SECONDS
        while not (folder / "running").exists() and time.monotonic() < until:
            time.sleep(0.02)
        job.send_signal(number)
        code = job.wait(MOST_SECONDS)
    finally:
        (folder / environment["ENDS_ON"]).touch()  # whatever happened, the step ends
        job.kill()
        job.wait()
    return Told(
        code=code,
        asked=(folder / "asked").read_text().splitlines(),
        requeued=(folder / "requeued").exists(),
    )


@pytest.mark.parametrize("refusal", _REFUSALS)
def test_a_drain_that_is_refused_is_asked_for_again_and_kills_no_job(
    tmp_path: Path, refusal: str
) -> None:
    told = run(tmp_path, signal.SIGUSR1, ENDS_ON="drain", REFUSED="2", **_REFUSALS[refusal])
    assert told == Told(code=130, asked=["cancel mine --drain --json"] * 3, requeued=True)


def test_a_trial_that_outlasts_the_drain_is_ended_in_time_and_the_job_is_queued_again(
    tmp_path: Path,
) -> None:
    told = run(tmp_path, signal.SIGUSR1, ENDS_ON="now", SWEEP_DRAIN_SECONDS="1")
    assert told == Told(
        code=130, asked=["cancel mine --drain --json", "cancel mine --json"], requeued=True
    )


def test_a_job_that_somebody_ends_is_not_queued_again(tmp_path: Path) -> None:
    assert run(tmp_path, signal.SIGTERM, ENDS_ON="now") == Told(
        code=130, asked=["cancel mine --json"], requeued=False
    )

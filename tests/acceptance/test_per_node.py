"""A program that starts the ranks of its node itself, and never ends, from the file to SQL.

Somebody edits a file of it while it starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.acceptance.command import Command, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

LAUNCHER = """
import os, pathlib, subprocess, sys
edited = pathlib.Path(sys.argv[2]).with_name("model.py")
if "8" in edited.read_text():
    edited.write_text("num_layers = 9")
num_ranks = int(sys.argv[1])
ranks = [
    subprocess.Popen(
        [sys.executable, sys.argv[2]],
        env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank)),
    )
    for rank in range(num_ranks)
]
for rank in ranks:
    rank.wait()
"""
PROGRAM = """
import json, os, time
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
# By the clock, so that a late step is followed by a short one, whatever else the machine does.
step, began = 0, time.perf_counter()
while True:
    step += 1
    time.sleep(max(began + 0.1 * step - time.perf_counter(), 0.0))
    if os.environ["RANK"] == "0":
        with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
            print(json.dumps({"step_seconds": 0.1 + 0.0001 * (step % 3)}), file=file)
"""


@pytest.mark.long
def test_an_endless_program_with_a_launcher_of_its_own_is_measured_and_may_be_edited(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "launch.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "model.py").write_text("num_layers = 8")
    launch = [sys.executable, str(tmp_path / "launch.py"), "{gpus_per_node}"]
    file = write_sweep(
        tmp_path,
        gpus=2,
        axes={"micro_batch_size": [1, 2], "recompute": ["none"]},
        measurement={"max_steps": 50},
        search={"confirm": {"repeats": 0}},
        workload={
            "name": "command",
            "options": {"processes": "per_node", "argv": [*launch, str(tmp_path / "train.py")]},
        },
    )
    command.ok("run", file, "-q")
    rows = command.sql("select num_steps, confident, is_current_fingerprint from v_trial")
    assert len(rows) == 2
    assert all(8 <= num_steps < 50 and confident for num_steps, confident, _ in rows)
    assert all(is_current for _, _, is_current in rows)
    # It is not known which code the first attempt ran.
    failed = command.sql("select attempt, failure_kind, failure_message from v_failure")
    assert [row[:2] for row in failed] == [[1, "edited"]]
    assert "edited after its start, and before the check" in failed[0][2]
    log = command.here.ok("logs", "1").stdout
    assert "rank 0 of 2" in log and "rank 1 of 2" in log
    told = command.here.run("logs", "1", "--rank", "1")
    assert told.returncode == 2 and "On this machine are logs of rank 0" in told.stderr

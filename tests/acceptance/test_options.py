"""Options of a workload as axes, from the sweep file to the rank and back to SQL."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.acceptance.command import Command, CommandHere, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

PROGRAM = """
import json, os, sys
kernel, fused, threads = sys.argv[1:]
seconds = {"flash": 0.01, "eager": 0.02}[kernel] / int(threads) * (0.5 if fused == "true" else 1.0)
assert os.environ["SWEEP_KERNEL"] == kernel
steps = [seconds * (1 + i / 1000) for i in range(6)]
json.dump({"step_seconds": steps}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""


@pytest.mark.long
def test_a_program_of_ones_own_is_told_each_combination(
    command: Command, here: CommandHere, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    file = write_sweep(
        tmp_path,
        gpus=1,
        axes={
            "micro_batch_size": [64],
            "recompute": ["none"],
            "options": {"kernel": ["flash", "eager"], "fused": [True, False], "threads": [1, 2]},
        },
        constraints=["kernel == 'flash' or not fused"],
        workload={
            "name": "command",
            "options": {
                "argv": [
                    sys.executable,
                    str(tmp_path / "mine.py"),
                    "{kernel}",
                    "{fused}",
                    "{threads}",
                ]
            },
        },
    )
    assert (
        "rejected          2  constraint: kernel == 'flash' or not fused"
        in here.ok("plan", file).stdout
    )
    command.ok("run", file, "search.confirm.repeats=0", "search.strategy=exhaustive", "-q")
    (best,) = here.json("best", "t", "--top", "1")["best"]
    assert best["options"] == {"fused": True, "kernel": "flash", "threads": 2}
    assert best["layout"].endswith("_bf16-fused=true-kernel=flash-threads=2")
    assert best["step_seconds_median"] == pytest.approx(0.0025, rel=0.01)
    assert command.sql("select count(*) from v_trial where options ->> 'kernel' = 'eager'") == [[2]]
    assert command.sql("select count(*) from v_trial where state = 'measured'") == [[6]]
    assert "kernel=flash" in here.ok("show", str(best["trial_id"])).stdout
    told = here.ok("invalidate", "--where", "options ->> 'kernel' = 'eager'", "--yes")
    assert "2" in told.stdout + told.stderr

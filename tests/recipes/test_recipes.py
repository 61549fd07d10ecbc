"""The recipes train for real: two ranks on CPU cores, in the environment of their framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.environments import RECIPES, programs_of

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(900)]

SWEEP = Path(sys.executable).parent / "sweep"
# The recipe, and what its sweep is cut down to.
CASES = [
    ("transformers", ["axes.micro_batch_size=[4]"]),
    ("accelerate", ["axes.micro_batch_size=[4]"]),
    ("fsdp2", ["axes.micro_batch_size=[4]", "axes.recompute=[none]"]),
    ("deepspeed", ["axes.micro_batch_size=[4]", "axes.recompute=[none]", "axes.zero_stage=[0, 1]"]),
    ("litgpt", ["axes.micro_batch_size=[2, 4]"]),
]


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=[name for name, _ in CASES])
def test_a_recipe_measures_every_layout(name: str, overrides: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{programs_of(name)}:{os.environ['PATH']}",
        "SWEEP_DB": f"sqlite:///{tmp_path}/sweep.sqlite",
        "SWEEP_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def sweep(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SWEEP, *map(str, arguments)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    ran = sweep(
        "run",
        RECIPES / f"{name}.yaml",
        f"workload.options.cwd={RECIPES}",
        *overrides,
        "device=cpu",
        "measurement.min_steps=6",
        "measurement.max_steps=10",
        "--quiet",
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    trials: list[dict[str, Any]] = json.loads(sweep("trials", "--json").stdout)["trials"]
    assert len(trials) == 2
    for trial in trials:
        shown = sweep("show", str(trial["trial_id"])).stdout
        assert trial["state"] == "measured", shown
        assert trial["tokens_per_second_per_gpu"] > 0
    exported = sweep("export", "config", "--to", "torchrun")
    assert exported.returncode == 0, exported.stderr

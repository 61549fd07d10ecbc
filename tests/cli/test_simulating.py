"""`sweep run --simulate`: what is confirmed, and where nothing fits, is said at the end."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.core.problem.cell import Cell
from orchestrator.core.search import space
from orchestrator.core.sweepfile.spec import SweepSpec
from tests.acceptance.command import CommandHere, write_sweep


def test_what_stands_at_the_top_is_confirmed_and_said_to_be(
    command: CommandHere, tmp_path: Path
) -> None:
    axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    confirm = {"confirm": {"contenders": 2, "repeats": 2}}
    ended = command.ok("run", write_sweep(tmp_path, axes=axes, search=confirm), "--simulate")
    assert "Winner: trial" in ended.stdout or "are tied" in ended.stdout
    counts = [count for (count,) in command.sql("select num_measurements from v_trial order by 1")]
    assert counts[-1] in (2, 3)
    assert counts[0] == 1
    best = command.json("best", "t-simulated")["best"]
    assert best[0]["num_measurements"] == counts[-1]
    assert best[0]["is_tied"]
    repeats = command.sql("select count(*) from v_event where event = 'repeated'")[0][0]
    assert repeats == sum(counts) - 4


def test_a_changed_global_batch_is_said_to_be_a_new_cell(
    command: CommandHere, tmp_path: Path
) -> None:
    axes = {"micro_batch_size": [1], "recompute": "none"}
    file = write_sweep(tmp_path, axes=axes, search={"confirm": {"repeats": 0}})
    assert "new cell" not in command.ok("run", file, "--simulate").stderr
    (old,) = (key for (key,) in command.sql("select cell from v_cell"))
    told = command.ok("run", file, "--simulate", "global_batch_size=32").stderr
    new = re.sub("gb[0-9]+$", "gb32", old)
    said = f"{new} is a new cell of sweep t-simulated. It has another global batch than {old}, so"
    assert said in " ".join(told.split())


def test_when_nothing_fits_the_exit_code_says_so(command: CommandHere, tmp_path: Path) -> None:
    options = {"device_memory_bytes": 1_000_000}
    file = write_sweep(
        tmp_path,
        workload={"name": "synthetic", "options": options},
        axes={"micro_batch_size": [1], "recompute": "full"},
    )
    done = command.run("run", file, "--simulate")
    assert done.returncode == 4
    assert "Nothing fits in llama-tiny_2gpu" in done.stderr
    assert "predicted to need least, ran out of memory" in done.stderr


def test_where_every_layout_failed_the_failure_is_named_and_where_to_read_on(
    command: CommandHere, tmp_path: Path
) -> None:
    fault = {"fault": "config_rejected", "at": "init"}
    file = write_sweep(
        tmp_path,
        workload={"name": "synthetic", "options": {"faults": [fault]}},
        axes={"micro_batch_size": [1, 2], "recompute": "full"},
    )
    done = command.run("run", file, "--simulate")
    assert done.returncode == 4, done.stderr
    told = " ".join(done.stderr.split())
    assert "2 trials failed, the last with config_rejected: rank 0" in told
    assert re.search(r"See `sweep show [12]`\.", told) and "`sweep plan`" not in told


@pytest.mark.parametrize(
    ("gpus", "constraints"),
    [
        # Two and four nodes.
        ([16, 32], []),
        # Half a node, of whose size a constraint makes use.
        ([4], ["gpus_per_node >= 8"]),
    ],
)
def test_each_cell_is_enumerated_once_where_the_file_leaves_the_size_of_nodes_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[int], constraints: list[str]
) -> None:
    enumerated, enumerate_cell = Counter[Cell](), space.enumerate_cell

    def counting(spec: SweepSpec, cell: Cell, **how: Any) -> space.CellSpace:
        enumerated[cell] += 1
        return enumerate_cell(spec, cell, **how)

    monkeypatch.setattr(space, "enumerate_cell", counting)
    monkeypatch.setenv("SWEEP_DB", f"sqlite:///{tmp_path}/sweep.sqlite")
    file = write_sweep(
        tmp_path,
        device="h100-sxm",
        gpus=gpus,
        gpus_per_node="auto",
        constraints=constraints,
        search={"max_trials": 1, "confirm": {"repeats": 0}},
    )
    assert cli.main(["run", str(file), "--simulate", "--quiet"]) == 0
    assert {cell.num_gpus: num for cell, num in enumerated.items()} == dict.fromkeys(gpus, 1)

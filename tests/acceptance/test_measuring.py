"""Real training, end to end: Ray schedules, Optuna proposes, SQL stores, each command shows it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.acceptance.command import Command, write_sweep

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]


def test_layouts_of_a_real_llama_are_measured_and_told(command: Command, tmp_path: Path) -> None:
    file = write_sweep(
        tmp_path,
        gpus=[1, 2],
        global_batch_size=8,
        precision="fp32",
        axes={"micro_batch_size": [4], "recompute": ["none", "full"]},
        measurement={"warmup_steps": 2, "min_steps": 6, "max_steps": 8, "precision": 0.1},
        workload="llama",
    )
    ended = command.ok("run", file)
    assert "tokens/s/GPU" in ended.stdout

    best = command.json("best", "t")["best"]
    assert {row["num_gpus"] for row in best} == {1, 2}
    rows = command.sql(
        "select num_gpus, data_parallel_size, tokens_per_second_per_gpu, mfu, hfu,"
        " peak_memory_allocated_bytes, recompute from v_trial"
    )
    assert len(rows) == 4
    for gpus, dp, tokens, mfu, hfu, memory, _ in rows:
        assert dp == gpus
        assert tokens > 0
        assert 0 < mfu <= hfu <= 1
        assert memory > 16 * 1_200_000  # fp32 weights, gradients, two moments
    sources = command.json(
        "sql", "select distinct peak_flops, substr(peak_flops_source, 1, 17) from v_trial"
    )["rows"]
    assert [source for _, source in sources] == ["measured: matmul "], (
        "MFUs of one table rest on one peak"
    )
    by_layout = {(gpus, recompute): memory for gpus, _, _, _, _, memory, recompute in rows}
    assert all(by_layout[gpus, "full"] < by_layout[gpus, "none"] for gpus in (1, 2))

    trial = str(command.sql("select min(trial_id) from v_trial")[0][0])
    shown = command.ok("show", trial).stdout
    assert "torch" in shown
    assert "2 cells" in command.ok("status", "t").stdout
    assert command.run("logs", trial).returncode == 0
    exported = list(csv.DictReader(io.StringIO(command.ok("export", "csv").stdout)))
    assert len(exported) == 4


def test_an_out_of_memory_is_a_result_and_condemns_without_a_launch(
    command: Command, tmp_path: Path
) -> None:
    file = write_sweep(
        tmp_path,
        model="llama-3.1-8b",
        sequence_length=4096,
        global_batch_size=16,
        axes={"micro_batch_size": "auto", "recompute": ["none", "full"], "zero_stage": [0, 3]},
        search={"strategy": "random", "seed": 1},
    )
    command.ok("run", file)
    states = dict(command.sql("select state, count(*) from v_trial group by state"))
    assert states["out_of_memory"] >= 1
    assert states.get("pruned", 0) >= 1
    assert sum(states.values()) == 16
    launched = command.sql("select count(*) from v_event where event = 'gang_placed'")[0][0]
    assert launched == 16 - states["pruned"]
    assert command.sql(
        "select count(*) from v_trial where state = 'pruned' and condemned_by is null"
    ) == [[0]]


def test_what_stands_at_the_top_is_confirmed_and_said_to_be(
    command: Command, tmp_path: Path
) -> None:
    axes = {"micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    confirm = {"confirm": {"contenders": 2, "repeats": 2}}
    ended = command.ok("run", write_sweep(tmp_path, axes=axes, search=confirm))
    assert "Winner: trial" in ended.stdout or "are tied" in ended.stdout
    counts = [count for (count,) in command.sql("select num_measurements from v_trial order by 1")]
    assert counts[-1] in (2, 3)
    assert counts[0] == 1
    best = command.json("best", "t")["best"]
    assert best[0]["num_measurements"] == counts[-1]
    assert best[0]["is_tied"]
    repeats = command.sql("select count(*) from v_event where event = 'repeated'")[0][0]
    assert repeats == sum(counts) - 4


def test_when_nothing_fits_the_exit_code_says_so(command: Command, tmp_path: Path) -> None:
    options = {"device_memory_bytes": 1_000_000}
    file = write_sweep(
        tmp_path,
        workload={"name": "synthetic", "options": options},
        axes={"micro_batch_size": [1], "recompute": "full"},
    )
    done = command.run("run", file)
    assert done.returncode == 4
    assert "Nothing fits in llama-tiny_2gpu" in done.stderr
    assert "predicted to need least, ran out of memory" in done.stderr

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from db.store import Store
from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.problem.layout import Layout
from tests.cli.conftest import Sweep
from tests.db import builders
from tests.db.builders import (
    Bench,
    add_trial,
    begin_trial,
    cell,
    fingerprint,
    measurement,
    record_measurement,
)


def layout(micro_batch_size: int, **changes: Any) -> Layout:
    """A layout of the builders' cell: 64 sequences on two GPUs."""
    return builders.layout(micro_batch_size, grad_accum_steps=32 // micro_batch_size, **changes)


def measure(bench: Bench, shape: Layout, step_seconds: float = 0.5, cell_id: int = 0) -> int:
    """A measured trial's id; it ran on two nodes."""
    trial_id, attempt = begin_trial(
        bench.store,
        cell_id or bench.cell_id,
        shape,
        epoch=bench.epoch,
        nodes=["node-a", "node-b"],
    )
    record_measurement(
        bench.store,
        trial_id,
        attempt,
        epoch=bench.epoch,
        measurement=measurement(
            500 / step_seconds,
            step_time=replace(measurement().step_time, median=step_seconds),
            step_seconds=(step_seconds,) * 3,
        ),
        fingerprint=fingerprint(),
        gpu_seconds=4.0,
    )
    return trial_id


def test_the_winner_is_written_as_a_frameworks_file(
    store: Store, sweep: Sweep, tmp_path: Path
) -> None:
    bench = Bench.on(store)
    measure(bench, layout(1), step_seconds=0.9)
    fastest = measure(bench, layout(2), step_seconds=0.5)
    out, err = sweep("export", "config", "--to", "deepspeed")
    assert json.loads(out)["train_micro_batch_size_per_gpu"] == 2
    assert f"trial {fastest} (dp2 mbs2 ga16 none bf16) for deepspeed" in err
    assert "sequence_length is up to your program: have your dataset return sequences" in err
    target = tmp_path / "accelerate.yaml"
    out, err = sweep("export", "config", "tiny", "--to", "accelerate", "-o", str(target))
    assert out == ""
    assert f"written to {target}" in err
    assert f"use: accelerate launch --config_file {target} train.py" in err
    # The attempt ran on node-a and node-b.
    assert yaml.safe_load(target.read_text())["num_machines"] == 2


def test_a_trial_by_its_number_with_all_that_is_known_as_json(store: Store, sweep: Sweep) -> None:
    trial_id = measure(Bench.on(store), layout(4))
    out, _ = sweep("export", "config", "--to", "megatron", "--trial", str(trial_id), "--json")
    found = json.loads(out)
    assert found["trial_id"] == trial_id
    assert found["settings"]["micro-batch-size"] == 4
    assert found["arguments"][:2] == ["--tensor-model-parallel-size", "1"]
    assert (found["num_nodes"], found["gpus_per_node"]) == (2, 1)
    assert found["impossible"] == {}


def test_what_a_framework_cannot_express_is_refused_and_partly_written_when_asked(
    store: Store, sweep: Sweep
) -> None:
    bench = Bench.on(store)
    trial_id = add_trial(store, bench.cell_id, layout(2, zero_stage=3), epoch=bench.epoch).id
    arguments = ("export", "config", "--to", "nanotron", "--trial", str(trial_id))
    out, err = sweep(*arguments, code=2)
    assert out == ""
    assert "nanotron cannot express dp2 mbs2 ga16 none z3 bf16" in err
    assert "zero_stage: nanotron has ZeRO 0 and 1, not 3. --partial writes the rest" in err
    out, err = sweep(*arguments, "--partial")
    assert "optimizer" not in yaml.safe_load(out)
    assert "zero_stage cannot be written" in out
    assert "zero_stage cannot be written" in err


def test_a_sweep_of_two_cells_has_two_winners_to_choose_from(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    first = measure(bench, layout(1))
    other = store.ensure_cell(bench.sweep_id, cell(global_batch_size=32), bench.epoch)
    second = measure(bench, replace(layout(2), grad_accum_steps=8), cell_id=other)
    _, err = sweep("export", "config", "--to", "torchrun", code=2)
    assert "has 2 cells; choose the fastest layout of one: --trial" in err
    assert f"--trial {first} " in err
    assert f"--trial {second} " in err


def test_mistakes_are_named_with_their_fix(store: Store, sweep: Sweep) -> None:
    bench = Bench.on(store)
    waiting = add_trial(store, bench.cell_id, layout(1), epoch=bench.epoch)
    assert "name the framework: --to transformers|" in sweep("export", "config", code=2)[1]
    assert "has no winner" in sweep("export", "config", "--to", "torchrun", code=2)[1]
    Bench.on(store, "other")
    _, err = sweep(
        "export", "config", "other", "--to", "torchrun", "--trial", str(waiting.id), code=2
    )
    assert f"trial {waiting.id} belongs to sweep tiny, not to other" in err
    _, err = sweep("export", "csv", "--to", "torchrun", code=2)
    assert "--to is for `sweep export config`, not for csv" in err
    _, err = sweep("export", "config", "--all", "--to", "torchrun", code=2)
    assert "--all has no winner" in err
    _, err = sweep("export", "config", "--to", "torchtitn", code=2)
    assert "did you mean torchtitan?" in err


def test_every_framework_takes_a_layout_that_all_of_them_have(store: Store, sweep: Sweep) -> None:
    trial_id = measure(Bench.on(store), layout(1))
    for framework in Framework:
        partial = () if framework is not Framework.LITGPT else ("--partial",)
        out, _ = sweep("export", "config", "--to", framework, "--trial", str(trial_id), *partial)
        assert out.strip()


def test_a_commands_winner_is_its_own_program_and_not_a_second_torchrun(
    store: Store, sweep: Sweep
) -> None:
    argv = ["torchrun", "--nproc-per-node={gpus_per_node}", "train.py", "--mbs={micro_batch_size}"]
    workload = {"name": "command", "options": {"argv": argv, "processes": "per_node"}}
    spec = {"name": "own", "model": "llama-tiny", "gpus": 2, "sequence_length": 64}
    spec |= {"global_batch_size": 64, "workload": workload}
    sweep_id = store.ensure_sweep("own", json.dumps(spec), builders.CONDITIONS)
    epoch = store.acquire(sweep_id, host="here", pid=1)
    bench = Bench(store, sweep_id, store.ensure_cell(sweep_id, cell(), epoch), epoch)
    trial_id = measure(bench, layout(2))
    arguments = ("export", "config", "--to", "torchrun", "--trial", str(trial_id))
    out, err = sweep(*arguments)
    assert out.splitlines()[-1] == 'torchrun --nproc-per-node=1 train.py --mbs=2 "$@"'
    assert "use: sh FILE [more arguments]" in err
    found = json.loads(sweep(*arguments, "--json")[0])
    assert found["text"] == out
    assert found["arguments"] is None

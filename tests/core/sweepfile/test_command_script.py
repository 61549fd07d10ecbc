"""The script of a command's winner: what it starts, how often, and with which arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.command_script import CommandScript, command_script

LAYOUT = Layout(
    data_parallel_size=2,
    micro_batch_size=4,
    grad_accum_steps=2,
    precision=Precision.FP32,
    options=(("fused", True),),
)
CELL = Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=64, global_batch_size=16)


def script(gpus_per_node: int = 2, **options: Any) -> CommandScript:
    job = Job(cell=CELL, layout=LAYOUT, gpus_per_node=gpus_per_node)
    return command_script(CommandOptions.model_validate(options), job)


def started(found: CommandScript) -> str:
    """The line that starts the program, without its variables."""
    return found.text.splitlines()[-1]


def test_a_program_of_ranks_is_started_by_torchrun_with_its_own_arguments() -> None:
    found = script(argv=["python", "train it.py", "--mbs", "{micro_batch_size}", "--braces={{}}"])
    assert started(found) == (
        "torchrun --nnodes=1 --nproc-per-node=2 --no-python python 'train it.py' --mbs 4"
        " '--braces={}' \"$@\""
    )
    assert "SWEEP_GRAD_ACCUM_STEPS=2 \\\n" in found.text
    assert "SWEEP_FUSED=true \\\n" in found.text


def test_a_program_that_calls_torchrun_itself_is_not_put_under_another() -> None:
    argv = ["torchrun", "--nproc-per-node={gpus_per_node}", "--master-port={master_port}"]
    argv += ["--node-rank={node_rank}", "train.py", "--accum", "{grad_accum_steps}"]
    found = script(argv=argv, processes="per_node")
    assert started(found) == (
        'torchrun --nproc-per-node=2 --master-port=29500 --node-rank=0 train.py --accum 2 "$@"'
    )
    assert started(script(argv=["bash", "train.sh"], processes="per_node")) == 'bash train.sh "$@"'


def test_on_several_nodes_the_place_of_each_is_a_variable() -> None:
    found = script(1, argv=["python", "train.py"])
    assert '--node-rank="${NODE_RANK:?number of this node in the gang, from 0}"' in found.text
    assert any("NODE_RANK, MASTER_ADDR, MASTER_PORT" in remark for remark in found.remarks)


def test_frameworks_arguments_are_filled_in() -> None:
    found = script(argv=["python", "pretrain.py", "{framework_arguments}"], framework="megatron")
    assert "--no-python python pretrain.py --tensor-model-parallel-size 1" in started(found)


def test_a_script_runs_as_the_program_was_meant_and_ends_without_what_it_lacks(
    tmp_path: Path,
) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['SWEEP_WORLD_SIZE'], os.environ['OWN'])"
    found = script(
        argv=[sys.executable, "-c", show, "{micro_batch_size}", "a b'c", "in {run_dir}/x"],
        processes="per_node",
        env={"OWN": "{num_nodes} $HOME"},
        cwd=str(tmp_path),
    )
    command = ["sh", "-c", found.text, "sh", "more"]
    missing = subprocess.run(command, env={}, capture_output=True, text=True)
    assert missing.returncode != 0
    assert "RUN_DIR: a folder for this attempt" in missing.stderr
    done = subprocess.run(command, env={"RUN_DIR": "/r d"}, capture_output=True, text=True)
    assert done.stdout == "['4', \"a b'c\", 'in /r d/x', 'more'] 2 1 $HOME\n", done.stderr


def test_what_a_script_cannot_say_is_said() -> None:
    found = script(
        argv=["train", "{num_steps}"],
        env_from=["HF_TOKEN"],
        pass_env=["MY_*"],
        files={"a.json": {"mbs": "{micro_batch_size}"}},
    )
    assert found.remarks[:3] == [
        "set before you run it: NUM_STEPS",
        "it takes from the environment: HF_TOKEN, MY_*",
        "it does not write the config files: a.json",
    ]

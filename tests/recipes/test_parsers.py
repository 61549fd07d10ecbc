"""What `sweep export config` writes, read by the parser of the real package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.text import text_of
from orchestrator.core.frameworks.translation import TABLES, arguments, translate
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from tests.recipes.environments import answer

pytestmark = pytest.mark.recipes


def job(*, recompute: str = "none", **axes: Any) -> Job:
    """A layout of two GPUs, 16 sequences of 128 tokens."""
    cell = Cell(model=PRESETS["llama-tiny"], num_gpus=2, sequence_length=128, global_batch_size=16)
    others = axes.get("tensor_parallel_size", 1) * axes.get("context_parallel_size", 1)
    replicas = 2 // (others * axes.get("pipeline_parallel_size", 1))
    layout = Layout(
        data_parallel_size=replicas,
        grad_accum_steps=8 // replicas * 2 // axes.setdefault("micro_batch_size", 2),
        recompute=Recompute.parse(recompute),
        **axes,
    )
    return Job(cell=cell, layout=layout, gpus_per_node=2)


def file_of(shape: Job, framework: Framework, folder: Path) -> str:
    found = translate(shape, framework)
    assert found.impossible == {}
    path = folder / (TABLES[framework].file or "arguments")
    path.write_text(text_of(found))
    return str(path)


TRANSFORMERS = """
import json, sys
from transformers import HfArgumentParser, TrainingArguments
with open(sys.argv[1]) as file:
    written = json.load(file)
(read,) = HfArgumentParser(TrainingArguments).parse_dict(written | {"use_cpu": True})
names = ["per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16",
         "gradient_checkpointing", "fsdp", "fsdp_plugin_args"]
print(json.dumps({name: getattr(read, name) for name in names}))
"""


@pytest.mark.parametrize("environment", ["transformers", "transformers-oldest"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_arguments_of_transformers(stage: int, environment: str, tmp_path: Path) -> None:
    shape = job(zero_stage=stage, recompute="full")
    read = answer(environment, TRANSFORMERS, file_of(shape, Framework.TRANSFORMERS, tmp_path))
    assert read["per_device_train_batch_size"] == 2
    assert read["gradient_accumulation_steps"] == 4
    assert (read["bf16"], read["fp16"]) == (True, False)
    if stage == 0:
        assert read["gradient_checkpointing"] is True
        assert not read["fsdp"]
    else:
        assert read["gradient_checkpointing"] is False
        assert read["fsdp_plugin_args"]["fsdp_version"] == 2
        assert read["fsdp_plugin_args"]["activation_checkpointing"] is True
        assert read["fsdp_plugin_args"]["reshard_after_forward"] is (stage == 3)


ACCELERATE = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
arguments = launch_command_parser().parse_args(["--config_file", sys.argv[1], "train.py"])
arguments, defaults, _ = _validate_launch_command(arguments)
print(json.dumps(vars(arguments), default=str))
"""


def test_the_file_of_accelerate_arrives_in_the_arguments_of_its_launcher(tmp_path: Path) -> None:
    def read(shape: Job) -> Any:
        return answer("accelerate", ACCELERATE, file_of(shape, Framework.ACCELERATE, tmp_path))

    plain = read(job(zero_stage=0, precision=Precision.FP32))
    assert plain["multi_gpu"] is True
    assert (plain["num_processes"], plain["num_machines"]) == (2, 1)
    assert plain["mixed_precision"] == "no"
    sharded = read(job(zero_stage=2, recompute="full"))
    assert sharded["use_fsdp"] is True
    assert str(sharded["fsdp_version"]) == "2"
    assert str(sharded["fsdp_reshard_after_forward"]).lower() == "false"
    assert str(sharded["fsdp_activation_checkpointing"]).lower() == "true"
    assert sharded["mixed_precision"] == "bf16"
    first = read(job(zero_stage=1))
    assert first["use_deepspeed"] is True
    assert (first["zero_stage"], first["gradient_accumulation_steps"]) == (1, 4)
    split = read(job(zero_stage=3, tensor_parallel_size=2))
    assert split["use_parallelism_config"] is True
    assert split["parallelism_config_tp_size"] == 2
    assert split["parallelism_config_dp_shard_size"] == 1


DEEPSPEED = """
import json, sys
from deepspeed.runtime import config
from deepspeed.runtime.config import DeepSpeedConfig
# Two ranks, without starting them: the parser multiplies the batch out.
config.dist.get_rank, config.dist.get_world_size = lambda: 0, lambda: 2
read = DeepSpeedConfig(sys.argv[1])
print(json.dumps({
    "micro": read.train_micro_batch_size_per_gpu, "accumulation": read.gradient_accumulation_steps,
    "batch": read.train_batch_size, "stage": read.zero_config.stage,
    "bf16": read.bfloat16_config.enabled, "fp16": read.float16_config.enabled,
    "tensor": read.tensor_parallel_config.autotp_size,
}))
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_config_of_deepspeed(stage: int, tmp_path: Path) -> None:
    path = file_of(job(zero_stage=stage), Framework.DEEPSPEED, tmp_path)
    assert answer("deepspeed", DEEPSPEED, path) == {
        "micro": 2,
        "accumulation": 4,
        "batch": 16,
        "stage": stage,
        "bf16": True,
        "fp16": False,
        "tensor": 0,
    }


# The config functions of its models need triton, so its dataclasses are parsed alone.
TORCHTITAN = """
import json, sys
import tyro
from dataclasses import dataclass, field
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC
@dataclass
class Config:
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointingConfig = field(
        default_factory=SelectiveAC.Config
    )
read = tyro.cli(Config, args=sys.argv[1:])
names = ["data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
         "pipeline_parallel_degree", "context_parallel_degree", "fsdp_reshard_after_forward",
         "pipeline_parallel_microbatch_size"]
print(json.dumps({
    **{name: getattr(read.parallelism, name) for name in names},
    "local": read.training.local_batch_size, "global": read.training.global_batch_size,
    "length": read.training.seq_len, "dtype": read.training.mixed_precision_param,
    "recompute": type(read.activation_checkpoint).__qualname__,
}))
"""


@pytest.mark.parametrize(
    ("recompute", "name"),
    [("none", "NoneType"), ("full", "FullAC.Config"), ("selective_ops", "SelectiveAC.Config")],
)
def test_the_arguments_of_torchtitan(recompute: str, name: str) -> None:
    shape = job(zero_stage=3, recompute=recompute)
    found = translate(shape, Framework.TORCHTITAN)
    words = arguments(found.settings, TABLES[Framework.TORCHTITAN].form)
    read = answer("torchtitan", TORCHTITAN, *words)
    assert read == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always",
        "pipeline_parallel_microbatch_size": 1,
        "local": 2,
        "global": 16,
        "length": 128,
        "dtype": "bfloat16",
        "recompute": name,
    }


LITGPT = """
import json, sys
from jsonargparse import ArgumentParser
from litgpt.pretrain import setup
parser = ArgumentParser()
parser.add_argument("--config", action="config")
parser.add_function_arguments(setup)
read = parser.parse_args(["--model_name", "tiny", "--config", sys.argv[1]])
print(json.dumps({
    "micro": read.train.micro_batch_size, "batch": read.train.global_batch_size,
    "length": read.train.max_seq_length, "precision": read.precision,
    "devices": read.devices, "nodes": read.num_nodes,
}))
"""


def test_the_config_of_litgpt(tmp_path: Path) -> None:
    path = file_of(job(zero_stage=3), Framework.LITGPT, tmp_path)
    assert answer("litgpt", LITGPT, path) == {
        "micro": 2,
        "batch": 16,
        "length": 128,
        "precision": "bf16-mixed",
        "devices": 2,
        "nodes": 1,
    }

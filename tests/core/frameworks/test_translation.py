from __future__ import annotations

import itertools
import json
import shlex
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import yaml

from orchestrator.core.frameworks.expression import JOB_NUMBERS
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.text import remarks, text_of
from orchestrator.core.frameworks.translation import (
    TABLES,
    Form,
    Framework,
    arguments,
    translate,
    variables,
)
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule

CELL = Cell(model=PRESETS["llama-3.1-8b"], num_gpus=16, sequence_length=4096, global_batch_size=64)


def job(*, recompute: str = "none", cell: Cell = CELL, gpus_per_node: int = 8, **axes: Any) -> Job:
    """A job whose data parallelism and accumulation follow from the rest."""
    model_parallel = (
        axes.get("tensor_parallel_size", 1)
        * axes.get("pipeline_parallel_size", 1)
        * axes.get("context_parallel_size", 1)
    )
    replicas = cell.num_gpus // model_parallel
    mbs = axes.get("micro_batch_size", 1)
    layout = Layout(
        data_parallel_size=replicas,
        grad_accum_steps=cell.global_batch_size // (replicas * mbs),
        recompute=Recompute.parse(recompute),
        **axes,
    )
    return Job(cell=cell, layout=layout, gpus_per_node=gpus_per_node)


def jobs() -> list[Job]:
    """Layouts of one cell that differ in every axis."""
    pipelines = [(1, "1f1b"), *((2, it) for it in ("1f1b", "gpipe", "interleaved:2"))]
    sizes = itertools.product((1, 2), pipelines, (1, 2), (1, 2), range(4), Precision)
    recomputes = ("none", "full", "full:8", "selective_ops", "selective_attention")
    return [
        job(
            recompute=recompute,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            pipeline_schedule=PipelineSchedule.parse(schedule),
            context_parallel_size=cp,
            micro_batch_size=mbs,
            zero_stage=zero,
            precision=precision,
            gpus_per_node=16,
        )
        for (tp, (pp, schedule), cp, mbs, zero, precision), recompute in itertools.product(
            sizes, recomputes
        )
    ]


def said(framework: Framework, name: str, **axes: Any) -> dict[str, Any]:
    """The settings of one number of a job."""
    expression = TABLES[framework].rules[name](job(**axes))
    assert expression.impossible is None
    return dict(expression.settings)


@pytest.mark.parametrize("framework", Framework)
def test_every_framework_has_a_rule_for_everything_that_a_job_says(framework: Framework) -> None:
    assert set(TABLES[framework].rules) == set(JOB_NUMBERS)


@pytest.mark.parametrize("framework", Framework)
def test_no_framework_drops_a_number_without_a_word(framework: Framework) -> None:
    layouts = defaultdict(set)
    for each in jobs():
        found = translate(each, framework)
        if not found.impossible:
            words = json.dumps([dict(found.settings), found.program], sort_keys=True)
            layouts[words].add(each.layout)
    assert layouts
    assert [sorted(it.short for it in alike) for alike in layouts.values() if len(alike) > 1] == []


@pytest.mark.parametrize("framework", Framework)
def test_options_of_the_users_own_are_named(framework: Framework) -> None:
    found = translate(job(options=(("attention", "flash"),)), framework)
    assert found.program["attention"] == "set your own option attention to flash"


@pytest.mark.parametrize("framework", Framework)
def test_the_text_reads_back_as_the_settings(framework: Framework) -> None:
    zero = 3 if framework is Framework.LITGPT else 0
    cell = Cell(model=CELL.model, num_gpus=8, sequence_length=4096, global_batch_size=64)
    found = translate(job(cell=cell, zero_stage=zero), framework)
    assert found.impossible == {}
    text, form = text_of(found), TABLES[framework].form
    if form is Form.JSON:
        assert json.loads(text) == found.nested()
    elif form is Form.YAML:
        assert yaml.safe_load(text) == found.nested()
        assert list(yaml.safe_load(text)) == list(found.nested()), "in the order of the settings"
    elif form is Form.TORCHRUN:
        words = shlex.split(text.replace("\\\n", ""))
        given = variables(found.settings, form)
        assert words == [
            *(f"{name}={value}" for name, value in given.items()),
            "torchrun",
            *arguments(found.settings, form),
            "$@",
        ]
    else:
        assert text.split() == arguments(found.settings, form)


def test_a_file_is_no_list_of_arguments() -> None:
    with pytest.raises(ValueError, match="a file, not arguments"):
        arguments({"precision": "fp32"}, Form.YAML)


def test_what_cannot_be_written_comes_first_in_the_remarks_and_in_the_file() -> None:
    found = translate(job(zero_stage=3, options=(("fused", True),)), Framework.NANOTRON)
    assert remarks(found) == [
        "zero_stage cannot be written: nanotron has ZeRO 0 and 1, not 3",
        "fused is up to your program: set your own option fused to True",
    ]
    assert text_of(found).startswith("# zero_stage cannot be written: nanotron has ZeRO 0 and 1")


@pytest.mark.parametrize(
    ("framework", "axes", "name"),
    [
        (Framework.NANOTRON, {"zero_stage": 3}, "zero_stage"),
        (Framework.NANOTRON, {"recompute": "full:8"}, "recompute"),
        (Framework.NANOTRON, {"precision": Precision.FP8}, "precision"),
        (Framework.TRANSFORMERS, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        (Framework.TRANSFORMERS, {"recompute": "selective"}, "recompute"),
        (Framework.ACCELERATE, {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        (Framework.DEEPSPEED, {"zero_stage": 3, "pipeline_parallel_size": 2}, "pipeline_p"),
        (Framework.DEEPSPEED, {"context_parallel_size": 2}, "context_parallel_size"),
        (Framework.TORCHTITAN, {"zero_stage": 1}, "zero_stage"),
        (Framework.TORCHTITAN, {"recompute": "selective_attention"}, "recompute"),
        (Framework.TORCHTITAN, {"precision": Precision.FP16}, "precision"),
        (Framework.MEGATRON, {"recompute": "selective_ops"}, "recompute"),
        (Framework.MEGATRON, {"recompute": "full:8", "pipeline_parallel_size": 2}, "recompute"),
        (Framework.LITGPT, {"recompute": "full"}, "recompute"),
        (Framework.LITGPT, {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        (Framework.LLM_FOUNDRY, {"zero_stage": 1}, "zero_stage"),
        (Framework.LLM_FOUNDRY, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_a_framework_lacks_is_said_by_name(
    framework: Framework, axes: dict[str, Any], name: str
) -> None:
    lacking = translate(job(**axes), framework).impossible
    assert [found for found in lacking if found.startswith(name)], lacking


def test_a_pipeline_of_deepspeed_goes_with_zero_1_and_not_with_zero_2() -> None:
    rule = TABLES[Framework.DEEPSPEED].rules["pipeline_parallel_size"]
    one, two = (rule(job(pipeline_parallel_size=2, zero_stage=stage)) for stage in (1, 2))
    assert one.impossible is None
    assert two.impossible == "DeepSpeed's pipelines go with ZeRO 0 and 1"


def test_full_recomputation_of_all_layers_is_not_a_part_of_them() -> None:
    everything = said(Framework.MEGATRON, "recompute", recompute="full:32")
    assert everything == said(Framework.MEGATRON, "recompute", recompute="full")
    assert everything == {
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
    assert said(Framework.MEGATRON, "recompute", recompute="full:8") == {
        "recompute-granularity": "full",
        "recompute-method": "block",
        "recompute-num-layers": 8,
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_has_the_name_that_every_transformers_before_6_knows(recompute: str) -> None:
    """transformers 5.22 refuses activation_checkpointing; 5.23 takes both names."""
    is_full = recompute == "full"
    plain, first, sharded = (
        said(Framework.TRANSFORMERS, "recompute", recompute=recompute, zero_stage=stage)
        for stage in (0, 1, 3)
    )
    assert plain == first == {"gradient_checkpointing": is_full}
    assert sharded == {
        "fsdp_config.activation_checkpointing": is_full,
        "gradient_checkpointing": False,
    }


def test_a_pipeline_of_torchtitan_accumulates_in_its_local_batch() -> None:
    axes = {"micro_batch_size": 2, "pipeline_parallel_size": 2}
    assert said(Framework.TORCHTITAN, "micro_batch_size", **axes) == {
        "training.local_batch_size": 8,  # 64 sequences over 8 replicas
        "parallelism.pipeline_parallel_microbatch_size": 2,
    }
    assert said(Framework.TORCHTITAN, "micro_batch_size", micro_batch_size=2) == {
        "training.local_batch_size": 2
    }


def test_a_subcommand_of_torchtitan_ends_its_arguments() -> None:
    found = translate(job(recompute="full", zero_stage=3), Framework.TORCHTITAN)
    *plain, last = text_of(found).splitlines()
    assert last == "activation_checkpoint:full"
    assert "--parallelism.data_parallel_shard_degree=16" in plain
    assert "--parallelism.fsdp_reshard_after_forward=always" in plain


def test_a_flag_of_megatron_has_no_value() -> None:
    lines = text_of(translate(job(zero_stage=1), Framework.MEGATRON)).splitlines()
    assert {"--bf16", "--use-distributed-optimizer", "--global-batch-size 64"} <= set(lines)


def test_litgpt_shards_within_one_node_only() -> None:
    one_node = translate(job(zero_stage=3, gpus_per_node=16), Framework.LITGPT)
    assert one_node.impossible == {}
    assert one_node.settings["devices"] == 16
    assert (
        "zero_stage" in translate(job(zero_stage=3, gpus_per_node=8), Framework.LITGPT).impossible
    )
    assert (
        "zero_stage" in translate(job(zero_stage=0, gpus_per_node=16), Framework.LITGPT).impossible
    )


def test_deepspeed_has_the_batch_in_its_three_numbers() -> None:
    assert translate(job(micro_batch_size=2), Framework.DEEPSPEED).nested() == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "train_batch_size": 64,
    }


def test_torchrun_gets_the_variables_that_a_program_has_under_sweep_run() -> None:
    from orchestrator.core.sweepfile.template import TEMPLATE_NAMES

    settings = translate(job(recompute="full:8"), Framework.TORCHRUN).settings
    given = variables(settings, Form.TORCHRUN)
    assert {name.removeprefix("SWEEP_").lower() for name in given} <= set(TEMPLATE_NAMES)
    assert given["SWEEP_RECOMPUTE"] == "full:8"
    assert arguments(settings, Form.TORCHRUN) == ["--nnodes=2", "--nproc-per-node=8"]


@pytest.mark.parametrize("framework", [Framework.TORCHRUN, Framework.ACCELERATE])
def test_several_nodes_need_their_numbers_and_the_host_of_the_first(framework: Framework) -> None:
    rule = TABLES[framework].rules["processes"]
    assert "HOST" in (rule(job()).program or "")
    assert rule(job(gpus_per_node=16)).program is None


# NVIDIA/Megatron-LM at d98e8a64: arguments of megatron/training/arguments.py, and fields of the
# dataclasses from which argument_utils.py makes arguments (TransformerConfig,
# ModelParallelConfig, TrainingConfig, CheckpointConfig, DistributedInitConfig).
MEGATRON = frozenset(
    {
        "bf16",
        "fp16",
        "fp8-format",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-virtual-stages-per-pipeline-rank",
        "context-parallel-size",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
        "max-position-embeddings",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "data-parallel-sharding-strategy",
        "no-gradient-accumulation-fusion",
        "ckpt-format",
    }
)
# huggingface/nanotron at 2411b022: fields of src/nanotron/config/parallelism_config.py and of
# TokensArgs, OptimizerArgs and ModelArgs in config.py.
NANOTRON = frozenset(
    {
        "parallelism.dp",
        "parallelism.pp",
        "parallelism.pp_engine",
        "parallelism.tp",
        "parallelism.context_parallel_size",
        "parallelism.recompute_layer",
        "tokens.micro_batch_size",
        "tokens.batch_accumulation_per_replica",
        "tokens.sequence_length",
        "optimizer.zero_stage",
        "model.dtype",
    }
)
# mosaicml/llm-foundry at 8c8dd48f: fields of TrainConfig in llmfoundry/utils/config_utils.py; of
# composer's FSDPConfig; the target of MPTForCausalLM.activation_checkpointing_fn.
LLM_FOUNDRY = frozenset(
    {
        "device_train_microbatch_size",
        "global_train_batch_size",
        "max_seq_len",
        "precision",
        "fsdp_config.sharding_strategy",
        "fsdp_config.activation_checkpointing",
        "model.activation_checkpointing_target.mptblock",
    }
)


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        (Framework.MEGATRON, MEGATRON),
        (Framework.NANOTRON, NANOTRON),
        (Framework.LLM_FOUNDRY, LLM_FOUNDRY),
    ],
)
def test_each_name_is_one_of_the_frameworks_parser_and_each_is_used(
    framework: Framework, names: frozenset[str]
) -> None:
    used = {name for each in jobs() for name in translate(each, framework).settings}
    assert used == names


@pytest.mark.parametrize(
    ("framework", "schedule", "setting"),
    [
        (Framework.MEGATRON, "1f1b", {}),
        (Framework.MEGATRON, "interleaved:4", {"num-virtual-stages-per-pipeline-rank": 4}),
        (Framework.NANOTRON, "1f1b", {"parallelism.pp_engine": "1f1b"}),
        (Framework.NANOTRON, "gpipe", {"parallelism.pp_engine": "afab"}),
        (
            Framework.TORCHTITAN,
            "interleaved:2",
            {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        (Framework.TORCHTITAN, "gpipe", {"parallelism.pipeline_parallel_schedule": "GPipe"}),
        (Framework.DEEPSPEED, "1f1b", {}),
        (Framework.TORCHRUN, "interleaved:2", {"SWEEP_PIPELINE_SCHEDULE": "interleaved:2"}),
    ],
)
def test_a_schedule_has_the_frameworks_own_name(
    framework: Framework, schedule: str, setting: dict[str, Any]
) -> None:
    named = PipelineSchedule.parse(schedule)
    assert (
        said(framework, "pipeline_schedule", pipeline_parallel_size=2, pipeline_schedule=named)
        == setting
    )


@pytest.mark.parametrize(
    ("framework", "schedule"),
    [
        (Framework.MEGATRON, "gpipe"),
        # 32 layers over 10 stages.
        (Framework.MEGATRON, "interleaved:5"),
        (Framework.MEGATRON, "interleaved:32"),
        (Framework.NANOTRON, "interleaved:2"),
        (Framework.TORCHTITAN, "interleaved:3"),
        (Framework.DEEPSPEED, "gpipe"),
        (Framework.LITGPT, "gpipe"),
    ],
)
def test_a_schedule_that_a_framework_lacks_is_refused_by_name(
    framework: Framework, schedule: str
) -> None:
    named = PipelineSchedule.parse(schedule)
    found = translate(job(pipeline_parallel_size=2, pipeline_schedule=named), framework)
    assert "pipeline_schedule" in found.impossible


def test_a_job_has_the_gpus_of_its_cell_on_whole_nodes() -> None:
    with pytest.raises(ValueError, match="for 8 GPUs, and the cell has 16"):
        Job(cell=CELL, layout=Layout(data_parallel_size=8), gpus_per_node=8)
    small = Layout(data_parallel_size=16)
    with pytest.raises(ValueError, match="a global batch of 16, and the cell of 64"):
        Job(cell=CELL, layout=small, gpus_per_node=8)
    with pytest.raises(ValueError, match="16 GPUs are not whole nodes of 5"):
        job(gpus_per_node=5)


def test_accelerate_shards_matrices_with_fsdp2_only() -> None:
    rule = TABLES[Framework.ACCELERATE].rules["tensor_parallel_size"]
    for zero_stage in (0, 1):
        asked = job(tensor_parallel_size=2, zero_stage=zero_stage)
        assert rule(asked).impossible is not None
    for zero_stage in (2, 3):
        assert said(
            Framework.ACCELERATE,
            "tensor_parallel_size",
            tensor_parallel_size=2,
            zero_stage=zero_stage,
        ) == {
            "parallelism_config.parallelism_config_dp_shard_size": 8,
            "parallelism_config.parallelism_config_tp_size": 2,
        }
        whole = said(Framework.ACCELERATE, "zero_stage", zero_stage=zero_stage)
        assert (whole["distributed_type"], whole["fsdp_config.fsdp_version"]) == ("FSDP", 2)


def test_accelerate_gathers_again_at_stage_3_only_and_names_what_shards() -> None:
    for stage in (2, 3):
        found = said(Framework.ACCELERATE, "zero_stage", zero_stage=stage)
        assert found["fsdp_config.fsdp_reshard_after_forward"] is (stage == 3)
    assert said(Framework.ACCELERATE, "zero_stage", zero_stage=1) == {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config.zero_stage": 1,
    }
    rule = TABLES[Framework.ACCELERATE].rules["zero_stage"]
    for num_gpus, kind in ((1, "NO"), (2, "MULTI_GPU")):
        alone = job(cell=replace(CELL, num_gpus=num_gpus), gpus_per_node=num_gpus)
        assert dict(rule(alone).settings) == {"distributed_type": kind}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_accelerate_recomputes_by_fsdp_from_stage_2_on_and_else_by_the_program(
    recompute: str,
) -> None:
    rule, is_full = TABLES[Framework.ACCELERATE].rules["recompute"], recompute == "full"
    for stage in range(4):
        found = rule(job(recompute=recompute, zero_stage=stage))
        by_fsdp = {"fsdp_config.fsdp_activation_checkpointing": is_full}
        assert dict(found.settings) == (by_fsdp if stage > 1 else {})
        assert ("gradient_checkpointing_enable" in (found.program or "")) is (is_full and stage < 2)


@pytest.mark.parametrize(("gpus_per_node", "num_nodes"), [(16, 1), (8, 2)])
def test_accelerate_is_started_on_each_node(gpus_per_node: int, num_nodes: int) -> None:
    rule = TABLES[Framework.ACCELERATE].rules["processes"]
    found = rule(job(gpus_per_node=gpus_per_node))
    assert (found.settings["num_machines"], found.settings["num_processes"]) == (num_nodes, 16)
    assert ("--machine_rank" in (found.program or "")) is (num_nodes > 1)


def test_transformers_shards_with_fsdp2_and_gathers_again_at_stage_3_only() -> None:
    for stage in (2, 3):
        assert said(Framework.TRANSFORMERS, "zero_stage", zero_stage=stage) == {
            "fsdp": True,
            "fsdp_config.version": 2,
            "fsdp_config.reshard_after_forward": stage == 3,
        }


def test_transformers_takes_zero_1_from_deepspeed_with_the_trainer_s_own_numbers() -> None:
    found = said(Framework.TRANSFORMERS, "zero_stage", zero_stage=1)
    assert found.pop("deepspeed.zero_optimization.stage") == 1
    assert set(found.values()) == {"auto"}


def test_litgpt_is_zero_3_on_several_gpus_and_nothing_on_one() -> None:
    rule = TABLES[Framework.LITGPT].rules["zero_stage"]
    alone = replace(CELL, num_gpus=1)
    node = replace(CELL, num_gpus=8)
    possible = {
        (cell.num_gpus, stage)
        for cell in (alone, node, CELL)
        for stage in range(4)
        if rule(job(cell=cell, gpus_per_node=min(cell.num_gpus, 8), zero_stage=stage)).impossible
        is None
    }
    assert possible == {(1, 0), (8, 3)}


def test_accelerate_accumulates_in_deepspeed_s_own_number_at_zero_1_only() -> None:
    rule = TABLES[Framework.ACCELERATE].rules["grad_accum_steps"]
    assert dict(rule(job(zero_stage=1)).settings) == {
        "deepspeed_config.gradient_accumulation_steps": 4
    }
    for stage in (0, 2, 3):
        assert dict(rule(job(zero_stage=stage)).settings) == {}


def test_nanotron_has_zero_0_and_1() -> None:
    rule = TABLES[Framework.NANOTRON].rules["zero_stage"]
    assert [rule(job(zero_stage=stage)).impossible is None for stage in range(4)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("tensor", "zero_stage", "is_said"), [(1, 0, False), (2, 0, True), (2, 1, True), (2, 2, False)]
)
def test_megatron_wants_one_connection_for_tensor_parallelism_without_its_fsdp(
    tensor: int, zero_stage: int, is_said: bool
) -> None:
    rule = TABLES[Framework.MEGATRON].rules["tensor_parallel_size"]
    found = rule(job(tensor_parallel_size=tensor, zero_stage=zero_stage))
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in (found.program or "")) is is_said


@pytest.mark.parametrize(("num_gpus", "is_possible"), [(1, False), (2, True)])
def test_llm_foundry_recomputes_with_fsdp_of_several_gpus_only(
    num_gpus: int, *, is_possible: bool
) -> None:
    cell = replace(CELL, num_gpus=num_gpus)
    found = translate(
        job(cell=cell, recompute="full", gpus_per_node=num_gpus), Framework.LLM_FOUNDRY
    )
    assert ("recompute" not in found.impossible) is is_possible


def test_torchtitan_replicates_below_zero_2_and_shards_from_it_on() -> None:
    for stage, replicas, shards in ((0, 16, 1), (2, 1, 16), (3, 1, 16)):
        assert said(Framework.TORCHTITAN, "data_parallel_size", zero_stage=stage) == {
            "parallelism.data_parallel_replicate_degree": replicas,
            "parallelism.data_parallel_shard_degree": shards,
        }


def test_megatron_shards_states_by_its_optimizer_and_more_by_its_fsdp() -> None:
    assert said(Framework.MEGATRON, "zero_stage") == {}
    states = {"use-distributed-optimizer": True}
    assert said(Framework.MEGATRON, "zero_stage", zero_stage=1) == states
    for stage, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
        assert said(Framework.MEGATRON, "zero_stage", zero_stage=stage) == {
            **states,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": strategy,
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "fsdp_dtensor",
        }


def test_megatron_s_fp8_is_beside_bf16() -> None:
    found = said(Framework.MEGATRON, "precision", precision=Precision.FP8)
    assert found == {"bf16": True, "fp8-format": "hybrid"}


def test_deepspeed_s_tensor_parallelism_goes_with_all_stages_but_the_third() -> None:
    rule = TABLES[Framework.DEEPSPEED].rules["tensor_parallel_size"]
    for stage in range(4):
        found = rule(job(tensor_parallel_size=2, zero_stage=stage))
        assert (found.impossible is None) is (stage < 3)
        assert dict(found.settings) == ({"tensor_parallel.autotp_size": 2} if stage < 3 else {})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_transformers_recomputes_by_fsdp_from_stage_2_on_and_else_by_the_model(
    recompute: str,
) -> None:
    is_full = recompute == "full"
    for stage in range(4):
        found = said(Framework.TRANSFORMERS, "recompute", recompute=recompute, zero_stage=stage)
        by_fsdp = {"fsdp_config.activation_checkpointing": is_full, "gradient_checkpointing": False}
        assert found == (by_fsdp if stage > 1 else {"gradient_checkpointing": is_full})

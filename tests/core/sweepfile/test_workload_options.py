"""Options of workloads: stored as written, refused if meaningless, and no secret in a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import to_json_schema
from orchestrator.core.sweepfile.synthetic_options import SyntheticOptions
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES, checked, fill
from orchestrator.core.sweepfile.workload_options import (
    AttentionKind,
    LlamaOptions,
    ReplayOptions,
    WorkloadOptions,
    few_entries,
)
from orchestrator.core.sweepfile.workload_section import (
    WORKLOADS,
    CommandWorkload,
    LlamaWorkload,
    is_one_process_per_node,
    options_of,
    steps_per_line,
    varied,
)
from orchestrator.core.trial.protocol import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from orchestrator.node.processes import LAUNCHER_VARIABLE
from tests.core.sweepfile.bounds import check_bounds

WRITTEN: list[dict[str, Any]] = [
    {"name": "llama", "options": {}},
    {"name": "llama", "options": {"attention": "eager", "learning_rate": 1, "token_file": None}},
    {
        "name": "synthetic",
        "options": {
            "noise": 0,
            "faults": [{"fault": "oom", "only_if": {"micro_batch_size": 8, "recompute": "full:2"}}],
        },
    },
    {
        "name": "command",
        "options": {
            "argv": ["a", "{seed}"],
            "env": {"A": "{{}}"},
            "env_from": ["HF_TOKEN"],
            "cwd": "/tmp",
        },
    },
    {
        "name": "command",
        "options": {
            "argv": ["a"],
            "files": {"a.json": {"b": ["{seed}", 1.5, None]}, "run.sh": "#!/bin/sh\n"},
            "metrics": {
                "log": "(a)",
                "unit": "ms",
                "also": {"loss": "(b)", "peak_memory": {"log": "(c)", "unit": "MiB"}},
            },
        },
    },
]


def sweep(**changes: Any) -> SweepSpec:
    return SweepSpec.model_validate(
        {
            "name": "x",
            "model": "llama-tiny",
            "gpus": 1,
            "sequence_length": 64,
            "global_batch_size": 16,
            **changes,
        }
    )


def refused(options: type[WorkloadOptions], **given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        options.model_validate(given)
    return "; ".join(error["msg"] for error in caught.value.errors(include_input=False))


@pytest.mark.parametrize("workload", WRITTEN, ids=json.dumps)
def test_what_is_stored_is_what_was_written_and_no_default(workload: dict[str, Any]) -> None:
    spec = sweep(workload=workload)
    assert json.loads(spec.model_dump_json())["workload"] == workload
    assert spec.workload.options.as_written() == workload["options"]
    assert SweepSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_default_is_no_condition_unless_it_was_written() -> None:
    def named(workload: Any) -> dict[str, Any]:
        return {
            key: value
            for key, value in sweep(workload=workload).conditions().items()
            if key.startswith("workload")
        }

    assert named("llama") == {"workload": "llama"}
    assert named({"options": {"attention": "flash"}}) == {
        "workload": "llama",
        "workload.options.attention": "flash",
    }


def test_names_of_secrets_are_no_condition() -> None:
    plain, secret = (
        {"name": "command", "options": {"argv": ["a"], **more}}
        for more in ({}, {"env_from": ["HF_TOKEN"]})
    )
    assert sweep(workload=plain).conditions() == sweep(workload=secret).conditions()


def test_every_workload_has_options_and_every_option_its_meaning() -> None:
    assert set(WORKLOADS) == set(CAPABILITIES)
    for name, section in WORKLOADS.items():
        assert section.model_fields["name"].annotation is not None
        options = section.model_fields["options"].annotation
        assert options is not None
        for key, field in options.model_fields.items():
            assert field.description, f"{name}: {key}"


def test_an_editor_knows_the_options_of_each_workload() -> None:
    validator = Draft202012Validator(to_json_schema())
    base = {
        "name": "x",
        "model": "llama-tiny",
        "gpus": 1,
        "sequence_length": 64,
        "global_batch_size": 16,
    }
    for workload in [*WRITTEN, "llama", {"options": {"attention": "eager"}}]:
        assert [
            error.message for error in validator.iter_errors({**base, "workload": workload})
        ] == []
    for wrong in (
        "lama",
        {"options": {"atention": "eager"}},
        {"name": "synthetic", "options": {"attention": "eager"}},
        {"name": "synthetic", "options": {"faults": [{"fault": "oom", "at": "later"}]}},
        {"name": "command", "options": {}},
        {"name": "command"},
    ):
        assert not validator.is_valid({**base, "workload": wrong}), wrong


def test_a_precision_that_the_synthetic_device_lacks_is_refused_and_those_it_has_are_not() -> None:
    workload = {"name": "synthetic", "options": {"device_name": "v100-32gb"}}
    with pytest.raises(
        ValidationError, match=r"precision bf16 is none that v100-32gb has .* it has fp16, fp32"
    ):
        sweep(workload=workload, precision=["fp16", "bf16"])
    assert sweep(workload=workload, precision=["fp16", "fp32"])


def test_a_memory_limit_is_for_machines_without_gpus() -> None:
    workload = {"options": {"memory_limit_bytes": 1 << 30}}
    with pytest.raises(ValidationError, match="device h200 has its own limit"):
        sweep(workload=workload, device="h200")
    assert sweep(workload=workload, device="cpu")


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        (LlamaOptions, {"num_threads": True}, "valid integer"),
        (LlamaOptions, {"token_file": ""}, "at least 1 character"),
        (SyntheticOptions, {"sleep": "yes"}, "valid boolean"),
        (SyntheticOptions, {"device_name": "h100"}, "did you mean h100-sxm?"),
        (SyntheticOptions, {"faults": [{"fault": "oom", "at": "stp_2"}]}, "did you mean step_1?"),
        (
            SyntheticOptions,
            {"faults": [{"fault": "oom", "only_if": {"mbs": 2}}]},
            "did you mean micro_batch_size?",
        ),
        (
            SyntheticOptions,
            {"faults": [{"fault": "oom", "only_if": {"zero_stage": True}}]},
            "takes one number or word",
        ),
        (CommandOptions, {"argv": ["a", "{micro batch}"]}, "did you mean {micro_batch_size}?"),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"A": "{"}},
            "write {{ and }} for braces that stay",
        ),
        (CommandOptions, {"argv": ["a"], "cwd": "here"}, "give the absolute path"),
        (CommandOptions, {"argv": ["a"], "env_from": ["A"], "env": {"A": "1"}}, "keep one of them"),
        (
            CommandOptions,
            {"argv": ["a"], "env_from": ["MASTER_PORT"]},
            "set for each rank by its launcher",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env_from": ["SWEEP_DB"]},
            "names that begin with SWEEP_ are the launcher's",
        ),
        (CommandOptions, {"argv": ["a"], "env_from": ["A", "A"]}, "A appears twice"),
        (CommandOptions, {"argv": ["a"], "env_from": ["A", "B C"]}, "entry 2: this is no name"),
        (
            CommandOptions,
            {"argv": ["a"], "pass_env": ["HF_TOKEN"]},
            "HF_TOKEN looks like a secret: name it in env_from",
        ),
        (CommandOptions, {"argv": ["a"], "pass_env": ["MY-*"]}, "is no pattern of names"),
        (CommandOptions, {"argv": ["a"], "pass_env": ["A"], "env": {"A": "1"}}, "pass_env names A"),
        (
            CommandOptions,
            {"argv": ["a"], "pass_env": ["SWEEP_DB"]},
            "names that begin with SWEEP_ are the launcher's",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"RANK": "0"}},
            "RANK is set for each rank by its launcher",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"MASTER_PORT": "1"}},
            "MASTER_PORT is set for each rank by its launcher",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}},
            "set for each rank by its launcher",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"SWEEP_RUN_DIR": "/tmp"}},
            "SWEEP_RUN_DIR: names that begin with SWEEP_ are the launcher's; choose another",
        ),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"A=B": "1"}},
            "no name of an environment variable",
        ),
        (CommandOptions, {"argv": ["a"], "env": {"": "1"}}, "no name of an environment variable"),
        (
            CommandOptions,
            {"argv": ["a"], "env": {"A\0": "1"}},
            "no name of an environment variable",
        ),
        (CommandOptions, {"argv": ["a"], "env": {"A": "1\0"}}, r"control character '\x00'"),
        (CommandOptions, {"argv": ["a", "b\0"]}, r"control character '\x00'"),
        (CommandOptions, {"argv": ["a"], "cwd": "/tmp/\0"}, r"control character '\x00'"),
    ],
)
def test_what_means_nothing_is_refused_with_what_would(
    options: type[WorkloadOptions], given: dict[str, Any], told: str
) -> None:
    assert told in refused(options, **given)


@pytest.mark.parametrize(
    "given",
    [
        ["HF_TOKEN=hf_canary"],
        {"HF_TOKEN": "hf_canary"},
        "hf_canary!",
        [["hf_canary"]],
        ["hf-canary hf_canary"],
    ],
)
def test_a_secret_where_its_name_belongs_is_not_repeated(given: Any) -> None:
    assert "canary" not in refused(CommandOptions, argv=["a"], env_from=given)


def test_a_template_knows_every_name_and_doubled_braces() -> None:
    text = " ".join(f"{{{name}}}" for name in TEMPLATE_NAMES) + " {{json}}"
    assert checked(text) == text
    assert fill("{seed}/{{seed}}", {"seed": "7"}) == "7/{seed}"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["kernel", "Kernel"], "Kernel and kernel would both be SWEEP_KERNEL"),
        (["Seed"], "Seed and seed would both be SWEEP_SEED"),
        *(
            (
                [variable.removeprefix("SWEEP_").lower()],
                "is already a name of the layout"
                if variable == RUN_DIR_VARIABLE
                else f"would be {variable}",
            )
            for variable in (
                "SWEEP_HOME",
                "SWEEP_DB",
                RUN_DIR_VARIABLE,
                ATTEMPT_VARIABLE,
                LAUNCHER_VARIABLE,
            )
        ),
        (["Run_Dir"], "would be SWEEP_RUN_DIR"),
    ],
)
def test_an_option_of_a_command_has_a_variable_of_its_own(names: list[str], told: str) -> None:
    command = {"name": "command", "options": {"argv": ["a"]}}
    with pytest.raises(ValidationError, match=told):
        sweep(workload=command, axes={"options": {name: ["a", "b"] for name in names}})
    assert sweep(
        workload=command, axes={"options": {"kernel": ["a"], "kernels": ["a"], "homes": ["a"]}}
    )


def test_a_program_that_starts_its_ranks_is_one_process_per_node() -> None:
    for options, is_one in (({}, False), ({"processes": "per_node"}, True)):
        workload = sweep(workload={"name": "command", "options": {"argv": ["a"], **options}})
        assert is_one_process_per_node(workload.workload) is is_one
    one = {"name": "synthetic", "options": {"one_rank_per_node": True}}
    assert is_one_process_per_node(sweep(workload=one).workload)
    assert not is_one_process_per_node(sweep(workload="llama").workload)


def test_a_line_covers_one_step_unless_the_file_says_more() -> None:
    for options, every in (
        ({}, 1),
        ({"metrics": {"log": "(a)", "unit": "s"}}, 1),
        ({"metrics": {"log": "(a)", "unit": "s", "every": 10}}, 10),
    ):
        command = sweep(workload={"name": "command", "options": {"argv": ["a"], **options}})
        assert steps_per_line(command.workload) == every
    assert steps_per_line(sweep(workload="llama").workload) == 1


def test_a_trial_is_told_the_options_of_its_layout_on_top() -> None:
    llama = LlamaWorkload(options=LlamaOptions(num_threads=2))
    assert options_of(llama, Layout(options=(("attention", "eager"),))) == {
        "num_threads": 2,
        "attention": "eager",
    }
    assert options_of(llama, Layout()) == {"num_threads": 2}
    told = varied(llama.options, (("attention", "eager"),))
    assert isinstance(told, LlamaOptions) and (told.attention, told.num_threads) == (
        AttentionKind.EAGER,
        2,
    )


def test_a_command_is_told_them_in_its_templates_only() -> None:
    command = CommandWorkload(name="command", options=CommandOptions(argv=("a", "{kernel}")))
    assert options_of(command, Layout(options=(("kernel", "flash"),))) == {
        "argv": ["a", "{kernel}"]
    }


def test_options_that_may_vary_are_options() -> None:
    for workload in WORKLOADS.values():
        options = workload.model_fields["options"].annotation
        assert options is not None
        assert set(options.MAY_VARY or ()) <= set(options.model_fields)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"argv": ["a", "{framework_file}"]}, "{framework_file} is written by `framework`"),
        (
            {"argv": ["a"], "framework": "megatron"},
            "framework megatron writes {framework_arguments}: use it in argv",
        ),
        (
            {"argv": ["a", "{framework_arguments}"], "framework": "deepspeed"},
            "framework deepspeed writes {framework_file}: use it in argv, and no other",
        ),
        (
            {"argv": ["a", "x {framework_arguments}"], "framework": "megatron"},
            "{framework_arguments} becomes several arguments: give it an entry of argv of its own",
        ),
        (
            {
                "argv": ["a", "{framework_file}"],
                "framework": "nanotron",
                "files": {"nanotron.yaml": "general: none"},
            },
            "files.nanotron.yaml gets the layout's keys: write it as a mapping",
        ),
    ],
)
def test_what_a_framework_writes_has_to_reach_the_program(
    options: dict[str, Any], told: str
) -> None:
    assert told in refused(CommandOptions, **options)
    CommandOptions.model_validate({"argv": ["a", "{framework_arguments}"], "framework": "megatron"})
    CommandOptions.model_validate({"argv": ["a", "-c={framework_file}"], "framework": "nanotron"})


@pytest.mark.parametrize(("loss", "chunks"), [("whole", None), ("chunked:8", 8)])
def test_a_loss_is_computed_as_a_whole_or_in_chunks(loss: str, chunks: int | None) -> None:
    assert LlamaOptions.model_validate({"loss": loss}).loss_chunks == chunks


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("replicas", [1, 1 << 50], [0, (1 << 50) + 1]),
        ("bucket_megabytes", [None, 1], [0]),
        ("clip_gradients", [0.0, 1e9], [-0.1, 1.1e9]),
        ("learning_rate", [1e-9, 1e9], [0.0, 1.1e9]),
        ("token_file", ["x"], [""]),
        ("num_threads", [1], [0]),
        ("loss", ["whole", "chunked:1", "chunked:9999"], ["chunked:0", "chunked:10000", "chunked"]),
    ],
)
def test_an_option_of_llama_is_taken_up_to_its_bounds(
    name: str, taken: list[object], refused: list[object]
) -> None:
    check_bounds(LlamaOptions, name, taken=taken, refused=refused)


def test_llama_trains_on_one_thread_and_clips_at_one_unless_the_file_says_more() -> None:
    options = LlamaOptions()
    assert (options.replicas, options.num_threads, options.clip_gradients) == (1, 1, 1.0)
    assert (options.learning_rate, options.loss_chunks) == (3e-4, 8)
    assert [options.compiles(on_gpu=on_gpu) for on_gpu in (True, False)] == [True, False]
    assert not LlamaOptions(compile=False).compiles(on_gpu=True)
    assert not ReplayOptions(table="t.csv", table_id="1").through_ray


def test_a_list_has_512_entries_at_most() -> None:
    for some in ([0] * 512, dict.fromkeys(range(512)), "x" * 513):
        assert few_entries(some) is some
    for many in ([0] * 513, dict.fromkeys(range(513))):
        with pytest.raises(ValueError, match=r"^513 entries; at most 512$"):
            few_entries(many)

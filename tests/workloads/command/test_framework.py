"""A layout that reaches a program in the words of its framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order
from workloads.command.framework import with_framework
from workloads.rank import ConfigRejected

PROGRAM = """
import json, os, sys
given = json.load(open(sys.argv[1]))
assert given["train_micro_batch_size_per_gpu"] == 1, given
assert given["gradient_clipping"] == 1.0, given
if os.environ["RANK"] == "0":
    json.dump({"step_seconds": [0.5]}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("runs"), node="node-a")
    yield launcher
    launcher.close()


def test_a_program_finds_its_layout_in_the_frameworks_file(launcher: NodeLauncher) -> None:
    source = PROGRAM.replace("{", "{{").replace("}", "}}")
    options = {
        "framework": "deepspeed",
        "argv": [sys.executable, "-c", source, "{framework_file}"],
        "files": {"deepspeed.json": {"gradient_clipping": 1.0}},
    }
    report = launcher.run(order("workloads.command", trial_id=1, options=options))
    assert report.failure is None, (report.failure, report.ranks[0].log_tail)


def test_a_layout_that_the_framework_lacks_is_refused_before_the_program_starts(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    options = {"framework": "litgpt", "argv": ["touch", str(started), "{framework_file}"]}
    report = launcher.run(order("workloads.command", trial_id=2, options=options))
    assert report.failure is not None and report.failure.kind is FailureKind.CONFIG_REJECTED
    assert "litgpt cannot express" in report.failure.evidence
    assert not started.exists()


def test_a_failure_that_names_a_setting_says_which_versions_were_tried(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    """The program's packages have a transformers that no rule was tried with."""
    info = tmp_path / "transformers-6.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 6.0.0\n")
    raising = "raise ValueError('Some keys are not used: gradient_checkpointing')"
    options = {
        "framework": "transformers",
        "argv": [sys.executable, "-c", raising, "{framework_file}"],
        "env": {"PYTHONPATH": str(tmp_path)},
    }
    report = launcher.run(order("workloads.command", trial_id=3, options=options))
    assert report.failure is not None and report.failure.kind is FailureKind.USER_ERROR
    assert report.failure.message.endswith(
        "not used: gradient_checkpointing; `framework: transformers` writes gradient_checkpointing;"
        " it was tried with transformers 5.17 to 5.24, and this is 6.0.0: if that is the cause,"
        " install one of those"
    )


def test_arguments_stand_in_place_of_their_name() -> None:
    request = order().request
    options = CommandOptions.model_validate(
        {"framework": "megatron", "argv": ["a", "{framework_arguments}", "--mock-data"]}
    )
    found = with_framework(options, request, gpus_per_node=request.layout.world_size)
    assert found.framework is None
    assert found.argv[0] == "a"
    assert found.argv[-1] == "--mock-data"
    at = found.argv.index("--micro-batch-size")
    assert found.argv[at + 1] == str(request.layout.micro_batch_size)


def test_a_rank_refuses_what_the_framework_cannot_express() -> None:
    request = order().request
    layout = replace(request.layout, zero_stage=3)
    options = CommandOptions.model_validate(
        {"framework": "nanotron", "argv": ["a", "{framework_file}"]}
    )
    with pytest.raises(ConfigRejected, match="zero_stage: nanotron has ZeRO 0 and 1, not 3"):
        with_framework(options, request.model_copy(update={"layout": layout}), gpus_per_node=1)

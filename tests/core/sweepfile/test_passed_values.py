"""What varies between layouts, and what of it a command, its files or its script names."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.problem.layout import NAMED_AXES, Layout
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.passed_values import names_passed, varying_values


def test_what_has_several_values_varies_options_and_lengths_included() -> None:
    layouts = [
        Layout(micro_batch_size=size, grad_accum_steps=8 // size, options=(("kernel", kernel),))
        for size, kernel in ((1, "one"), (2, "other"), (2, "one"))
    ]
    tables = [LayoutTable.of(layouts[:1]), LayoutTable.of(layouts[1:])]
    assert varying_values(tables, [64, 128]) == {
        "sequence_length": ["64", "128"],
        "micro_batch_size": ["1", "2"],
        "grad_accum_steps": ["8", "4"],
        "kernel": ["one", "other"],
    }
    assert varying_values(tables[:1], [64]) == {}
    assert varying_values([], [64]) == {}


@pytest.mark.parametrize(
    ("options", "script", "expected"),
    [
        ({}, "", set()),
        ({"argv": ["a", "--mbs={micro_batch_size}"]}, "", {"micro_batch_size"}),
        ({"env": {"ZERO": "{zero_stage}"}}, "", {"zero_stage"}),
        ({"files": {"a.txt": "{precision} {kernel}"}}, "", {"precision", "kernel"}),
        # What is the same in every layout tells nothing of it.
        ({"argv": ["a", "{run_dir}"]}, "", set()),
        ({}, 'os.environ["SWEEP_MICRO_BATCH_SIZE"]', {"micro_batch_size"}),
        ({}, 'def value(name): return os.environ[f"SWEEP_{name}"]\nvalue("KERNEL")', {"kernel"}),
        ({}, 'def value(n): return os.environ["SWEEP_" + n.upper()]\nvalue("kernel")', {"kernel"}),
        ({}, "MICRO_BATCH_SIZE = 4", set()),
        # The framework's own arguments have all of them.
        (
            {"framework": "megatron", "argv": ["a", "{framework_arguments}"]},
            "",
            {*NAMED_AXES, "sequence_length"},
        ),
    ],
)
def test_a_name_is_passed_by_a_template_or_read_by_the_script(
    options: dict[str, Any], script: str, expected: set[str]
) -> None:
    command = CommandOptions.model_validate({"argv": ["a"], **options})
    assert names_passed(command, ["kernel"], script) == expected

"""The commands that pages print run as they are printed."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from orchestrator.core.frameworks.framework import Framework
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_commands import commands, export_command


@pytest.mark.parametrize(
    ("workload", "first"),
    [("llama", "torchtitan"), ("replay", "torchtitan"), ("command", "torchrun")],
)
def test_a_layout_is_written_for_one_framework_and_a_comment_names_the_others(
    workload: str, first: str
) -> None:
    text = export_command(7, workload=workload, sweep="mine")
    words = shlex.split(text, comments=True)
    assert words == ["sweep", "export", "config", "mine", "--trial", "7", "--to", first]
    assert all(one.value in text for one in Framework)
    assert "mine" not in export_command(7, workload=workload)


def test_a_trial_that_trained_has_logs_and_may_be_profiled(scaling: SweepRows) -> None:
    one = scaling.trials[0]
    found = dict(commands(one, workload="llama"))
    assert found["measure it again"] == f"sweep run trial-{one.trial.id}.yaml"
    assert {"what a rank printed", "what its steps are spent on"} <= set(found)


@pytest.mark.parametrize(
    ("workload", "name", "again"),
    [
        ("synthetic", "mine-simulated", " --simulate"),
        ("synthetic", "mine", ""),
        ("replay", "m", ""),
    ],
)
def test_what_trained_nothing_is_not_profiled(
    scaling: SweepRows, workload: str, name: str, again: str
) -> None:
    one = replace(scaling.trials[0], sweep_name=name)
    found = dict(commands(one, workload=workload))
    assert found["measure it again"] == f"sweep run trial-{one.trial.id}.yaml{again}"
    assert "what its steps are spent on" not in found
    # Real ranks of workload synthetic have logs.
    assert ("what a rank printed" in found) is (name == "mine")

"""A profile of a user's program: its traces are split as those of workload llama are."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.rank_profile import ProfilePlan
from orchestrator.core.trial.trace_split import Part
from orchestrator.node.launcher import NodeLauncher
from tests.workloads.command.running import command, python

WRITES = """
import json, os
rank = int(os.environ["RANK"])
row = lambda name, cat, ts, dur: {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur,
                                  "pid": 1, "tid": 1}
events = [row("ProfilerStep#%d" % i, "user_annotation", 100 * i, 100) for i in (0, 1)]
# In 200 us rank 0 spends 100 in products, rank 1 60; all the rest is gloo's.
events += [row("aten::mm", "cpu_op", 0, 100 - 40 * rank),
           row("gloo:all_reduce", "user_annotation", 100 - 40 * rank, 100 + 40 * rank)]
with open(os.environ["SWEEP_PROFILE_DIR"] + "/mine.json", "w") as file:
    json.dump({"traceEvents": events, "distributedInfo": {"rank": rank}}, file)
"""


def profiled(launcher: NodeLauncher, program: str, **known: Any) -> NodeReport:
    asked: LaunchOrder = command({"argv": python(program), "traces": True}, **known)
    request = asked.request.model_copy(update={"profile": ProfilePlan()})
    return launcher.run(replace(asked, request=request))


def test_the_trace_of_each_rank_is_split(launcher: NodeLauncher) -> None:
    report = profiled(launcher, WRITES)
    assert report.failure is None, (report.failure, report.ranks[0].log_tail)
    found = [outcome.result.profile for outcome in report.ranks if outcome.result is not None]
    assert [one.num_steps for one in found if one is not None] == [2, 2]
    # Only data parallelism has more than one rank.
    assert [
        (one.parts[Part.MATMUL], one.parts[Part.EXPOSED_DP]) for one in found if one is not None
    ] == [(100_000, 100_000), (60_000, 140_000)]
    assert all(one is not None and one.trace_path for one in found)


def test_ranks_other_than_the_first_may_write_no_trace(launcher: NodeLauncher) -> None:
    report = profiled(launcher, "import os\nif os.environ['RANK'] == '0':\n" + indented(WRITES))
    assert report.failure is None, (report.failure, report.ranks[0].log_tail)
    found = [outcome.result for outcome in report.ranks]
    assert [one is not None and one.profile is not None for one in found] == [True, False]


def indented(program: str) -> str:
    return textwrap.indent(program, "    ")


def test_a_program_without_a_trace_is_told_where_to_write_it(launcher: NodeLauncher) -> None:
    report = profiled(launcher, "pass")
    assert report.failure is not None
    assert report.failure.kind in (FailureKind.BAD_RESULT, FailureKind.USER_ERROR)
    assert "wrote no trace into SWEEP_PROFILE_DIR" in report.failure.message


def test_what_is_no_trace_is_refused_with_the_reason(launcher: NodeLauncher) -> None:
    program = WRITES.replace("ProfilerStep#%d", "Step %d")
    report = profiled(launcher, program, world_size=1)
    assert report.failure is not None
    assert "mine.json: it has no annotation sweep::steps and no ProfilerStep#N" in (
        report.failure.message
    )


def test_a_program_that_fails_is_judged_as_in_a_trial(launcher: NodeLauncher) -> None:
    report = profiled(launcher, "raise RuntimeError('mine')")
    assert report.failure is not None
    assert report.failure.kind is FailureKind.USER_ERROR
    assert "mine" in report.failure.message


def test_a_measured_program_gets_no_folder_and_its_document_no_profile(
    launcher: NodeLauncher,
) -> None:
    program = """
        import json, os, sys
        assert "SWEEP_PROFILE_DIR" not in os.environ
        with open(os.environ["SWEEP_RESULT_FILE"], "w") as file:
            json.dump({"step_seconds": [1.0] * 9, "profile": json.loads(sys.argv[1])}, file)
    """
    from tests.core.trial.rank_profiles import rank_profile

    told = rank_profile().model_dump_json()
    argv = [*python(program), told.replace("{", "{{").replace("}", "}}")]
    report = launcher.run(command({"argv": argv}, world_size=1))
    assert report.failure is not None
    assert "profile: no field of a document; leave it out" in report.failure.message


@pytest.mark.parametrize("traces", [True, False])
def test_whether_it_writes_traces_is_no_condition_of_its_numbers(traces: bool) -> None:
    options = CommandOptions.model_validate({"argv": [sys.executable], "traces": traces})
    assert "traces" not in options.conditions()

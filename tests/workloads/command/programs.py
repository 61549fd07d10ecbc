"""Small programs for workload command, run through a real launcher and judged as a sweep does."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from orchestrator.cluster.contract import Finished
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout
from orchestrator.core.trial.failure_kinds import Failure
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.machine_load import NO_LOAD
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import ATTEMPT_VARIABLE, MeasurementPlan
from orchestrator.node.launcher import NodeLauncher
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.verdict import judge_attempt
from tests.node.launching import order

# What a program needs to tell of its steps: `tell(step_seconds=0.5)`, and a step of about 0.15 s.
PRELUDE = """
import json, os, random, sys, time

random.seed(int(os.environ["RANK"]))

def tell(**line):
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        file.write(json.dumps(line) + "\\n")

def work(seconds=0.15):
    time.sleep(seconds * random.uniform(0.98, 1.02))

accumulated = int(os.environ["SWEEP_GRAD_ACCUM_STEPS"])
num_steps = int(os.environ["SWEEP_NUM_STEPS"])
"""
_trial_ids = count(1)


def order_of(
    program: str,
    *,
    argv: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    plan: MeasurementPlan | None = None,
    layout: Layout | None = None,
    **known: Any,
) -> LaunchOrder:
    """An order to run a program, `argv` or Python's source after PRELUDE, on one rank."""
    known.setdefault("world_size", 1)
    source = (PRELUDE + textwrap.dedent(program)).replace("{", "{{").replace("}", "}}")
    asked = order(
        "workloads.command",
        trial_id=next(_trial_ids),
        options={"argv": list(argv or [sys.executable, "-c", source]), **(options or {})},
        **known,
    )
    request = asked.request.model_copy(
        update={
            # Others test at the same time: the tag of an attempt is its own.
            "sweep": f"test-{os.getpid()}",
            "measurement": plan or asked.request.measurement,
            "layout": layout or asked.request.layout,
        }
    )
    return replace(asked, request=request)


def judge(asked: LaunchOrder, report: NodeReport) -> Measurement | Failure:
    """What the attempt came to, as a sweep on one node judges it."""
    request = asked.request
    return judge_attempt(
        Finished(
            trial_id=request.trial_id, reports=[report], failure=report.failure, gpu_seconds=1.0
        ),
        cell=Cell(
            model=request.model,
            num_gpus=request.layout.world_size,
            sequence_length=request.sequence_length,
            global_batch_size=request.layout.global_batch_size,
        ),
        layout=request.layout,
        plan=request.measurement,
        peaks=MeasuredPeaks([], device_name=None),
        code=Fingerprint(orchestrator_version="test"),
        device_name=None,
        is_repeat=False,
    ).outcome


def outcome_of(launcher: NodeLauncher, program: str, **known: Any) -> Measurement | Failure:
    """What the attempt came to, as on an idle machine: other tests run beside it."""
    asked = order_of(program, **known)
    return judge(asked, replace(launcher.run(asked), load=NO_LOAD))


def left_of(asked: LaunchOrder) -> list[str]:
    """The living processes of an attempt, by its tag in their environment: their arguments."""
    mark = f"{ATTEMPT_VARIABLE}={asked.request.tag}".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found

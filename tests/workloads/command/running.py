"""Runs programs of workload command in tests, through a launcher."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import MeasurementPlan
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import order

trial_ids = count(1)


def run(
    launcher: NodeLauncher,
    program: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    env_from: Sequence[str] = (),
    plan: MeasurementPlan | None = None,
    **known: Any,
) -> NodeReport:
    """Run a Python program with these arguments to its end."""
    options = {"argv": python(program, *arguments), "env": env or {}, "env_from": list(env_from)}
    return launcher.run(command(options, plan=plan, **known))


def python(program: str, *arguments: str) -> list[str]:
    """The command line of a Python program. Its braces stay; those of the arguments are filled."""
    source = textwrap.dedent(program).replace("{", "{{").replace("}", "}}")
    return [sys.executable, "-c", source, *arguments]


def command(
    options: Mapping[str, Any], *, plan: MeasurementPlan | None = None, **known: Any
) -> LaunchOrder:
    """The order for one attempt of workload command."""
    asked = order("workloads.command", trial_id=next(trial_ids), options=dict(options), **known)
    if plan is None:
        return asked
    return replace(asked, request=asked.request.model_copy(update={"measurement": plan}))

"""The phases of a real attempt: none that can be known is missing, and their sum is right."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cluster.contract import Finished
from orchestrator.core.trial.protocol import Phase
from orchestrator.node.launcher import NodeLauncher
from orchestrator.sweep.verdict import attempt_facts
from tests.node.launching import order

ALL = set(Phase)
STEPS = """
    import json, os, time
    moments = [time.monotonic()]
    time.sleep(0.4)  # it imports, meets the others and compiles
    with open(os.environ["SWEEP_METRICS_FILE"], "w", buffering=1) as file:
        for _ in range(8):
            time.sleep(0.1)
            moments.append(time.monotonic())
            file.write(json.dumps({"step_seconds": 0.1}) + "\\n")
    json.dump(moments, open("moments.json", "w"))
    time.sleep(0.3)  # it saves
"""
AT_ITS_END = """
    import json, os, time
    time.sleep(0.2)
    json.dump({"step_seconds": [0.1, 0.1]}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
"""

_trial_ids = count(1)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    launcher = NodeLauncher(tmp_path_factory.mktemp("phases"), node="node-a")
    yield launcher
    launcher.close()


def phases_of(
    launcher: NodeLauncher, program: str, options: dict[str, Any]
) -> tuple[Mapping[Phase, float], float]:
    """An attempt's phases, with a rank server that has imported its program; and its seconds."""
    launcher.run(order(program, trial_id=next(_trial_ids), world_size=1, options=options))
    report = launcher.run(order(program, trial_id=next(_trial_ids), world_size=1, options=options))
    assert report.failure is None, report.failure
    results = [outcome.result for outcome in report.ranks if outcome.result is not None]
    end = Finished(trial_id=1, reports=[report], failure=None, gpu_seconds=report.seconds)
    return attempt_facts(end, results, None, num_gpus=1)["phases"], report.seconds


def command(source: str) -> dict[str, Any]:
    return {
        "argv": [
            sys.executable,
            "-c",
            textwrap.dedent(source).replace("{", "{{").replace("}", "}}"),
        ]
    }


@pytest.mark.parametrize(
    ("program", "options", "known"),
    [
        pytest.param("workloads.llama", {}, ALL, marks=pytest.mark.long),
        ("workloads.synthetic", {"sleep": True, "time_scale": 30.0}, ALL),
        (
            "workloads.command",
            command(STEPS),
            ALL - {Phase.RENDEZVOUS},
        ),  # one phase, to us
    ],
    ids=["llama", "synthetic", "command"],
)
def test_the_phases_of_an_attempt_add_up_to_it(
    launcher: NodeLauncher, program: str, options: dict[str, Any], known: set[Phase]
) -> None:
    if program == "workloads.llama":
        pytest.importorskip("torch")
    phases, seconds = phases_of(launcher, program, options)
    assert set(phases) == known
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(seconds, rel=0.2, abs=0.3)


def test_a_program_that_tells_of_each_step_is_timed_by_its_lines(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    options = command(STEPS) | {"cwd": str(tmp_path)}
    phases, seconds = phases_of(launcher, "workloads.command", options)
    # By the program's own clock: its sleeps take longer on a busy machine.
    began, first, *_, last = json.loads((tmp_path / "moments.json").read_text())
    assert phases[Phase.FIRST_STEP] >= first - began - 0.05, "and Python has started before"
    assert phases[Phase.STEADY] == pytest.approx(last - first, abs=0.3)
    assert phases[Phase.TEARDOWN] >= 0.25
    # The kernel tells a process's age to one clock tick, 10 ms; it is read twice.
    assert sum(phases.values()) <= seconds + 0.02


def test_of_a_program_that_tells_nothing_until_its_end_no_phase_is_made_up(
    launcher: NodeLauncher,
) -> None:
    phases, _ = phases_of(launcher, "workloads.command", command(AT_ITS_END))
    assert set(phases) == {Phase.START, Phase.TEARDOWN}


def test_an_attempt_that_failed_has_the_phases_until_then(launcher: NodeLauncher) -> None:
    options = {"faults": [{"fault": "oom", "at": "step_3"}], "sleep": True, "time_scale": 20.0}
    report = launcher.run(order(trial_id=next(_trial_ids), options=options))
    end = Finished(trial_id=1, reports=[report], failure=report.failure, gpu_seconds=report.seconds)
    assert set(attempt_facts(end, [], None, num_gpus=1)["phases"]) == ALL - {Phase.TEARDOWN}


def test_a_hang_in_teardown_is_time_of_the_teardown(launcher: NodeLauncher, tmp_path: Path) -> None:
    options = {"faults": [{"fault": "hang", "at": "teardown"}]}
    # A single rank: of two the limit ends the earlier one's teardown, and the later one's counts.
    report = launcher.run(
        order(trial_id=next(_trial_ids), options=options, limits={"teardown": 0.5}, world_size=1)
    )
    assert report.failure is None
    assert report.teardown_seconds is not None
    assert 0.5 <= report.teardown_seconds <= report.seconds

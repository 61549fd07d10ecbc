"""A project whose modules have the names of ours, or of packages that we import, harms nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.core.sweepfile.template import TEMPLATE_NAMES
from orchestrator.core.trial.rank_environment import LAUNCHERS_OWN
from tests.acceptance.command import Command

SHADOWED = (
    *("db", "orchestrator", "workloads"),
    *("yaml", "psutil", "sqlalchemy", "optuna", "numpy", "ray", "grpc"),
)
PROGRAM = """
import json, os, sys
try:
    import db
except RuntimeError as exc:
    found = str(exc)
told = {"environment": dict(os.environ), "db": found}
json.dump(told, open(os.path.join(os.environ["TOLD"], os.environ["RANK"] + ".json"), "w"))
with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
    for step in range(int(sys.argv[1])):
        print(json.dumps({"step_seconds": 0.01 + step / 1e5}), file=file)
"""
SWEEP = """
name: mine
model: llama-tiny
gpus: 1
device: cpu
sequence_length: 64
global_batch_size: 2
axes: {micro_batch_size: 1, recompute: [none]}
measurement: {warmup_steps: 2, min_steps: 6, max_steps: 6}
search: {confirm: {repeats: 0}}
workload:
  name: command
  options:
    argv: [PYTHON, PROJECT/train.py, "{num_steps}"]
    cwd: PROJECT
    env: {TOLD: PROJECT}
"""

# The caller's environment: what its programs get, and what they do not.
PASSED = {
    "PYTHONBREAKPOINT": "mine.debugger",
    "PYTHONHASHSEED": "7",
    "PYTHONUNBUFFERED": "1",
    "OMP_PROC_BIND": "true",
}
NOT_PASSED = {"RAY_memory_monitor_refresh_ms": "0", "EDITOR": "ed"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured program of the project: what the command said, and the program itself."""

    command: Command
    given: dict[str, str]  # its environment
    said: str
    told: dict[str, Any]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A sweep of the user's project, in which they work, and which is on their PYTHONPATH."""
    folder = tmp_path_factory.mktemp("names")
    project = folder / "project"
    project.mkdir()
    for name in SHADOWED:
        (project / name).mkdir()
        (project / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the user')\n")
    (project / "train.py").write_text(PROGRAM)
    text = SWEEP.replace("PYTHON", sys.executable).replace("PROJECT", str(project))
    (project / "mine.yaml").write_text(text)
    script = folder / "bin" / "sweep"
    script.parent.mkdir()
    # As an installer writes it.
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom layout_sweep.start import sweep\nsys.exit(sweep())\n"
    )
    script.chmod(0o755)
    command = Command(
        project,
        f"sqlite:///{folder / 'sweep.sqlite'}",
        {**PASSED, **NOT_PASSED, "PYTHONPATH": str(project)},
        program=script,
    )
    given, done = command.given(), command.ok("run", "mine.yaml")
    told = json.loads((project / "0.json").read_text())
    return Measured(command=command, given=given, said=done.stderr + done.stdout, told=told)


@pytest.mark.long
@pytest.mark.acceptance
@pytest.mark.ray
def test_a_sweep_in_such_a_project_measures(measured: Measured) -> None:
    assert "of the user" not in measured.said
    assert "measured" in measured.command.ok("sql", "select state from v_trial").stdout
    # Its exit code depends on who else uses the machine.
    doctor = json.loads(measured.command.run("doctor", "--json").stdout)
    imported = {check["name"]: check["status"] for check in doctor["checks"]}
    assert (imported["ray"], imported["torch"]) == ("ok", "ok")
    assert "of the user" not in json.dumps(doctor)
    assert measured.told["db"] == "db of the user", "the program imports what is theirs"


@pytest.mark.long
@pytest.mark.acceptance
@pytest.mark.ray
def test_the_program_sees_the_callers_environment_and_what_is_documented(
    measured: Measured,
) -> None:
    told, given = measured.told["environment"], measured.given
    set_by_launcher = {
        *LAUNCHERS_OWN,
        *(f"SWEEP_{name.upper()}" for name in TEMPLATE_NAMES),
        *("SWEEP_ATTEMPT", "SWEEP_LAUNCHER", "SWEEP_RAY_FOLDER"),
        *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RES_OPTIONS", "TOLD"),
    }
    assert told.keys() - given.keys() == set_by_launcher - given.keys()
    assert {name for name in told.keys() & given.keys() if told[name] != given[name]} <= (
        set_by_launcher
    )
    assert {name: told.get(name) for name in PASSED} == PASSED
    assert told["PYTHONPATH"] == str(measured.command.folder)
    assert not {name for name in told if name.startswith("RAY_") or name in ("EDITOR", "SWEEP_DB")}

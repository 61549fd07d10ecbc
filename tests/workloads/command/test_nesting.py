"""A program that starts its own launcher once per rank is refused, and nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.node.launcher import NodeLauncher
from tests.workloads.command.running import command, run

FIX = "set workload.options.processes: per_node"

LAUNCHERS = {
    "another number of ranks": """
        ranks = [start({"RANK": str(n), "WORLD_SIZE": "3"}) for n in range(3)]
        """,
    "another run": """
        ranks = [start({"TORCHELASTIC_RUN_ID": "none"})]
        """,
    "as many ranks": """
        ranks = [start({"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(2)]
        """,
}
START = """
        import json, os, subprocess, sys, time
        def start(more):
            program = [sys.executable, "-c", "import time; time.sleep(60)"]
            return subprocess.Popen(program, env=dict(os.environ, **more))
"""


@pytest.mark.parametrize("ranks", LAUNCHERS.values(), ids=LAUNCHERS)
def test_ranks_of_its_own_are_refused_with_the_fix(
    launcher: NodeLauncher,
    ranks: str,
) -> None:
    report = run(launcher, f"{START}{ranks}\n        time.sleep(60)")
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "the program starts its own launcher" in report.failure.message
    assert FIX in report.failure.message


def test_a_script_that_calls_torchrun_is_refused_before_its_ranks_start(
    launcher: NodeLauncher,
    tmp_path: Path,
) -> None:
    """It is known by its name: its ranks would clash on one port, which looks like the machine."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    torchrun.chmod(0o755)
    script = tmp_path / "train.sh"
    script.write_text(f"{torchrun} train.py\necho ended\n")
    report = launcher.run(command({"argv": ["bash", str(script)]}))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "it runs torchrun" in report.failure.message and FIX in report.failure.message


@pytest.mark.parametrize(
    "argv",
    [
        ["torchrun", "--nproc-per-node", "2", "train.py"],
        ["/opt/bin/python", "-m", "torch.distributed.run", "train.py"],
        ["deepspeed", "train.py"],
    ],
)
def test_a_launcher_in_argv_is_refused_with_the_file(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=FIX):
        CommandOptions.model_validate({"argv": argv})
    assert CommandOptions.model_validate({"argv": argv, "processes": "per_node"})


def test_loaders_compilers_and_a_program_that_replaces_itself_are_no_launcher(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        """
        import json, multiprocessing, os, subprocess, sys, time
        if "again" not in os.environ:
            os.environ["again"] = "1"
            os.execv(sys.executable, sys.orig_argv)
        def load():
            time.sleep(60)
        loaders = [multiprocessing.get_context("fork").Process(target=load) for _ in range(2)]
        for loader in loaders:
            loader.start()
        subprocess.Popen(["env", "-i", "sleep", "60"])  # a compiler
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "torchrun"])
        until = time.monotonic() + 1.0  # some looks
        while time.monotonic() < until:
            time.sleep(0.1)
            if os.environ["RANK"] == "0":
                with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                    print(json.dumps({"step_seconds": time.monotonic() % 1 + 0.1}), file=file)
        os._exit(0)
        """,
    )
    assert report.failure is None, report.failure


def test_a_rank_that_writes_steps_besides_rank_0_writes_them_elsewhere(
    launcher: NodeLauncher,
) -> None:
    report = run(
        launcher,
        """
        import json, os
        with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
            for step in range(4):
                print(json.dumps({"step_seconds": 1.0 + int(os.environ["RANK"])}), file=file)
        """,
    )
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    assert result is not None and result.step_seconds == [1.0] * 3

"""A program that starts the ranks of its node itself: once per node, without a rank's variables."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.launch_order import LaunchOrder
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import MeasurementPlan
from orchestrator.core.trial.rank_environment import RANKS_OWN
from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import survivors, tree_of, with_start_times
from tests.workloads.command.running import command, python

# Each rank adds its number to those of the others, step by step, and rank 0 writes the steps.
TRAINER = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
# One write: the ranks of a node share a log, and print() writes each argument by itself.
os.write(1, b"threads %d\\n" % torch.get_num_threads())
for step in range(int(sys.argv[1])):
    began = time.perf_counter()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    time.sleep(0.02)
    assert total.item() == sum(range(world_size))
    if rank == 0:
        with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
            seconds = time.perf_counter() - began
            print(json.dumps({"step_seconds": seconds, "world_size": world_size}), file=file)
dist.destroy_process_group()
"""
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run",
    "--nnodes", "{num_nodes}", "--node-rank", "{node_rank}", "--nproc-per-node", "{gpus_per_node}",
    "--master-addr", "{master_addr}", "--master-port", "{master_port}",
]  # fmt: skip


def per_node(argv: list[str], **known: Any) -> LaunchOrder:
    options = {"argv": argv, "processes": "per_node", "env": known.pop("env", {})}
    return command(options, one_rank_per_node=True, **known)


def long_plan() -> MeasurementPlan:
    """A plan of more steps than the program takes to be seen through."""
    long = {"max_steps": 100, "relative_confidence": 1e-9, "min_steps": 90}
    return command({"argv": ["true"]}).request.measurement.model_copy(update=long)


def test_it_is_started_once_with_the_gangs_shape_and_no_rank_of_its_own(
    launcher: NodeLauncher,
) -> None:
    program = """
        import json, os, sys
        print("told", json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
        json.dump({"step_seconds": [1.0]}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
    """
    names = ["{gpus_per_node}", "{num_nodes}", "{node_rank}", "{master_addr}", "{world_size}"]
    report = launcher.run(
        per_node(python(program, *names), world_size=4, env={"MASTER_PORT": "{master_port}"})
    )
    assert report.failure is None, report.failure
    assert [outcome.rank for outcome in report.ranks] == [0]
    told = report.ranks[0].log_tail.partition("told ")[2]
    arguments, environment = json.loads(told)
    assert arguments == ["4", "1", "0", "127.0.0.1", "4"]
    assert RANKS_OWN & environment.keys() == {"MASTER_PORT"}, "what `env` sets"
    assert environment["MASTER_PORT"] == environment["SWEEP_MASTER_PORT"]
    assert environment["SWEEP_GPUS_PER_NODE"] == "4"
    assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))


def test_a_launcher_of_another_number_of_ranks_is_refused(
    launcher: NodeLauncher,
) -> None:
    program = """
        import os, subprocess, sys, time
        rank = dict(os.environ, RANK="0", WORLD_SIZE="1")
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], env=rank)
    """
    report = launcher.run(per_node(python(program), world_size=2))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "WORLD_SIZE=1, and the layout has 2 ranks" in report.failure.message


def test_ranks_that_all_write_the_steps_are_refused_and_loaders_with_the_same_file_are_not(
    launcher: NodeLauncher,
) -> None:
    # A fork begins at once, however busy the machine is.
    writes = """
        import os, time
        {before}
        file = open(os.environ["SWEEP_METRICS_FILE"], "a", buffering=1)
        {after}
        for step in range(40):
            file.write('{{"step_seconds": 0.1}}\\n')
            time.sleep(0.05)
    """
    plan = long_plan()
    twice = python(writes.format(before="os.fork()", after=""))
    report = launcher.run(per_node(twice, plan=plan))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "2 processes write steps to one file: let the process with RANK 0" in (
        report.failure.message
    )
    loader = python(writes.format(before="", after="os.fork() or (time.sleep(60), os._exit(0))"))
    report = launcher.run(per_node(loader, plan=plan))
    assert report.failure is None, report.failure


def test_ranks_that_open_the_file_for_each_step_are_seen_by_how_their_lines_come(
    launcher: NodeLauncher,
) -> None:
    program = """
        import os, subprocess, sys, time
        sys.argv[1:] or subprocess.Popen([*sys.orig_argv, "again"])
        began = time.monotonic() // 0.3 * 0.3
        while True:
            began += 0.3  # both at the same times
            time.sleep(max(0.0, began - time.monotonic()))
            with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                file.write('{"step_seconds": 0.3}\\n')
    """
    report = launcher.run(per_node(python(program), world_size=2, plan=long_plan()))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "each step is written 2 times: let the process with RANK 0" in report.failure.message


@pytest.mark.parametrize("then", ["", "time.sleep(0.3)"])
def test_every_step_written_once_per_rank_is_refused(launcher: NodeLauncher, then: str) -> None:
    program = f"""
        import os, time
        lines = int(os.environ["SWEEP_NUM_STEPS"]) * 2
        open(os.environ["SWEEP_METRICS_FILE"], "a").write('{{"step_seconds": 0.1}}\\n' * lines)
        {then}
    """
    report = launcher.run(per_node(python(program), world_size=2))
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "2 times the 9 that were asked for" in report.failure.message


def test_variables_of_a_rank_may_be_set_for_a_launcher_and_for_no_rank() -> None:
    given = {"argv": ["run"], "env": {"MASTER_PORT": "{master_port}", "RANK": "{node_rank}"}}
    assert CommandOptions.model_validate({**given, "processes": "per_node"})
    for processes, env in (("per_rank", "RANK"), ("per_node", "CUDA_VISIBLE_DEVICES")):
        with pytest.raises(ValueError, match="is set for each rank by its launcher"):
            CommandOptions.model_validate(
                {"argv": ["run"], "env": {env: "0"}, "processes": processes}
            )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeLauncher]]:
    """Two launchers, each of which stands for a node."""
    pytest.importorskip("torch")
    nodes = [NodeLauncher(tmp_path / name, node=name) for name in ("node-a", "node-b")]
    yield nodes
    for node in nodes:
        seen = with_start_times(tree_of(node.root))
        node.close()
        assert survivors(seen.items(), root=node.root) == []


def torchrun(trainer: Path, num_steps: str = "{num_steps}", **known: Any) -> LaunchOrder:
    trainer.write_text(TRAINER)
    return per_node([*TORCHRUN, str(trainer), num_steps], **known)


def test_torchrun_trains_on_one_node(nodes: list[NodeLauncher], tmp_path: Path) -> None:
    report = nodes[0].run(torchrun(tmp_path / "train.py"))
    assert report.failure is None, report.failure
    result = report.ranks[0].result
    assert result is not None and len(result.step_seconds) == 8
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert report.ranks[0].log_tail.count(f"threads {threads}") == 2


def on_both(nodes: list[NodeLauncher], asked: LaunchOrder) -> list[NodeReport]:
    port = nodes[0].rendezvous()
    share = replace(asked, local_world_size=1, master_port=port)
    reports: dict[int, NodeReport] = {}

    def run(number: int) -> None:
        order = replace(share, first_rank=number, node_rank=number)
        reports[number] = nodes[number].run(order)
        if reports[number].failure is not None or reports[number].has_enough:
            nodes[1 - number].kill(asked.request.tag)  # as the scheduler does

    threads = [threading.Thread(target=run, args=[number]) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reports[0], reports[1]]


@pytest.mark.long
def test_torchrun_trains_on_two_nodes_and_an_endless_run_is_ended_on_both(
    nodes: list[NodeLauncher], tmp_path: Path
) -> None:
    first, second = on_both(nodes, torchrun(tmp_path / "train.py", "1000000"))
    assert first.failure is None, first.failure
    assert first.has_enough and first.ranks[0].result is not None
    assert second.ranks[0].rank == 1 and second.ranks[0].result is None


@pytest.mark.long
def test_a_torchrun_that_is_killed_ends_those_of_both_nodes_and_leaves_nothing(
    nodes: list[NodeLauncher], tmp_path: Path
) -> None:
    asked = torchrun(tmp_path / "train.py", "1000000", limits={"steady": 20.0})
    noisy = {"max_steps": 9000, "relative_confidence": 1e-9}
    plan = asked.request.measurement.model_copy(update=noisy)
    asked = replace(asked, request=asked.request.model_copy(update={"measurement": plan}))
    seen: dict[int, int | None] = {}

    def kill_one() -> None:
        while (heartbeat := nodes[0].progress()) is None or heartbeat.step < 3:
            time.sleep(0.1)
        of_both = [
            [pid for pid in tree_of(node.root) if b"train.py" in _command(pid)] for node in nodes
        ]
        seen.update(with_start_times(pid for pids in of_both for pid in pids))
        # The first below its rank is torchrun.
        os.kill(of_both[1][0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    first, second = on_both(nodes, asked)
    killer.join()
    assert len(seen) == 4, "torchrun and one rank on each node"
    assert second.failure is not None and second.failure.kind is FailureKind.KILLED
    assert first.failure is not None and not first.has_enough
    assert survivors(seen.items(), root="nothing") == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

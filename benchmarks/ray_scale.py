"""Runs the playbook's study on a real Ray cluster of simulated nodes, with kills; prints JSON.

python -m benchmarks.ray_scale [--nodes 16] [--gpus-per-node 32] [--trials-per-cell 153]
    [--kills 5] [--node-kills 5] [--seed 1] [--out FILE.json]

It ends with 1 if anything was lost. Each node is a raylet on this machine, with declared GPUs.
There are 16 nodes of 32 GPUs and not 64 of 8, because 64 raylets and their helper processes take
two cores minutes to start, and a dead one looks like one that waits for a core. One process of
workload synthetic represents all ranks of a node, and does not wait. Everything else is as on a
cluster: placement groups, agents, launchers, rank servers, files, SQL.

The 28 cells of sweeps/playbook.yaml need gangs of 8 to 512 GPUs. Each has 153 random layouts, or
as many as are left without those that cannot fit; random, because the search is not measured
here. Orchestrators are killed with SIGKILL and started again by the same command. To lose a node
its raylet is killed, and another joins. Both happen at random moments, spread over the trials.

Acknowledged results are also written to a log that no kill reaches, and compared with the store
at the end (tests/faults/history.py). `seconds`: from the start of the first orchestrator to the
end of the last one, without starting the cluster. `trials_per_second`: ends in the middle eight
tenths of the trials, over the time between. `cpu_seconds` and `memory_bytes`: of the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from orchestrator.cluster.ray.scheduler import RayScheduler
from orchestrator.core.errors import ClusterUnavailable, SweepError
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.protocol import Device
from orchestrator.node.processes import descendants, start_time
from orchestrator.sweep.run import run_sweep
from tests.faults.campaign import SURVIVOR_SECONDS
from tests.faults.history import Log, Seen, judge
from tests.faults.witness import WitnessedScheduler, WitnessedStore

SWEEP_FILE = PROJECT / "sweeps" / "playbook.yaml"
OVERRIDES = (
    "workload.options={one_rank_per_node: true}",
    "search.strategy=random",
    "search.confirm={repeats: 0}",
    "measurement.preflight=false",  # all nodes are one machine
)
KILLED_BETWEEN = (0.05, 0.9)  # shares of the trials
MIDDLE = (0.1, 0.9)
POLL_SECONDS = 0.5
LONGEST_SECONDS = 3600.0
NODE: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}


def study(arguments: argparse.Namespace) -> SweepSpec:
    """The sweep over the cells that fit the cluster; 512 GPUs fit all of them."""
    sizes = [
        8 << power for power in range(7) if 8 << power <= arguments.nodes * arguments.gpus_per_node
    ]
    overrides = [
        f"gpus={sizes}",
        f"gpus_per_node={arguments.gpus_per_node}",
        f"search.max_trials={arguments.trials_per_cell}",
    ]
    return load(
        SWEEP_FILE.read_text(encoding="utf-8"),
        source=SWEEP_FILE.name,
        overrides=[*OVERRIDES, *overrides],
    )


def orchestrate(address: str, folder: Path, spec: SweepSpec) -> int:
    """Do what `sweep run` does, and log each acknowledged result."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    scheduler = partial(
        RayScheduler,
        address=address,
        device=Device.CUDA,
        root=folder / "runs",
        gpus_per_node=int(spec.gpus_per_node),
    )
    try:
        with WitnessedStore.seen_by(Log(folder / "seen.jsonl"), _url(folder)) as store:
            run_sweep(
                spec,
                store=store,
                open_scheduler=lambda: WitnessedScheduler(scheduler(), store.log),
                code=Fingerprint(orchestrator_version="benchmark"),
                hardware=lambda _: DEVICES[spec.device],
                clock=time.monotonic,
                run_root=folder.joinpath,
            )
    except SweepError as exc:
        logging.error("%s", exc)
        return exc.exit_code
    return 0


class Study:
    """A cluster and its orchestrators, which run one sweep one after the other."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._chance = random.Random(arguments.seed)
        self.log = Log(folder / "seen.jsonl")
        self._node = NODE | {
            "num_cpus": arguments.gpus_per_node,
            "num_gpus": arguments.gpus_per_node,
        }
        began = time.monotonic()
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        self._workers = [
            self._cluster.add_node(wait=False, **self._node) for _ in range(arguments.nodes)
        ]
        self._cluster.wait_for_nodes(timeout=300)
        self.cluster_seconds = time.monotonic() - began
        self.killed = {"orchestrator": 0, "node": 0}
        self.calls = 0
        # Ours below raylets: process id -> start time.
        self._processes: dict[int, int] = {}
        self.least_available_bytes = _available_bytes()
        self.slowest_takeover_seconds = 0.0

    def run(self, num_trials: int) -> float:
        """Run the sweep to its end, and return the seconds."""
        victims = ["orchestrator"] * self._arguments.kills + ["node"] * self._arguments.node_kills
        self._chance.shuffle(victims)
        moments = sorted(self._chance.uniform(*KILLED_BETWEEN) * num_trials for _ in victims)
        began, killed_at = time.monotonic(), None
        orchestrator = self._orchestrator()
        try:
            while time.monotonic() - began < LONGEST_SECONDS:
                code = orchestrator.poll()
                if code == 0:
                    return time.monotonic() - began
                if code is not None and code != ClusterUnavailable.exit_code and killed_at is None:
                    raise RuntimeError(
                        f"the orchestrator ended with {code}; see {self._folder}/orchestrator.txt"
                    )
                if code is not None:
                    orchestrator = self._orchestrator()
                self._note_processes()
                launches, ends = self._counts()
                if killed_at is not None and launches > killed_at[1]:
                    self.slowest_takeover_seconds = max(
                        self.slowest_takeover_seconds, time.monotonic() - killed_at[0]
                    )
                    killed_at = None
                if killed_at is None and moments and ends >= moments[0]:
                    moments.pop(0)
                    victim = victims.pop(0)
                    self.killed[victim] += 1
                    if victim == "node":
                        self._lose_a_node()
                    else:
                        orchestrator.kill()
                        orchestrator.wait()
                        killed_at = time.monotonic(), self._counts()[0]
                time.sleep(POLL_SECONDS)
        finally:
            orchestrator.kill()
            orchestrator.wait()
        raise RuntimeError(f"the sweep had not ended after {LONGEST_SECONDS:.0f} s")

    def num_left(self) -> int:
        """Processes of agents and ranks that outlive the last orchestrator for too long."""
        until = time.monotonic() + SURVIVOR_SECONDS
        while (left := self._alive()) and time.monotonic() < until:
            time.sleep(0.1)
        return len(left)

    def close(self) -> None:
        self._cluster.shutdown()

    def _orchestrator(self) -> subprocess.Popen[bytes]:
        self.calls += 1
        arguments = self._arguments
        command = [
            sys.executable,
            "-m",
            "benchmarks.ray_scale",
            "--orchestrate",
            self._cluster.address,
            "--folder",
            str(self._folder),
        ]
        for name in ("nodes", "gpus_per_node", "trials_per_cell"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        log = (self._folder / "orchestrator.txt").open("ab")
        return subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=log)

    def _lose_a_node(self) -> None:
        lost = self._chance.choice(self._workers)
        self._workers.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._workers.append(self._cluster.add_node(wait=False, **self._node))

    def _counts(self) -> tuple[int, int]:
        """Launches and acknowledged ends so far."""
        if not self.log.path.exists():
            return 0, 0
        text = self.log.path.read_text()
        launches = text.count(f'["{Seen.LAUNCHED}"')
        return launches, text.count("\n") - launches

    def _note_processes(self) -> None:
        self.least_available_bytes = min(self.least_available_bytes, _available_bytes())
        for pid in self._ours():
            if pid not in self._processes and (started := start_time(pid)) is not None:
                self._processes[pid] = started

    def _ours(self) -> Iterator[int]:
        """Agents and their descendants."""
        for agent in descendants(os.getpid()):
            if _command(agent).startswith("ray::NodeAgent"):
                yield from (agent, *descendants(agent))

    def _alive(self) -> list[int]:
        return [
            pid for pid, started in self._processes.items() if start_time(pid) == started
        ] + list(self._ours())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _available_bytes() -> int:
    (line,) = (
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    return int(line.split()[1]) * 1024


def _cpu_seconds() -> float:
    """CPU time of the machine since it booted."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/sweep.sqlite"


def trials_per_second(ends: list[float]) -> float:
    first, last = (int(share * (len(ends) - 1)) for share in MIDDLE)
    return (last - first) / (ends[last] - ends[first])


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="sweep-scale-") as made:
        yield Path(made)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    spec = study(arguments)
    num_trials = len(spec.cells()) * arguments.trials_per_cell
    available = _available_bytes()
    work = Study(folder, arguments)
    try:
        cpu = _cpu_seconds()
        seconds = work.run(num_trials)
        cpu = _cpu_seconds() - cpu
        leaked = work.num_left()
    finally:
        work.close()
    entries = work.log.entries()
    launched = len({entry.trial_id for entry in entries})
    with WitnessedStore.seen_by(work.log, _url(folder)) as store:
        pruned = sum(
            trial.state is TrialState.PRUNED
            for trial in store.trials(store.sweep_named(spec.name).id)
        )
        verdict = judge(store, spec.name, entries, num_trials=launched + pruned)
        reserved = store.reserved(store.sweep_named(spec.name).id).total
    ends = sorted(entry.at for entry in entries if entry.seen is not Seen.LAUNCHED)
    return {
        "num_nodes": arguments.nodes,
        "gpus_per_node": arguments.gpus_per_node,
        "num_gpus": arguments.nodes * arguments.gpus_per_node,
        "num_cells": len(spec.cells()),
        "num_trials": launched,
        # Not launched, because smaller ones had run out of memory.
        "num_pruned": pruned,
        "num_attempts": sum(entry.seen is Seen.LAUNCHED for entry in entries),
        "seed": arguments.seed,
        "killed": work.killed,
        "orchestrators": work.calls,
        "slowest_takeover_seconds": round(work.slowest_takeover_seconds, 1),
        "acknowledged": verdict.acknowledged,
        "lost": len(verdict.lost),
        "duplicated": len(verdict.duplicated),
        "stuck": len(verdict.stuck),
        "broken": len(verdict.broken),
        "complaints": verdict.complaints[:20],
        "max_attempts": verdict.max_attempts,
        "leaked_processes": leaked,
        "cluster_seconds": round(work.cluster_seconds, 1),
        "seconds": round(seconds, 1),
        "trials_per_second": round(trials_per_second(ends), 2),
        "cpu_seconds": round(cpu, 1),
        "memory_bytes": available - work.least_available_bytes,
        "held_gpu_seconds": {name: round(getattr(reserved, name), 1) for name in reserved.parts},
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=32)
    parser.add_argument("--trials-per-cell", type=int, default=153)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--node-kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="keeps all files; default: a temporary folder, removed"
    )
    parser.add_argument("--orchestrate", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.orchestrate is not None:
        return orchestrate(arguments.orchestrate, arguments.folder, study(arguments))
    machine = describe_machine()
    with _folder(arguments.folder) as folder:
        found = measure(arguments, folder)
    print(json.dumps(found, indent=1))
    write_result(arguments.out, benchmark="ray_scale", machine=machine, result=found)
    wrong = ("lost", "duplicated", "stuck", "broken", "leaked_processes")
    return int(any(found[kind] for kind in wrong))


if __name__ == "__main__":
    raise SystemExit(main())

"""Kills on a real Ray cluster: of orchestrators, agents, ranks, raylets, and at last the head.

A program, since a process starts one cluster at a time: python -m tests.faults.ray_kills URL FOLDER
SEED KILLS|poison|rpc SECONDS
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from orchestrator.cluster.ray.local import lean_ray
from orchestrator.core.errors import ClusterUnavailable
from orchestrator.node.processes import descendants, kill, start_time
from tests.faults.campaign import SURVIVOR_SECONDS, Outcome
from tests.faults.history import Log, Seen, judge
from tests.faults.witness import WitnessedStore

NAME = "on-ray"
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000}
VICTIMS = {"orchestrator": 3, "agent": 4, "rank": 5, "raylet": 2}
# Promised: by then an orchestrator reports that its cluster is gone.
HEAD_SECONDS = 60.0
START_SECONDS = 90.0
NUM_TRIALS = 40
LONGEST_WAIT_SECONDS = 1.5
POISONED = 5  # a trial among others
MOST_CALLS = 10
# Without an end or a restarted node for so long, the call hangs.
MOST_CALL_SECONDS = START_SECONDS + 120
# For all calls together: an orchestrator waits two minutes for an agent.
RPC_SECONDS = 600.0
POISON_SECONDS = 300.0  # for all other trials
LAST_SECONDS = 600.0  # for an undisturbed last orchestrator
# Read by Ray's processes when they start: of so many calls in a hundred the request, or the answer,
# is lost; and one kind is late.
_LOST = {"num_failures": -1, "req_failure_prob": 3, "resp_failure_prob": 3}
RPC_FAULTS = {
    "RAY_testing_rpc_failure": json.dumps(
        {
            "CoreWorkerService.grpc_client.PushTask": _LOST,
            "NodeManagerService.grpc_client.RequestWorkerLease": _LOST,
            "NodeManagerService.grpc_client.PrepareBundleResources": _LOST,
            "NodeManagerService.grpc_client.CommitBundleResources": _LOST,
            "ray::rpc::ActorInfoGcsService.grpc_client.CreateActor": _LOST,
        }
    ),
    "RAY_testing_asio_delay_us": (
        "NodeManagerService.grpc_server.PrepareBundleResources=1000:300000"
    ),
}


class RayKills:
    """One cluster, whose head lives until the end."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._url, self._folder, self._chance = url, folder, random.Random(seed)
        self._log = Log(folder / "seen.jsonl")
        self._out = Outcome(campaign="ray", seed=seed)
        self._time_scale = 30.0
        self._is_over = False  # ended well: nothing to kill
        self._seen: dict[int, int] = {}
        self._begin_cluster()

    def run(self, *, kills: int, seconds: float) -> Outcome:
        began = time.monotonic()
        while (
            not self._is_over
            and self._out.kills < kills
            and time.monotonic() - began < seconds
            and not self._out.complaints
        ):
            self._kill_repeatedly(kills, until=began + seconds)
        self._out.cut_short = (
            self._out.kills < kills and not self._is_over and not self._out.complaints
        )
        self._lose_the_head()
        self._finish(self._undisturbed())
        self._out.seconds = round(time.monotonic() - began, 1)
        return self._out

    def run_poison(self) -> Outcome:
        """One trial kills its node in each run: it stops after two, all others are measured."""
        began = time.monotonic()
        self._out.campaign, self._time_scale = (
            "ray-poison",
            300.0,
        )  # the trial outlives its node
        with self._orchestrator() as orchestrator:
            for attempt in (1, 2, 3):
                if not self._await_attempt(orchestrator, POISONED, attempt):
                    break
                worker = self._worker_of(POISONED, attempt)
                self._look(self._agents())
                self._lose_a_node(worker)
                self._out.strike("raylet")
            if code_within(POISON_SECONDS, orchestrator) is None:
                self._out.complaints.append(
                    f"an orchestrator with a poison trial went on for {POISON_SECONDS:.0f} s"
                )
        self._finish(self._undisturbed())
        if self._out.kills != 2:
            self._out.complaints.append(
                f"the poison trial took {self._out.kills} nodes down, not 2"
            )
        self._out.seconds = round(time.monotonic() - began, 1)
        return self._out

    def run_rpc(self) -> Outcome:
        """Messages of Ray are lost and late (`RPC_FAULTS`): the sweep ends, after some calls."""
        began = time.monotonic()
        self._out.campaign = "ray-rpc"
        for _ in range(MOST_CALLS):
            code = self._through(began + RPC_SECONDS - time.monotonic())
            if code is None:
                self._out.complaints.append(
                    f"an orchestrator whose messages are lost hung for {MOST_CALL_SECONDS:.0f} "
                    f"s, or all of them took {RPC_SECONDS:.0f} s"
                )
            if code in (None, 0):
                break
            self._out.strike("call")
        self._finish(self._through(LAST_SECONDS))
        self._out.seconds = round(time.monotonic() - began, 1)
        return self._out

    def _through(self, seconds: float) -> int | None:
        """An orchestrator's exit code; None if it hangs or goes on.

        If no agent came, Ray has lost count of a node's slots for good: start that node again.
        """
        moved_at = time.monotonic()
        until = moved_at + seconds
        with self._orchestrator() as orchestrator:
            late, num_entries = self._num_late(), 0
            while (code := code_within(1.0, orchestrator)) is None and time.monotonic() < min(
                until, moved_at + MOST_CALL_SECONDS
            ):
                if len(self._log.entries()) > num_entries:
                    moved_at, num_entries = time.monotonic(), len(self._log.entries())
                if self._num_late() > late:
                    moved_at, late = time.monotonic(), self._num_late()
                    self._look(self._agents())
                    for worker in list(self._workers):
                        self._lose_a_node(worker)
                        self._out.strike("raylet")
        return code

    def _undisturbed(self) -> int | None:
        with self._orchestrator() as orchestrator:
            return code_within(LAST_SECONDS, orchestrator)

    def _num_late(self) -> int:
        return (
            (self._folder / "orchestrator.txt")
            .read_text(errors="replace")
            .count("launch_failed: no agent on ")
        )

    def _await_attempt(
        self, orchestrator: subprocess.Popen[bytes], trial_id: int, attempt: int
    ) -> bool:
        """False: the orchestrator has ended without it."""
        while orchestrator.poll() is None:
            if any(
                (e.seen, e.trial_id, e.attempt) == (Seen.LAUNCHED, trial_id, attempt)
                for e in self._log.entries()
            ):
                return True
            time.sleep(0.05)
        return False

    def _worker_of(self, trial_id: int, attempt: int) -> Any:
        """The node below whose raylet a launcher writes the attempt's logs."""
        folder = f"/trial-{trial_id}/attempt-{attempt}/"
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            for worker in self._workers:
                below = [
                    pid
                    for process in worker.all_processes["raylet"]
                    for pid in descendants(process.process.pid)
                ]
                if any(folder in path for pid in below for path in _open_files(pid)):
                    return worker
            time.sleep(0.05)
        raise AssertionError(f"{folder} is written nowhere")

    def _begin_cluster(self) -> None:
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self._cluster.add_node(**NODE) for _ in range(2)]
        self._cluster.wait_for_nodes()

    def _orchestrator(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        what = [self._cluster.address, self._url, str(self._folder), str(self._time_scale)]
        return running(
            [sys.executable, "-m", "tests.faults.ray_orchestrator", *what],
            self._folder / "orchestrator.txt",
        )

    def _kill_repeatedly(self, kills: int, *, until: float) -> None:
        began = time.monotonic()
        with self._orchestrator() as orchestrator:
            if not self._await_launch(orchestrator, START_SECONDS):
                self._out.complaints.append(
                    f"an orchestrator launched nothing within {START_SECONDS:.0f} s"
                )
                return
            self._out.slowest_takeover_seconds = max(
                self._out.slowest_takeover_seconds, round(time.monotonic() - began, 2)
            )
            while self._out.kills < kills and time.monotonic() < until:
                time.sleep(self._chance.uniform(0.0, LONGEST_WAIT_SECONDS))
                if orchestrator.poll() is not None:
                    if orchestrator.returncode not in (0, ClusterUnavailable.exit_code):
                        self._out.complaints.append(
                            f"an orchestrator ended with {orchestrator.returncode}"
                        )
                    self._is_over = orchestrator.returncode == 0
                    return
                (victim,) = self._chance.choices(list(VICTIMS), list(VICTIMS.values()))
                if self._strike(victim, orchestrator) and victim == "orchestrator":
                    return

    def _strike(self, victim: str, orchestrator: subprocess.Popen[bytes]) -> bool:
        agents = self._agents()
        self._look(agents)
        match victim:
            case "orchestrator":
                orchestrator.kill()
            case "raylet":
                self._lose_a_node(self._chance.choice(self._workers))
            case "agent" | "rank":
                pids = (
                    agents
                    if victim == "agent"
                    else [pid for agent in agents for pid in descendants(agent)[3:]]
                )  # below wardens and server
                if not pids:
                    return False
                kill(self._chance.choice(pids))
        self._out.strike(victim)
        return True

    def _lose_a_node(self, lost: Any) -> None:
        self._workers.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._workers.append(self._cluster.add_node(**NODE))

    def _lose_the_head(self) -> None:
        """Kill the head: the orchestrator reports it in time, and loses nothing."""
        with self._orchestrator() as orchestrator:
            self._await_launch(orchestrator, START_SECONDS)
            if orchestrator.poll() is None:
                began = time.monotonic()
                self._look(self._agents())
                self._cluster.head_node.kill_gcs_server(check_alive=False)
                self._out.strike("head")
                code = code_within(HEAD_SECONDS, orchestrator)
                if code not in (0, ClusterUnavailable.exit_code):
                    said = f"ended with {code}" if code is not None else "went on"
                    self._out.complaints.append(
                        f"an orchestrator without a head {said}, "
                        f"{time.monotonic() - began:.0f} s later"
                    )
        self._cluster.shutdown()
        self._begin_cluster()

    def _finish(self, code: int | None) -> None:
        """`code`: what an orchestrator ended with that was to measure all that was left."""
        if code != 0:
            said = f"ended with {code}" if code is not None else f"went on for {LAST_SECONDS:.0f} s"
            self._out.complaints.append(f"the last orchestrator {said}")
        self._cluster.shutdown()
        self._out.looks += 1
        self._out.leaked_processes = len(self._survivors())
        with WitnessedStore.seen_by(self._log, self._url) as store:
            verdict = judge(store, NAME, self._log.entries(), num_trials=NUM_TRIALS)
        self._out.acknowledged, self._out.max_attempts = verdict.acknowledged, verdict.max_attempts
        for kind in ("lost", "duplicated", "stuck", "broken"):
            setattr(self._out, kind, len(getattr(verdict, kind)))
        self._out.complaints += verdict.complaints

    def _await_launch(self, orchestrator: subprocess.Popen[bytes], patience_seconds: float) -> bool:
        before, until = self._num_launches(), time.monotonic() + patience_seconds
        while self._num_launches() == before and orchestrator.poll() is None:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def _num_launches(self) -> int:
        return sum(entry.seen is Seen.LAUNCHED for entry in self._log.entries())

    def _agents(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if "NodeAgent" in _command(pid)]

    def _look(self, agents: list[int]) -> None:
        """Remember who runs below agents."""
        for pid in (pid for agent in agents for pid in (agent, *descendants(agent))):
            if (started := start_time(pid)) is not None:
                self._seen[pid] = started

    def _survivors(self) -> list[int]:
        deadline = time.monotonic() + SURVIVOR_SECONDS
        while alive := [pid for pid, started in self._seen.items() if start_time(pid) == started]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return alive


@contextmanager
def running(command: Sequence[str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards, whatever happened; what it says is added to a file."""
    with said.open("ab") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def code_within(seconds: float, process: subprocess.Popen[bytes]) -> int | None:
    """What a process ends with. None: it goes on."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _command(pid: int) -> str:
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def _open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(str(link.readlink()))
    return found


def main() -> int:
    url, folder, seed, kills, seconds = sys.argv[1:6]
    if kills == "rpc":
        os.environ |= RPC_FAULTS
    campaign = RayKills(url, Path(folder), int(seed))
    match kills:
        case "poison":
            out = campaign.run_poison()
        case "rpc":
            out = campaign.run_rpc()
        case _:
            out = campaign.run(kills=int(kills), seconds=float(seconds))
    print("OUT " + json.dumps(out.as_json()))
    return 0 if out.is_clean else 1


if __name__ == "__main__":
    with lean_ray():
        raise SystemExit(main())

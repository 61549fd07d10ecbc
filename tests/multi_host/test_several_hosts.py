"""Gangs over several hosts: ranks meet, and one host is cut off midway.

The hosts share no writable file system, and only the head reaches the store, a PostgreSQL. As on
many machines, a host's own name resolves to loopback, and each host has a container bridge with the
same address.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.acceptance.command import CommandHere, write_sweep
from tests.multi_host.hosts import Host
from tests.multi_host.ray_hosts import RayHosts

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.timeout(600)]

NODE_LOSS_SECONDS = 30.0  # what this project promises
# For a host that is cut off to end its ranks, which it does after HeadWatch.CUT_SECONDS = 30.
CLEAN_SECONDS = 60.0
OF_OURS = ("orchestrator.node.rank_server", "NodeAgent")
SERVER_PROCESSES = 3  # wardens and rank server


@dataclass
class Told:
    """Results of a sweep with gangs over two of the three hosts, one of which is cut off."""

    victim: str = ""
    seen_after_seconds: float = 0.0
    clean_after_seconds: float = 0.0
    exit_code: int | None = None
    answer: Any = None  # what `sweep run --json` printed
    remarks: str = ""
    attempts: list[Any] = field(default_factory=list)
    files: dict[str, list[str]] = field(default_factory=dict)  # under SWEEP_HOME, by host
    left: dict[str, list[int]] = field(default_factory=dict)  # our processes, by host


@pytest.fixture(scope="module")
def told(three_hosts: RayHosts, store: str) -> Told:
    head, told = three_hosts.head, Told()
    _write(head.folder)
    environment = {"SWEEP_DB": store, "NCCL_ALGO": "Ring"}
    running = three_hosts.begin(
        "run", "span.yaml", "--ray-address", "auto", "--json", env=environment
    )
    with psycopg.connect(store, autocommit=True) as asked:  # a new connection costs a process
        _until(lambda: _happened(asked, "gang_placed"), running)
        victim = _one_to_cut(three_hosts, asked)
        told.victim = victim.name
        _until(
            lambda: len(victim.processes("orchestrator.node.rank_server")) > SERVER_PROCESSES,
            running,
        )
        three_hosts.network.cut(victim)
        cut_at = time.monotonic()
        _until(lambda: _happened(asked, "requeued"), running)
        told.seen_after_seconds = time.monotonic() - cut_at
    with ThreadPoolExecutor(1) as pool:
        cleaned = pool.submit(_clean_after_seconds, victim, cut_at)  # meanwhile the sweep goes on
        out, told.remarks = running.communicate(timeout=300)
        told.clean_after_seconds = cleaned.result()
    told.exit_code, told.answer = running.returncode, json.loads(out)
    told.attempts = CommandHere(head.folder, store).json("show", "1")["attempts"]
    told.left = {host.name: _still_there(host) for host in three_hosts.network.hosts}
    told.files = {
        host.name: [path.name for path in (host.folder / ".sweep").rglob("*")]
        for host in three_hosts.network.hosts
    }
    return told


@pytest.fixture(scope="module")
def store(postgresql_server: str) -> str:
    """A database of its own, reached over a socket in a folder that only the head sees."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE hosts")
    return postgresql_server.replace("/postgres?", "/hosts?")


def test_the_environment_of_the_ranks_is_kept_with_the_interface_that_was_chosen(
    told: Told,
) -> None:
    attempt = told.attempts[-1]
    assert attempt["environment"] == {
        "GLOO_SOCKET_IFNAME": "fabric0",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "=fabric0",
    }
    # Only what was asked for, not what was selected.
    assert attempt["fingerprint"]["settings"] == {"NCCL_ALGO": "Ring"}


def test_a_host_that_is_cut_off_is_seen_in_time_and_its_trial_waits(told: Told) -> None:
    first = told.attempts[0]
    assert (first["state"], first["failure"]["kind"], first["failure"]["node"]) == (
        "requeued",
        "node_lost",
        told.victim,
    )
    assert told.seen_after_seconds < NODE_LOSS_SECONDS


def test_ranks_on_the_hosts_that_are_left_meet_and_measure(told: Told) -> None:
    last = told.attempts[-1]
    assert last["state"] == "measured", last.get("failure")
    assert sorted(last["nodes"]) == sorted({"head", "worker-1", "worker-2"} - {told.victim})
    assert told.exit_code == 0, told.remarks


def test_what_ray_says_of_a_dead_node_stays_out_of_the_answer(told: Told) -> None:
    assert [row["num_gpus"] for row in told.answer["best"]] == [2]


def test_nothing_of_the_sweep_is_left_on_any_host_not_on_the_one_that_was_cut_off_either(
    told: Told,
) -> None:
    assert told.left == {"head": [], "worker-1": [], "worker-2": []}
    assert told.clean_after_seconds < CLEAN_SECONDS


def test_each_host_has_the_files_of_its_own_ranks_and_no_store(told: Told) -> None:
    for name, files in told.files.items():
        assert any(file.startswith("log-") for file in files), name
        assert not any("sqlite" in file for file in files), name
    results = {
        name: sum(file.startswith("result-") for file in files)
        for name, files in told.files.items()
    }
    # Each rank's result is only on its own host.
    assert dict.fromkeys(told.attempts[-1]["nodes"], 1) | {told.victim: 0} == results


def _write(folder: Path) -> None:
    write_sweep(
        folder,
        "span",
        gpus_per_node=1,
        sequence_length=64,
        global_batch_size=8,
        precision="fp32",
        axes={"micro_batch_size": [2], "recompute": ["none"], "zero_stage": [0]},
        measurement={"warmup_steps": 2, "min_steps": 40, "max_steps": 40, "precision": 0.5},
        workload="llama",
    )


def _happened(asked: psycopg.Connection, event: str) -> list[Any]:
    """The nodes of the attempts to which it happened, where they are known."""
    statement = """
        SELECT attempt.nodes FROM event JOIN attempt
            ON attempt.trial_id = event.trial_id AND attempt.number = event.attempt
        WHERE event.event = %s AND attempt.nodes IS NOT NULL
    """
    try:
        return asked.execute(statement, [event]).fetchall()
    except psycopg.errors.UndefinedTable:  # not created yet
        return []


def _one_to_cut(cluster: RayHosts, asked: psycopg.Connection) -> Host:
    ((nodes,),) = _happened(asked, "gang_placed")
    return next(host for host in cluster.workers if host.name in nodes)


def _until(
    condition: Callable[[], object], running: subprocess.Popen[str], *, seconds: float = 180.0
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
        time.sleep(0.1)


def _clean_after_seconds(host: Host, since: float) -> float:
    """Seconds from then until nothing of ours runs there, or until it should have ended."""
    while _ours(host) and time.monotonic() - since < CLEAN_SECONDS:
        time.sleep(0.2)
    return time.monotonic() - since


def _still_there(host: Host) -> list[int]:
    """Processes of ours that do not end. `make chaos` tests how soon they end."""
    until = time.monotonic() + CLEAN_SECONDS
    while (left := _ours(host)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _ours(host: Host) -> list[int]:
    return [pid for text in OF_OURS for pid in host.processes(text)]

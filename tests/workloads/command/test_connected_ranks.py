"""Processes that train together, by their libraries and their connections."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.node.launcher import NodeLauncher
from tests.workloads.command.running import run
from workloads.command import connected_ranks
from workloads.command.connected_ranks import train_together

Body = Callable[[int], object]


@pytest.fixture
def fork() -> Iterator[Callable[[Body], int]]:
    """Starts a child that runs a function, says so through a pipe, and waits for its end."""
    pids: list[int] = []

    def start(body: Body) -> int:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                kept = body(writer)
                os.write(writer, b".")
                signal.pause()
                del kept
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has this library."""
    monkeypatch.setattr(connected_ranks, "_LIBRARY", b"/libc")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_two_children_with_a_connection_train_together(
    fork: Callable[[Body], int], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except (OSError, ValueError):
        pytest.skip("this machine has no IPv6")
    port = server.getsockname()[1]
    client_host = "127.0.0.1" if host == "::" else host

    def connect(_: int) -> object:
        server.close()
        return socket.create_connection((client_host, port))

    one = fork(connect)
    two = fork(lambda _: server.accept())
    server.close()
    assert train_together([os.getpid(), one, two])
    assert not train_together([os.getpid(), one])
    monkeypatch.setattr(connected_ranks, "_LIBRARY", b"/no-such-library")
    assert not train_together([os.getpid(), one, two])


def test_workers_that_have_the_sockets_of_their_parent_do_not(fork: Callable[[Body], int]) -> None:
    """A rank has both ends of its connection to the store that it serves itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        workers = [fork(lambda _: None) for _ in range(2)]
        assert not train_together([os.getpid(), *workers])
        client.close()
        accepted.close()


def test_processes_that_are_gone_do_not() -> None:
    assert not train_together([])
    assert not train_together([2**22 + 1, 2**22 + 2])


SPAWNED = """
    import json, os, sys, time
    import torch.distributed, torch.multiprocessing

    def train(rank, folder):
        store = "file://" + folder + "/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        for step in range(200):
            torch.distributed.all_reduce(torch.ones(1))
            time.sleep(0.1)
            if rank == 0:
                with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                    print(json.dumps({"step_seconds": 0.1 + step / 1e4}), file=file)

    torch.multiprocessing.start_processes(
        train, (os.environ["SWEEP_RUN_DIR"],), nprocs=2, start_method="fork"
    )
"""


def test_ranks_that_a_program_spawns_are_refused_though_one_alone_writes(
    launcher: NodeLauncher,
) -> None:
    """Their environment is that of the program, and only one of them writes lines."""
    report = run(launcher, SPAWNED, world_size=1)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.CONFIG_REJECTED, report.failure
    assert "the program starts ranks of its own" in report.failure.message
    assert "set workload.options.processes: per_node" in report.failure.message

"""`sweep ui` as a process: its address, its end, and what it refuses to begin with."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cli.ui import command as ui_command
from orchestrator.cli.ui.hosts import LOOPBACK
from tests.acceptance.command import Command, Running
from tests.cli.cli_store import fill
from tests.cli.ui.served import Visitor
from tests.listening import listeners

Sweep = Callable[..., tuple[str, str]]
START_SECONDS = 60.0


@pytest.fixture
def command(tmp_path: Path, sqlite_url: str) -> Command:
    with Store.open(sqlite_url) as store:
        fill(store, tmp_path)
    return Command(tmp_path, sqlite_url)


@contextmanager
def running(command: Command, *options: str) -> Iterator[tuple[Running, str]]:
    """`sweep ui` with the address that it prints."""
    found = command.start("ui", *options)
    timer = threading.Timer(START_SECONDS, found.process.kill)
    timer.start()
    try:
        assert found.process.stdout is not None
        yield found, found.process.stdout.readline().strip()
    finally:
        timer.cancel()
        found.kill()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
    ids=["Ctrl-C", "SIGTERM", "closed terminal"],
)
def test_a_signal_ends_it_at_once_with_its_code_beside_open_pages(
    command: Command, number: signal.Signals, code: int, said: str
) -> None:
    with running(command) as (process, address):
        visitor = Visitor(int(address.rstrip("/").rpartition(":")[2]))
        with visitor.events() as events, visitor.events() as others:
            next(events), next(others)
            process.look()
            began = time.monotonic()
            process.interrupt(number)
            ended, out, err = process.end(timeout=20)
        assert time.monotonic() - began < 5.0
        assert (ended, out) == (code, "")
        assert err.strip() == said
        assert process.survivors(seconds=5) == []


def test_it_listens_on_loopback_alone(command: Command) -> None:
    with running(command) as (process, address):
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)
        assert found is not None
        assert listeners([process.process.pid]) == {(LOOPBACK, int(found[1]))}
        assert Visitor(int(found[1])).get("/").status == 200


def test_another_host_has_a_token_in_its_address(command: Command) -> None:
    with running(command, "--host", "0.0.0.0") as (_, address):
        found = re.fullmatch(r"http://[^/:]+:(\d+)/\?token=([\w-]{43})", address)
        assert found is not None
        visitor = Visitor(int(found[1]))
        assert visitor.get("/").status == 401
        assert visitor.get(f"/?token={found[2]}").status == 303
        assert visitor.get("/").status == 200
    with running(command, "--token") as (_, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)


def test_a_port_in_use_is_one_clear_line(sweep: Sweep, store: Store, tmp_path: Path) -> None:
    fill(store, tmp_path)
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        _, err = sweep("ui", "--port", str(port), code=2)
    assert f"cannot listen on 127.0.0.1 port {port}: address already in use" in err
    assert err.count("\n") == 1
    _, err = sweep("ui", "--host", "203.0.113.7", code=2)
    assert "cannot listen on 203.0.113.7" in err


def test_a_sweep_that_is_not_there_is_one_clear_line(
    sweep: Sweep, store: Store, tmp_path: Path
) -> None:
    fill(store, tmp_path)
    _, err = sweep("ui", "nothing", code=2)
    assert "no sweep is named 'nothing'" in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_fix(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(ui_command, "find_spec", lambda name: None if name == package else True)
    _, err = sweep("ui", code=2)
    assert f"needs {package}" in err and "pip install '.[ui]' in the cloned folder" in err
    assert "sweep status --watch" in err

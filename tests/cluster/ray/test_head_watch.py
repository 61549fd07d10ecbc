"""A node that checks the head of its cluster, here a real socket that stops answering."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from orchestrator.cluster.ray import head_watch
from orchestrator.cluster.ray.head_watch import HeadWatch, why_unreachable

PATIENCE_SECONDS = 20.0


def listening() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"127.0.0.1:{server.getsockname()[1]}"


def test_a_head_that_answers_no_more_is_told_after_more_than_one_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, address = listening()
    ended: list[float] = []
    cut = threading.Event()
    answered: list[float] = []

    def check(address: str, *, timeout_seconds: float) -> str | None:
        found = why_unreachable(address, timeout_seconds=timeout_seconds)
        if found is None:
            answered.append(time.monotonic())
        return found

    monkeypatch.setattr(head_watch, "why_unreachable", check)

    def wait() -> None:
        assert watch.wait_until_cut()
        ended.append(time.monotonic())
        cut.set()

    watch = HeadWatch(address, cut_seconds=0.3, check_seconds=0.05)
    threading.Thread(target=wait, daemon=True).start()
    assert not cut.wait(1.0)  # it answers
    server.close()
    assert cut.wait(PATIENCE_SECONDS)
    assert ended[0] - answered[-1] > 0.29, "one failed check is not enough"


def test_nothing_is_ended_by_a_watch_that_was_stopped() -> None:
    server, address = listening()
    watch = HeadWatch(address, cut_seconds=0.1, check_seconds=0.05)
    server.close()
    watch.stop()
    assert not watch.wait_until_cut()


def test_an_address_where_nobody_answers_is_told_with_the_reason() -> None:
    server, address = listening()
    assert why_unreachable(address, timeout_seconds=5.0) is None
    server.close()
    assert why_unreachable(address, timeout_seconds=5.0) == "Connection refused"
    assert why_unreachable("[::1]:1", timeout_seconds=5.0) is not None


@pytest.mark.parametrize("host", ["a..b", "z" * 64])
def test_what_cannot_be_a_name_of_a_host_is_said_so(host: str) -> None:
    assert why_unreachable(f"{host}:1", timeout_seconds=5.0) == "it is no name of a host"

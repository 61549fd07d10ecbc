"""One reading for all: a slow visitor gets the newest state, and a store may go away."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.cli.live.live_store import Reading
from orchestrator.cli.ui import feed as feed_module
from orchestrator.cli.ui.feed import Feed
from orchestrator.core.errors import StoreUnavailable
from orchestrator.report.live_sweep import LiveSweep
from tests.cli.cli_store import fill
from tests.cli.ui.served import served


class Scripted:
    """A store whose sweep gets another name of its state with each `step`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.number = self.num_readings = 0
        self.error: Exception | None = None
        self.is_closed = threading.Event()

    def step(self) -> None:
        status = self._reading.rows.status
        self.number += 1
        row = replace(status.row, holder=None, state=f"state {self.number}")
        self._reading = replace(
            self._reading, rows=replace(self._reading.rows, status=replace(status, row=row))
        )

    def read(self) -> Reading:
        self.num_readings += 1
        if self.error is not None:
            raise self.error
        return self._reading

    def close(self) -> None:
        self.is_closed.set()


@pytest.fixture
def scripted(sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    fill(sqlite_store, tmp_path)
    monkeypatch.setattr(feed_module, "REST_SECONDS", 0.01)
    monkeypatch.setattr(feed_module, "RESTS_PER_READING", 0.0)
    rows = LiveSweep(sqlite_store, "tiny").read(0.0)
    # Without what runs, whose age changes with every second.
    rows = replace(rows, status=replace(rows.status, running=()))
    return Scripted(Reading(rows=rows, progress={}, at=datetime.now(tz=UTC), seconds=0.0))


def run(scripted: Scripted, steps: Callable[[Feed], Awaitable[None]]) -> None:
    async def whole() -> None:
        feed = Feed(scripted)
        feed.start()
        try:
            await asyncio.wait_for(_awaited(steps(feed)), 30)
        finally:
            feed.close()

    asyncio.run(whole())
    assert scripted.is_closed.wait(30)


async def _awaited(what: Awaitable[None]) -> None:
    await what


async def value(stream: Any) -> dict[str, Any]:
    """The next value of a stream."""
    while not (event := await anext(stream)).startswith(b"data: "):
        pass
    assert event.endswith(b"\n\n") and event.count(b"\n") == 2
    found: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return found


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def test_a_visitor_gets_all_then_what_changes(scripted: Scripted) -> None:
    async def steps(feed: Feed) -> None:
        stream = feed.stream(0)
        first = await value(stream)
        assert first["version"] == 1 and "after" not in first and first["tables"]["trials"]
        scripted.step()
        second = await value(stream)
        assert (second["version"], second["after"]) == (2, 1)
        assert "state 1" in second["head"][0][0]
        await stream.aclose()
        assert feed.num_clients == 0

    run(scripted, steps)


def test_a_slow_visitor_gets_the_newest_state_and_nothing_queues(scripted: Scripted) -> None:
    async def steps(feed: Feed) -> None:
        def is_newer(than: int) -> bool:
            return feed.snapshot.state.version > than

        slow, other = feed.stream(0), feed.stream(0)
        await value(slow)
        for number in range(1, 6):
            scripted.step()
            await until(partial(is_newer, number))
        late = await value(slow)
        assert late["version"] == 6 and "after" not in late and "state 5" in late["head"][0][0]
        assert feed.snapshot.whole is feed.snapshot.whole
        # A page that already shows the newest state is told nothing.
        await value(other)
        waiting = asyncio.ensure_future(value(other))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()

    run(scripted, steps)


def test_a_sweep_that_does_not_change_is_read_without_a_word(scripted: Scripted) -> None:
    async def steps(feed: Feed) -> None:
        stream = feed.stream(0)
        await value(stream)
        num = scripted.num_readings
        await until(lambda: scripted.num_readings > num + 5)
        assert feed.snapshot.state.version == 1

    run(scripted, steps)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), ValueError("a bug")])
def test_a_store_that_goes_away_is_said_and_comes_back(
    scripted: Scripted, error: Exception
) -> None:
    async def steps(feed: Feed) -> None:
        stream = feed.stream(0)
        await value(stream)
        scripted.error = error
        trouble = (await value(stream))["trouble"]
        assert trouble in ("no answer", "unexpected ValueError; the terminal of sweep ui names it")
        scripted.error = None
        assert (await value(stream))["trouble"] is None

    run(scripted, steps)


def test_the_end_of_the_server_ends_the_streams(scripted: Scripted) -> None:
    async def steps(feed: Feed) -> None:
        streams = [feed.stream(0) for _ in range(20)]
        ends: list[Coroutine[Any, Any, list[bytes]]] = [_all(stream) for stream in streams]
        ending = asyncio.gather(*ends)
        await until(lambda: feed.num_clients == 20)
        feed.close()
        assert all(len(events) >= 1 for events in await ending)
        assert feed.num_clients == 0

    run(scripted, steps)


def test_without_visitors_the_store_is_read_seldom(scripted: Scripted) -> None:
    async def steps(feed: Feed) -> None:
        await feed.first(30)
        await asyncio.sleep(0.3)
        assert scripted.num_readings <= 2
        stream = feed.stream(0)
        await value(stream)
        await until(lambda: scripted.num_readings > 4)

    run(scripted, steps)


async def _all(stream: Any) -> list[bytes]:
    return [event async for event in stream]


def test_the_end_of_the_server_waits_until_the_store_is_closed(scripted: Scripted) -> None:
    close = scripted.close

    def slow() -> None:
        time.sleep(0.3)
        close()

    scripted.close = slow  # type: ignore[method-assign]
    with served("sqlite://", store=scripted):
        pass
    assert scripted.is_closed.is_set()

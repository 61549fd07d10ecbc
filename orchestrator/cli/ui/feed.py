"""The newest state of the sweep, read by one thread for all visitors, and streamed to them.

However many visitors there are, the store is read once. Each state is written as bytes once. A
visitor who takes a state late gets the newest one then: nothing queues up for anybody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Protocol

from orchestrator.cli.live.live_store import Reading
from orchestrator.core.errors import SweepError
from orchestrator.report.live_page import PageState, changes, page_state, whole

logger = logging.getLogger(__name__)

# A commit is on every page within two seconds.
REST_SECONDS = 0.5
# So a reading with its page takes a tenth of one core at most, unless that would be too late.
RESTS_PER_READING = 10.0
LONGEST_REST_SECONDS = 1.2
# Without visitors it only stays roughly up to date.
UNWATCHED_REST_SECONDS = 5.0
# Shows a visitor, and what lies between, that the connection lives.
KEEP_ALIVE_SECONDS = 15.0
MOST_CLIENTS = 200


class Reads(Protocol):
    """The source of readings: `LiveStore`, or a test's."""

    def read(self) -> Reading: ...

    def close(self) -> None: ...


class FeedState:
    """One state as bytes: all of it, and what changed since the one before."""

    def __init__(self, state: PageState, before: PageState | None, reading: Reading | None) -> None:
        self.state, self.reading = state, reading
        self._before = before

    @cached_property
    def whole(self) -> bytes:
        """The event with all of the state."""
        return _event(whole(self.state))

    @cached_property
    def changes(self) -> bytes:
        """The event for a page that shows the state before."""
        return self.whole if self._before is None else _event(changes(self._before, self.state))


class Feed:
    """Reads the sweep until it is closed. Its methods are for the thread of the event loop."""

    def __init__(self, store: Reads) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_over = threading.Event()
        self._is_wanted = threading.Event()
        self.num_clients = 0
        nothing = page_state(0, None, now=datetime.now(tz=UTC), progress={})
        self.snapshot = FeedState(nothing, None, None)
        self._thread = threading.Thread(target=self._read_on, daemon=True, name="ui reading")

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    async def first(self, seconds: float) -> None:
        """Wait until the store was read once, or did not answer, but not longer than that."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._after(0), seconds)

    def close(self) -> None:
        """End the thread and all streams."""
        self._is_over.set()
        self._is_wanted.set()
        self._changed.set()

    def wait_until_closed(self, seconds: float) -> None:
        """Wait for the thread, which closes the store, but not longer than that."""
        self._thread.join(seconds)

    async def stream(self, known: int) -> AsyncIterator[bytes]:
        """Yield events until the feed is closed. `known`: the version that the page shows."""
        self.num_clients += 1
        self._is_wanted.set()
        try:
            yield b"retry: 1000\n\n"
            while not self._is_over.is_set():
                try:
                    now = await asyncio.wait_for(self._after(known), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": here\n\n"
                    continue
                if now is None:
                    return
                yield now.changes if now.state.version == known + 1 else now.whole
                known = now.state.version
        finally:
            self.num_clients -= 1

    async def _after(self, known: int) -> FeedState | None:
        """Wait for another version; None: the feed is closed."""
        while not self._is_over.is_set():
            if self.snapshot.state.version != known:
                return self.snapshot
            await self._changed.wait()
        return None

    # -- the thread ------------------------------------------------------------------------------

    def _read_on(self) -> None:
        state = self.snapshot.state
        reading: Reading | None = None
        while not self._is_over.is_set():
            began = time.monotonic()
            trouble = None
            try:
                reading = self._store.read()
            except SweepError as exc:
                trouble = str(exc)
            # The page says so, and reading goes on.
            except Exception as exc:  # noqa: BLE001
                logger.error("The sweep could not be read: %s: %s", type(exc).__name__, exc)
                trouble = f"unexpected {type(exc).__name__}; the terminal of sweep ui names it"
            state = self._made(state, reading, trouble)
            rest = max(REST_SECONDS, RESTS_PER_READING * (time.monotonic() - began))
            self._rest(min(rest, LONGEST_REST_SECONDS))
        with suppress(SweepError):
            self._store.close()

    def _made(self, before: PageState, reading: Reading | None, trouble: str | None) -> PageState:
        """Publish the state after a reading, if it is another; return the newest state."""
        now = page_state(
            before.version + 1,
            reading.rows if reading is not None else None,
            now=datetime.now(tz=UTC),
            progress=reading.progress if reading is not None else {},
            trouble=trouble,
        )
        if before.version and now.has_same_content(before):
            return before
        found = FeedState(now, before if before.version else None, reading)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(partial(self._publish, found))
        return now

    def _rest(self, seconds: float) -> None:
        self._is_over.wait(seconds)
        # Cleared before the visitors are counted: a new one sets it afterwards.
        self._is_wanted.clear()
        if not self.num_clients and not self._is_over.is_set():
            self._is_wanted.wait(UNWATCHED_REST_SECONDS - seconds)

    def _publish(self, found: FeedState) -> None:
        self.snapshot = found
        self._changed.set()
        self._changed = asyncio.Event()


def _event(value: object) -> bytes:
    # JSON escapes line breaks, which end an event.
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return f"data: {text}\n\n".encode()

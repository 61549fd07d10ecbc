"""The application of `sweep ui`: its routes behind a filter of requests, and its server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.routing import Router

from orchestrator.cli.live.live_store import LiveStore
from orchestrator.cli.live.sweep_requests import Requests
from orchestrator.cli.ui import (
    calculator_routes,
    live_routes,
    picture_routes,
    request_routes,
    sql_routes,
    trial_routes,
)
from orchestrator.cli.ui.calculator_process import CalculatorProcess
from orchestrator.cli.ui.feed import MOST_CLIENTS, Feed
from orchestrator.cli.ui.picture_routes import Pictures, open_pictures
from orchestrator.cli.ui.request_filter import RequestFilter
from orchestrator.cli.ui.site import Site
from orchestrator.report.pages.report_folder import environment

if TYPE_CHECKING:
    import socket

    from starlette.routing import Route
    from starlette.types import ASGIApp

    from orchestrator.cli.ui.feed import Reads
    from orchestrator.cli.ui.hosts import Hosts
    from orchestrator.cli.ui.sessions import Sessions

# Connections: browsers open several besides their stream.
MOST_CONNECTIONS = 2 * MOST_CLIENTS
# What is under way may end before the server does.
GRACE_SECONDS = 1


def application(
    site: Site, hosts: Hosts, pictures: Pictures, calculator: CalculatorProcess
) -> ASGIApp:
    """The pages of a site behind the filter of requests."""
    routes: list[Route] = [
        *live_routes.routes(site),
        *trial_routes.routes(site),
        *request_routes.routes(site),
        *sql_routes.routes(site),
        *calculator_routes.routes(site, calculator),
        *picture_routes.routes(site, pictures),
    ]
    # A bare router: what a page raises reaches the filter.
    return RequestFilter(Router(routes, redirect_slashes=False), hosts, site.sessions)


class Server(uvicorn.Server):
    """Serves one sweep until a signal comes. Then the streams end at once, and the server too."""

    def __init__(
        self,
        *,
        db: str | None,
        sweep: str,
        hosts: Hosts,
        sessions: Sessions,
        store: Reads | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                self._application,
                interface="asgi3",
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._db, self._sweep, self._hosts, self._sessions = db, sweep, hosts, sessions
        self._reads = store
        self._app: ASGIApp | None = None
        self._feed: Feed | None = None

    async def _application(self, scope, receive, send):  # type: ignore[no-untyped-def]  # ASGI's
        assert self._app is not None
        await self._app(scope, receive, send)

    async def run_on(self, listening: socket.socket) -> None:
        """Serve on a socket that listens."""
        store = LiveStore(self._db, self._sweep)
        feed = self._feed = Feed(self._reads if self._reads is not None else store)
        site = Site(
            db=self._db,
            sweep=self._sweep,
            store=store,
            feed=feed,
            asks=Requests(self._db, self._sweep),
            sessions=self._sessions,
            templates=environment(),
        )
        pictures = open_pictures(site)
        calculator = CalculatorProcess(self._db, self._sweep)
        self._app = application(site, self._hosts, pictures, calculator)
        feed.start()
        ending = asyncio.create_task(self._end_streams())
        try:
            with self._ended_by_hangup():
                await self.serve(sockets=[listening])
        finally:
            ending.cancel()
            feed.close()
            pictures.close()
            await calculator.close()
            # After a signal the process ends without Python's end, so nothing else would remove the
            # copy of a store that the thread reads.
            feed.wait_until_closed(GRACE_SECONDS)

    @contextmanager
    def _ended_by_hangup(self) -> Iterator[None]:
        """Let a closed terminal end the server as uvicorn lets Ctrl-C and SIGTERM."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGHUP)
        # Signals that are ignored already, as by `nohup`, stay ignored.
        if not is_main or before is signal.SIG_IGN:
            yield
            return
        received: list[int] = []

        def receive(number: int, _frame: object) -> None:
            received.append(number)
            self.should_exit = True

        signal.signal(signal.SIGHUP, receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)
        if received:
            signal.raise_signal(signal.SIGHUP)

    async def _end_streams(self) -> None:
        """End the streams once the server is to end: it waits for them."""
        while not self.should_exit:
            await asyncio.sleep(0.1)
        if self._feed is not None:
            self._feed.close()

"""A server of `sweep ui` in a thread of the test, and a visitor without a browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from orchestrator.cli.ui.application import Server
from orchestrator.cli.ui.feed import Reads
from orchestrator.cli.ui.hosts import LOOPBACK, Hosts, hosts_of, listen
from orchestrator.cli.ui.sessions import Sessions

ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Visitor:
    """Asks for pages, and keeps its cookie as a browser does."""

    port: int
    cookie: str | None = None
    csrf: str = ""
    own_headers: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str | None] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send a request. A header of None is left out."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=ANSWER_SECONDS)
        given: dict[str, str | None] = {"Host": self.host, "Cookie": self.cookie}
        if body is not None:
            given["Content-Length"] = str(len(body))
        given |= self.own_headers | dict(headers or {})
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            found = connection.getresponse()
            answer = Answer(
                found.status, {k.lower(): v for k, v in found.getheaders()}, found.read()
            )
        finally:
            connection.close()
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    def get(self, target: str) -> Answer:
        return self.ask("GET", target)

    def enter(self) -> None:
        """Begin a session, and read the CSRF token of its forms."""
        self.get("/")
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.get("/drain").text)
        assert found is not None
        self.csrf = found[1]

    def form(self, target: str, **values: str) -> Answer:
        """Send a form, as a page of the server would."""
        body = urlencode({"csrf": self.csrf, **values}).encode()
        return self.ask("POST", target, self.form_headers(), body)

    def form_headers(self) -> dict[str, str]:
        return {
            "Origin": f"http://{self.host}",
            "Content-Type": "application/x-www-form-urlencoded",
        }

    @contextmanager
    def events(self, after: int = 0) -> Iterator[Iterator[dict[str, Any]]]:
        """The values of the stream of events."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=ANSWER_SECONDS)
        cookie = {"Cookie": self.cookie} if self.cookie else {}
        connection.request("GET", f"/events?after={after}", headers=cookie)
        found = connection.getresponse()
        assert found.status == 200

        def values() -> Iterator[dict[str, Any]]:
            by = time.monotonic() + ANSWER_SECONDS
            while line := found.readline():
                assert time.monotonic() < by, "only signs of life came"
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
                    by = time.monotonic() + ANSWER_SECONDS

        try:
            yield values()
        finally:
            connection.close()


@contextmanager
def served(
    url: str,
    sweep: str = "tiny",
    *,
    token: str | None = None,
    hosts: Hosts | None = None,
    store: Reads | None = None,
) -> Iterator[Visitor]:
    """A server of a sweep, until the block ends."""
    with listen(LOOPBACK, 0) as listening:
        port = listening.getsockname()[1]
        server = Server(
            db=url,
            sweep=sweep,
            hosts=hosts if hosts is not None else hosts_of(LOOPBACK),
            sessions=Sessions(port, token),
            store=store,
        )
        thread = threading.Thread(target=lambda: asyncio.run(server.run_on(listening)))
        thread.start()
        try:
            by = time.monotonic() + ANSWER_SECONDS
            while not server.started:
                assert thread.is_alive() and time.monotonic() < by
                time.sleep(0.01)
            yield Visitor(port)
        finally:
            server.should_exit = True
            thread.join(ANSWER_SECONDS)
            assert not thread.is_alive()

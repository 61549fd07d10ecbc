"""Filters the requests to the pages: refuses bad ones, and gives every answer its safe headers.

What it refuses does not reach a page: unknown methods, other sites' names and requests, visitors
without the token, forms without their CSRF token, and what is too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from orchestrator.cli.ui.parameters import parameters
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.core.errors import SweepError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from orchestrator.cli.ui.hosts import Hosts
    from orchestrator.cli.ui.sessions import Sessions

logger = logging.getLogger(__name__)

MOST_QUERY_BYTES = 4_096
MOST_PATH_BYTES = 300
MOST_HEADER_BYTES = 16_384
MOST_BODY_BYTES = 32_768
BODY_SECONDS = 10.0
FORM = "application/x-www-form-urlencoded"
CSRF = "csrf"
_PAGES = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# Plotly sets styles of its elements, and saves pictures.
_PICTURES = _PAGES.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").replace(
    "img-src 'self' data:", "img-src 'self' data: blob:"
)
PICTURES_PATH = "/pictures/"
_HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # `no-referrer` would make a browser send forms with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
ASK_FOR_TOKEN = (
    "This page needs its token: open the address that `sweep ui` printed, with ?token=... at its"
    " end."
)


class RequestFilter:
    """Middleware: an ASGI application around the pages."""

    def __init__(self, pages: ASGIApp, hosts: Hosts, sessions: Sessions) -> None:
        self._pages, self._hosts, self._sessions = pages, hosts, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._pages(scope, receive, send)
            return
        began = False

        async def send_safely(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._add_headers(scope, MutableHeaders(scope=message))
            await send(message)

        try:
            answer = await self._checked(scope, receive)
            if answer is None:
                await self._pages(scope, receive, send_safely)
                return
        except Refusal as exc:
            answer = PlainTextResponse(
                exc.text + "\n", exc.status, {"Connection": "close", **exc.headers}
            )
        except SweepError as exc:
            answer = PlainTextResponse(f"{exc}\n", 503)
        # The server goes on, and no visitor sees a traceback.
        except Exception as exc:
            logger.error("A page failed: %s: %s", type(exc).__name__, exc)
            logger.debug("Its traceback", exc_info=True)
            answer = PlainTextResponse("This is a bug in sweep ui; its terminal names it.\n", 500)
        if not began:
            await answer(scope, receive, send_safely)

    def _add_headers(self, scope: Scope, headers: MutableHeaders) -> None:
        for name, value in _HEADERS.items():
            headers.setdefault(name, value)
        is_picture = scope["path"].startswith(PICTURES_PATH)
        headers.setdefault("Content-Security-Policy", _PICTURES if is_picture else _PAGES)
        headers.setdefault("Cache-Control", "no-store")

    async def _checked(self, scope: Scope, receive: Receive) -> Response | None:
        """Raise Refusal for a bad request; return an answer, or None for one of the pages."""
        headers, method = Headers(scope=scope), scope["method"]
        if method not in ("GET", "HEAD", "POST"):
            raise Refusal(405, "Only GET, HEAD and POST.", {"Allow": "GET, HEAD, POST"})
        host = _only(headers, "host")
        if not self._hosts.allow(host):
            raise Refusal(400, "This server does not have that name.")
        if sum(len(name) + len(value) for name, value in headers.raw) > MOST_HEADER_BYTES:
            raise Refusal(431, f"The headers have more than {MOST_HEADER_BYTES} bytes.")
        if len(scope["raw_path"]) > MOST_PATH_BYTES:
            raise Refusal(414, "The address is too long.")
        if len(scope["query_string"]) > MOST_QUERY_BYTES:
            raise Refusal(414, f"The address has more than {MOST_QUERY_BYTES} bytes of parameters.")
        _refuse_other_sites(headers, method)
        session = self._sessions.of(headers.get("cookie", ""))
        if self._sessions.token is not None and session is None:
            return self._entered(scope, method)
        scope["session"], scope["new_session"] = session, None
        if method == "POST":
            scope["form"] = await self._form(headers, host, session, receive)
        return None

    def _entered(self, scope: Scope, method: str) -> Response:
        """The answer to a visitor without a session, who has to tell the token."""
        if method == "POST" or scope["path"] != "/" or not scope["query_string"]:
            raise Refusal(401, ASK_FOR_TOKEN)
        told = parameters(scope["query_string"], {"token": 200}).get("token", "")
        if not self._sessions.knows(told):
            raise Refusal(403, "That is not the token. " + ASK_FOR_TOKEN)
        cookie = self._sessions.set_cookie(self._sessions.new())
        # Without the token, so that no screen, history or bookmark shows it.
        return RedirectResponse(".", 303, {"Set-Cookie": cookie})

    async def _form(
        self, headers: Headers, host: str, session: str | None, receive: Receive
    ) -> bytes:
        """The form of a request that changes something, less its CSRF token."""
        origin = _only(headers, "origin", 403)
        if urlsplit(origin).netloc != host:
            raise Refusal(403, "The form comes from another site.")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            raise Refusal(415, f"A form has the type {FORM}.")
        try:
            body = await asyncio.wait_for(_body(headers, receive), BODY_SECONDS)
        except TimeoutError:
            raise Refusal(408, "The form did not arrive in time.") from None
        parts = body.split(b"&")
        told = [part for part in parts if part.startswith(f"{CSRF}=".encode())]
        if session is None or len(told) != 1:
            raise Refusal(403, "The form has no token of this session: reload the page before it.")
        text = told[0].partition(b"=")[2].decode("ascii", "replace")
        if not self._sessions.is_csrf(session, text):
            raise Refusal(403, "The form has no token of this session: reload the page before it.")
        return b"&".join(part for part in parts if part is not told[0])


def _only(headers: Headers, name: str, status: int = 400) -> str:
    """The value of a header that a request has once."""
    values = headers.getlist(name)
    if len(values) != 1:
        raise Refusal(status, f"The request has {'no' if not values else 'two'} {name.title()}.")
    return values[0]


def _refuse_other_sites(headers: Headers, method: str) -> None:
    """Refuse what a browser asks for on behalf of another site, other than to follow a link."""
    where = headers.get("sec-fetch-site", "none")
    follows_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if where not in ("none", "same-origin") and not follows_link:
        raise Refusal(403, "The request comes from another site.")


async def _body(headers: Headers, receive: Receive) -> bytes:
    told = headers.get("content-length", "0")
    if told.isascii() and told.isdigit() and int(told[:12]) > MOST_BODY_BYTES:
        raise Refusal(413, f"A form has at most {MOST_BODY_BYTES} bytes.")
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "The form did not arrive.")
        part: bytes = message.get("body", b"")
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise Refusal(413, f"A form has at most {MOST_BODY_BYTES} bytes.")
        if not message.get("more_body"):
            return body

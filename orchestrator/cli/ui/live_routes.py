"""The live page, its stream of events, and its tables in another order or filtered."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.cli.ui.feed import MOST_CLIENTS
from orchestrator.cli.ui.parameters import SHORT, number
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site, asked
from orchestrator.cli.ui.threads import in_thread
from orchestrator.report.live_page import (
    EMPTY,
    NODE_COLUMNS,
    TITLES,
    PageSection,
    columns,
    shown_table,
    sorts,
    whole_table,
)
from orchestrator.report.pages.report_folder import HERE

if TYPE_CHECKING:
    from starlette.requests import Request

    from orchestrator.report.live_page import ShownTable

# How long the first visitor waits for the first reading of a large sweep.
FIRST_SECONDS = 3.0
# The files of `report/static` that pages load.
ASSETS = ("report.css", "live.css", "live.js", "data.js", "calculator.css", "calculator.js")
# Columns of texts; the others have numbers, which are aligned at the right.
_TEXTS = frozenset(
    {*NODE_COLUMNS, "cell", "search", "layout", "state", "phase", "nodes", "made for"}
) | {
    "kind",
    "message",
    "last failure",
    "at (UTC)",
}


def routes(site: Site) -> list[Route]:
    """The routes of the live page."""
    pages = _LivePages(site)
    return [
        Route("/", pages.first),
        Route("/events", pages.events),
        Route("/table", pages.table),
        Route("/assets/{name}", pages.asset),
    ]


class _LivePages:
    def __init__(self, site: Site) -> None:
        self._site = site

    async def first(self, request: Request) -> Response:
        """The page, with the state as the server has it: it is read before any script runs."""
        # Also taken of a visitor who opens the printed address twice.
        asked(request, token=SHORT)
        await self._site.feed.first(FIRST_SECONDS)
        state = self._site.feed.snapshot.state
        values = {
            "state": state,
            "sections": [
                {
                    "name": section.value,
                    "title": TITLES[section],
                    "empty": EMPTY[section],
                    "columns": [(title, title not in _TEXTS) for title in columns(section)],
                    "sorts": sorts(section),
                    "table": table,
                }
                for section, table in state.tables.items()
            ],
            "cells": [line.texts[0] for line in state.tables[PageSection.CELLS].lines],
        }
        return self._site.page(request, "live.html", values, here="")

    async def events(self, request: Request) -> Response:
        """The stream of events. `after`: the version that the page shows."""
        after = number(asked(request, after=SHORT).get("after", "0"))
        feed = self._site.feed
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if feed.num_clients >= MOST_CLIENTS:
            raise Refusal(503, f"{MOST_CLIENTS} pages are open already.", {"Retry-After": "10"})
        return StreamingResponse(feed.stream(after), media_type="text/event-stream")

    async def table(self, request: Request) -> Response:
        """One table in an order, with the lines that contain a text."""
        wanted = asked(request, name=20, sort=20, matching=SHORT)
        try:
            section = PageSection(wanted.get("name", ""))
        except ValueError:
            raise Refusal(404, "There is no table of that name.") from None
        sort, matching = wanted.get("sort"), wanted.get("matching", "")
        if sort is not None and sort not in sorts(section):
            raise Refusal(400, "The table does not have that order.")
        found = await in_thread(partial(self._table, section, sort, matching))
        return JSONResponse(whole_table(found))

    def _table(self, section: PageSection, sort: str | None, matching: str) -> ShownTable:
        snapshot = self._site.feed.snapshot
        if snapshot.reading is None:
            return snapshot.state.tables[section]
        return shown_table(
            section,
            snapshot.reading.rows,
            now=datetime.now(tz=UTC),
            progress=snapshot.reading.progress,
            sort=sort,
            matching=matching,
        )

    async def asset(self, request: Request) -> Response:
        """A file that pages load."""
        asked(request)
        name = request.path_params["name"]
        if name not in ASSETS:
            raise Refusal(404, "There is no such file.")
        return FileResponse(HERE / "static" / name, headers={"Cache-Control": "no-cache"})

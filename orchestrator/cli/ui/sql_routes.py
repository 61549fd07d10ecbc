"""The page for questions in SQL: `sweep sql` itself answers them, in a process of its own.

It opens the store read-only, as the reader's role if there is one, in a process with limits.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from orchestrator.cli.ui.own_command import run_command
from orchestrator.cli.ui.parameters import SHORT
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site, asked, told
from orchestrator.report.pages.summary import plain_line
from orchestrator.report.quantities import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

MOST_STATEMENT = 4_000
MOST_ROWS = 500
TIMEOUT_SECONDS = 10
MOST_BYTES = 2_000_000
# Longer texts of the answer are cut.
MOST_CHARACTERS = 1_000
# Each takes a process with up to 1 GiB of memory.
MOST_QUERIES = 2


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A statement or the name of one, and what came back."""

    statement: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    remark: str = ""
    mistake: str = ""


@dataclass
class _SqlPages:
    site: Site
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_QUERIES))

    async def form(self, request: Request) -> Response:
        """The form, with a statement that an address may have: it is not run."""
        statement = asked(request, statement=MOST_STATEMENT).get("statement", "")
        return self._page(request, Asked(statement=statement))

    async def answer(self, request: Request) -> Response:
        """The answer to a statement."""
        values = told(request, statement=MOST_STATEMENT, values=SHORT)
        statement = values.get("statement", "").strip()
        if not statement:
            return self._page(request, Asked(mistake="Write a statement, or choose a query."))
        if self.slots.locked():
            raise Refusal(503, f"{MOST_QUERIES} queries run already.", {"Retry-After": "5"})
        async with self.slots:
            found = await self._answered(statement, values.get("values", "").split())
        return self._page(request, found, status=422 if found.mistake else 200)

    async def _answered(self, statement: str, values: Sequence[str]) -> Asked:
        named = statement.startswith("@")
        bounds = ["--max-rows", str(MOST_ROWS), "--timeout", str(TIMEOUT_SECONDS), "--json"]
        done = await run_command(
            "orchestrator.cli",
            ["sql", *bounds, *(["--sweep", self.site.sweep] if named else ()), "--", statement]
            + (list(values) if named else []),
            db=self.site.db,
            most_bytes=MOST_BYTES,
        )
        if done.is_cut:
            much = f"The answer has more than {MOST_BYTES // 1_000_000} MB: ask for fewer columns."
            return Asked(statement=statement, mistake=much)
        try:
            told = json.loads(done.output)
        except ValueError:
            ended = f"The query was ended, with code {done.exit_code}."
            return Asked(statement=statement, mistake=ended)
        if "error" in told:
            return Asked(statement=statement, mistake=str(told["error"]["message"]))
        rows = [[_text(value) for value in row] for row in told["rows"]]
        more = f"Only the first {MOST_ROWS} rows are shown." if told["truncated"] else ""
        return Asked(
            statement=statement,
            columns=[plain_line(str(name)) for name in told["columns"]],
            rows=rows,
            remark=f"{len(rows):,} rows. {more}",
        )

    def _page(self, request: Request, found: Asked, *, status: int = 200) -> Response:
        from db.sql.named_queries import named_queries  # SQLAlchemy

        values = {"asked": found, "queries": named_queries().values(), "most": MOST_STATEMENT}
        return self.site.page(request, "live_sql.html", values, here="sql", status=status)


def routes(site: Site) -> list[Route]:
    """The routes of the page for SQL."""
    pages = _SqlPages(site)
    return [
        Route("/sql", pages.form, methods=["GET"]),
        Route("/sql", pages.answer, methods=["POST"]),
    ]


def _text(value: Any) -> str:
    match value:
        case None:
            return UNKNOWN
        case str():
            text = value
        case float():
            text = f"{value:,.1f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
        case _:
            text = json.dumps(value)
    return plain_line(text)[:MOST_CHARACTERS]

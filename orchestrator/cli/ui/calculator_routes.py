"""The calculator: a page with a control for each axis, and the prediction of one layout as JSON."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.routing import Route

from orchestrator.cli.ui.calculators import Calculators
from orchestrator.cli.ui.parameters import SHORT, parameters
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site
from orchestrator.cli.ui.threads import in_thread
from orchestrator.core.errors import SpecInvalid, UsageInvalid
from orchestrator.report.json_text import json_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

MOST_NAME_CHARACTERS = 60
# A refusal quotes what was asked, but not all of a long text.
MOST_SENTENCE_CHARACTERS = 600
Result = TypeVar("Result")


def routes(site: Site) -> list[Route]:
    """The routes of the calculator."""
    calculators = Calculators(db=site.db, sweep=site.sweep)

    async def page(request: Request) -> Response:
        key, given = _chosen(request)
        found, axes = await _answered(partial(calculators.page, key, given))
        values = {
            "based_on": found.known.based_on,
            "cells": found.keys,
            "cell": found.calculator.cell.key,
            "axes": axes,
        }
        return site.page(request, "calculator.html", values, here="calculator")

    async def result(request: Request) -> Response:
        key, given = _chosen(request)

        def text() -> str:
            from orchestrator.report.pages.calculator_document import calculation

            known, found = calculators.explain(key, given)
            return json_text(calculation(found, why_no_times=known.why_no_times))

        return Response(await _answered(text), media_type="application/json")

    return [Route("/calculator", page), Route("/calculator/result", result)]


def _chosen(request: Request) -> tuple[str | None, dict[str, str]]:
    """The cell and the fields of the layout that an address names. Raises Refusal."""
    query: bytes = request.scope["query_string"]
    # The calculator knows the names of fields, and says what was meant.
    names = {name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)}
    if any(len(name) > MOST_NAME_CHARACTERS for name in names):
        raise Refusal(400, f"A parameter's name has more than {MOST_NAME_CHARACTERS} characters.")
    found = parameters(query, dict.fromkeys(names, SHORT))
    return found.pop("cell", None), found


async def _answered(work: Callable[[], Result]) -> Result:
    try:
        return await in_thread(work)
    except (UsageInvalid, SpecInvalid) as exc:
        raise Refusal(400, f"{str(exc)[:MOST_SENTENCE_CHARACTERS]}.") from None

"""The calculator: a page with a control for each axis, and the prediction of one layout as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from orchestrator.cli.ui.parameters import SHORT, parameters
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site

if TYPE_CHECKING:
    from starlette.requests import Request

    from orchestrator.cli.ui.calculator_process import CalculatorProcess

MOST_NAME_CHARACTERS = 60


def routes(site: Site, calculator: CalculatorProcess) -> list[Route]:
    """The routes of the calculator."""

    async def page(request: Request) -> Response:
        values = await calculator.ask("page", *_chosen(request))
        return site.page(request, "calculator.html", values, here="calculator")

    async def result(request: Request) -> Response:
        return JSONResponse(await calculator.ask("result", *_chosen(request)))

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

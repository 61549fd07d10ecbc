"""The page of a trial: all that `sweep show` knows, as it is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from orchestrator.cli.ui.parameters import number
from orchestrator.cli.ui.site import Site, asked
from orchestrator.core.trial.lifecycle import TERMINAL
from orchestrator.report.pages.summary import plain_line
from orchestrator.report.trial_facts import COMPARED_COLUMNS, EVENT_COLUMNS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


def routes(site: Site) -> list[Route]:
    """The route of the pages of trials."""

    async def trial(request: Request) -> Response:
        asked(request)
        found = await site.trial(number(request.path_params["number"]))
        # pydantic and yaml, which the first page does not need.
        from orchestrator.report.pages.trial_document import document
        from orchestrator.report.trial_file import TrialFiles

        reading = site.feed.snapshot.reading
        status = reading.rows.status if reading is not None else None
        spec = status.row.spec_json if status is not None else "{}"
        is_worked_on = status is None or status.is_worked_on
        values = {
            "trial": document(TrialFiles.of(spec), found, is_worked_on=is_worked_on),
            "compared_columns": COMPARED_COLUMNS,
            "event_columns": EVENT_COLUMNS,
            "has_ended": found.trial.state in TERMINAL,
            "plain": plain_line,
        }
        return site.page(request, "live_trial.html", values)

    return [Route("/trial/{number}", trial)]

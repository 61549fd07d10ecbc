"""Objects that all pages share: the sweep, its feed, sessions, templates, answers of a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, Response

from orchestrator import __version__
from orchestrator.cli.ui.parameters import parameters
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.threads import in_thread
from orchestrator.core.errors import SweepError, UsageInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Environment
    from starlette.requests import Request

    from db.read.rows import TrialDetail
    from orchestrator.cli.live.live_store import LiveStore
    from orchestrator.cli.live.sweep_requests import Requests
    from orchestrator.cli.ui.feed import Feed
    from orchestrator.cli.ui.sessions import Sessions

# The pages by their names in the navigation, in its order.
NAVIGATION: Mapping[str, str] = {
    "": "Live",
    "pictures/": "Pictures",
    "sql": "SQL",
    "calculator": "Calculator",
}


@dataclass(kw_only=True)
class Site:
    """The pages of one sweep."""

    db: str | None
    sweep: str
    store: LiveStore
    feed: Feed
    asks: Requests
    sessions: Sessions
    templates: Environment
    # More entries of the navigation, of pages that are mounted.
    navigation: dict[str, str] = field(default_factory=lambda: dict(NAVIGATION))

    def page(
        self,
        request: Request,
        template: str,
        values: Mapping[str, Any],
        *,
        here: str | None = None,
        status: int = 200,
    ) -> Response:
        """A page by its template. `here`: its name in the navigation.

        A visitor without a session gets one, for the forms of the page.
        """
        session, headers = request.scope["session"], {}
        if session is None:
            session = self.sessions.new()
            headers["Set-Cookie"] = self.sessions.set_cookie(session)
        text = self.templates.get_template(template).render(
            {
                "sweep": self.sweep,
                "version": __version__,
                "csrf": self.sessions.csrf(session),
                "navigation": self.navigation,
                "here": here,
                # From a page in a folder, such as trial/7, to the first page.
                "root": "../" * (request.url.path.count("/") - 1),
                **values,
            }
        )
        return HTMLResponse(text, status, headers)

    def message(
        self, request: Request, title: str, text: str, *, back: str = "", status: int = 200
    ) -> Response:
        """A page with one sentence. `back`: the page that its link leads to."""
        values = {"title": title, "text": text, "back": back}
        return self.page(request, "live_message.html", values, status=status)

    async def trial(self, trial_id: int) -> TrialDetail:
        """Return everything known about a trial of this sweep. Raises Refusal if there is none."""
        try:
            found = await in_thread(partial(self.store.trial, trial_id))
        except UsageInvalid:
            found = None
        if found is None or found.sweep_name != self.sweep:
            raise Refusal(404, f"Sweep {self.sweep} has no trial {trial_id}.")
        return found


def asked(request: Request, **allowed: int) -> dict[str, str]:
    """The parameters of the address, each with the length that it may have. Raises Refusal."""
    return parameters(request.scope["query_string"], allowed)


def told(request: Request, **allowed: int) -> dict[str, str]:
    """The values of a form, each with the length that it may have. Raises Refusal."""
    return parameters(request.scope["form"], allowed)


def sentence(exc: SweepError) -> str:
    """An error as a sentence."""
    text = str(exc)
    return f"{text[:1].upper()}{text[1:]}"

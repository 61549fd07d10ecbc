"""Pages on which a person asks a sweep to drain, cancel, retry or enqueue, each with a question.

The question is a page of its own, so it works by keyboard, without scripts, and is read out. Only
its form, which carries the session's CSRF token, changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import Route

from orchestrator.cli.ui.parameters import SHORT, number
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site, asked, sentence, told
from orchestrator.cli.ui.threads import in_thread
from orchestrator.core.errors import SweepError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# A cell's name and a layout's key.
LONG = 400


def routes(site: Site) -> list[Route]:
    """The routes of questions, and of the forms that answer them."""
    pages = _RequestPages(site)
    found = []
    for name, question, answer in (
        ("drain", pages.ask_to_drain, pages.drain),
        ("cancel", pages.ask_to_cancel, pages.cancel),
        ("retry", pages.ask_to_retry, pages.retry),
        ("enqueue", pages.ask_to_enqueue, pages.enqueue),
    ):
        found.append(Route(f"/{name}", question, methods=["GET"]))
        found.append(Route(f"/{name}", answer, methods=["POST"]))
    return found


class _RequestPages:
    def __init__(self, site: Site) -> None:
        self._site = site

    async def ask_to_drain(self, request: Request) -> Response:
        """Ask whether to drain."""
        asked(request)
        text = (
            "Running trials may finish, and no new ones are started. `sweep run` continues later."
        )
        return self._question(request, "drain", "Drain the sweep?", text, {})

    async def drain(self, request: Request) -> Response:
        """Drain."""
        told(request)
        return await self._do(request, partial(self._site.asks.stop, drain=True), "")

    async def ask_to_cancel(self, request: Request) -> Response:
        """Ask whether to cancel."""
        asked(request)
        text = "Running trials are ended now. The next `sweep run` measures them again."
        return self._question(request, "cancel", "Cancel the sweep?", text, {})

    async def cancel(self, request: Request) -> Response:
        """Cancel."""
        told(request)
        return await self._do(request, partial(self._site.asks.stop, drain=False), "")

    async def ask_to_retry(self, request: Request) -> Response:
        """Ask whether to measure a trial again."""
        trial_id = number(asked(request, trial=SHORT).get("trial", ""))
        await self._site.trial(trial_id)
        text = "Its numbers so far no longer count, and layouts that it ruled out wait again too."
        title = f"Measure trial {trial_id} again?"
        values = {"trial": str(trial_id)}
        return self._question(request, "retry", title, text, values, back=f"trial/{trial_id}")

    async def retry(self, request: Request) -> Response:
        """Measure a trial again."""
        trial_id = number(told(request, trial=SHORT).get("trial", ""))
        # One of another sweep is not ours to change.
        await self._site.trial(trial_id)
        do = partial(self._site.asks.retry, trial_id)
        return await self._do(request, do, f"trial/{trial_id}")

    async def ask_to_enqueue(self, request: Request) -> Response:
        """Ask whether to measure a layout next."""
        layout, cell = _wanted(asked(request, layout=LONG, cell=LONG))
        title, values = "Measure this layout next?", {"layout": layout, "cell": cell}
        return self._question(request, "enqueue", title, f"{layout} in {cell}", values)

    async def enqueue(self, request: Request) -> Response:
        """Measure a layout next."""
        layout, cell = _wanted(told(request, layout=LONG, cell=LONG))
        return await self._do(request, partial(self._site.asks.enqueue, layout, cell), "")

    def _question(
        self,
        request: Request,
        action: str,
        title: str,
        text: str,
        values: dict[str, str],
        *,
        back: str = "",
    ) -> Response:
        shown = {"title": title, "text": text, "action": action, "values": values, "back": back}
        return self._site.page(request, "live_question.html", shown)

    async def _do(self, request: Request, change: Callable[[], str], back: str) -> Response:
        try:
            text, status = await in_thread(change), 200
        except SweepError as exc:
            text, status = sentence(exc), 409
        title = "Asked" if status == 200 else "Nothing was changed"
        return self._site.message(request, title, text, back=back, status=status)


def _wanted(values: dict[str, str]) -> tuple[str, str]:
    layout, cell = (" ".join(values.get(name, "").split()) for name in ("layout", "cell"))
    if not layout or not cell:
        raise Refusal(400, "Name a layout, as in mbs=4 recompute=full, and a cell.")
    return layout, cell

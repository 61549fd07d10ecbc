"""The pictures: the pages of `sweep report`, drawn again when somebody opens them later."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from orchestrator.cli.ui.own_command import run_command
from orchestrator.cli.ui.refusal import Refusal
from orchestrator.cli.ui.site import Site, asked
from orchestrator.node.processes import has_ended, process_identity

if TYPE_CHECKING:
    from starlette.requests import Request

    from orchestrator.report.live_sweep import LiveRows

# Pictures are not drawn more often.
REDRAW_SECONDS = 30.0
# How long a visitor waits for new pictures before the old ones are shown.
PATIENCE_SECONDS = 2.0
DRAWING_SECONDS = 300.0
# Drawing leaves the cores to the sweep.
NICENESS = 15
_MOST_BYTES = 10_000
_PREFIX = "sweep-ui-"
# A request for one of these has the pictures drawn.
_PAGES = ("index.html", "trial.html", "trials.html")


class Pictures:
    """The folder of pictures that is shown, and the one that is drawn."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site, self._folder = site, folder
        self._number = 0
        self._shown: Path | None = None
        self._drawn_at = 0.0
        self._drawn_of: LiveRows | None = None
        self._task: asyncio.Task[None] | None = None
        self.mistake: str | None = None

    async def folder(self) -> Path | None:
        """The newest pictures; None: the first ones are being drawn."""
        reading = self._site.feed.snapshot.reading
        rows = reading.rows if reading is not None else None
        is_old = time.monotonic() - self._drawn_at > REDRAW_SECONDS or self._shown is None
        if self._task is None and is_old and (self._shown is None or rows is not self._drawn_of):
            self._drawn_of = rows
            self._task = asyncio.create_task(self._draw())
        if self._task is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._task), PATIENCE_SECONDS)
        return self._shown

    @property
    def shown(self) -> Path | None:
        """The pictures that are shown now."""
        return self._shown

    async def _draw(self) -> None:
        self._number += 1
        folder = self._folder / str(self._number)
        try:
            done = await asyncio.wait_for(
                run_command(
                    "orchestrator.cli.ui.drawing",
                    [self._site.sweep, str(folder)],
                    db=self._site.db,
                    most_bytes=_MOST_BYTES,
                    niceness=NICENESS,
                ),
                DRAWING_SECONDS,
            )
            why = done.output.decode(errors="replace").strip()
            code = done.exit_code
        except TimeoutError:
            why, code = f"drawing took longer than {DRAWING_SECONDS:g} s", 1
        finally:
            self._task = None
            self._drawn_at = time.monotonic()
        if code:
            self.mistake = why or f"the drawing process ended with code {code}"
            shutil.rmtree(folder, ignore_errors=True)
            return
        old, self._shown, self.mistake = self._shown, folder, None
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Stop drawing, and remove the folders."""
        if self._task is not None:
            self._task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)


def open_pictures(site: Site) -> Pictures:
    """Make a folder for the pictures of this process; remove those of killed ones."""
    _remove_folders_of_killed_servers()
    owner = process_identity(os.getpid()).replace(":", "-")
    return Pictures(site, Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{owner}-")))


def _remove_folders_of_killed_servers() -> None:
    """Remove what servers of this machine, and of this pid namespace, left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*-*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[:3]
        if has_ended(*owner):
            shutil.rmtree(folder, ignore_errors=True)


def routes(site: Site, pictures: Pictures) -> list[Route]:
    """The routes of the pictures."""

    async def folder(request: Request) -> Response:
        asked(request)
        return RedirectResponse("pictures/index.html", 303)

    async def inside(request: Request) -> Response:
        asked(request)
        return RedirectResponse("index.html", 303)

    async def page(request: Request) -> Response:
        asked(request)
        found = await pictures.folder()
        if found is not None:
            return FileResponse(found / request.url.path.rpartition("/")[2])
        if pictures.mistake is not None:
            return site.message(
                request, "No pictures", f"They could not be drawn: {pictures.mistake}", status=503
            )
        text = "The pictures are being drawn. This page opens them when they are there."
        answer = site.message(request, "Pictures", text)
        answer.headers["Refresh"] = "2"
        return answer

    async def file(request: Request) -> Response:
        asked(request)
        shown = pictures.shown
        # The path is one of the folder's files, by comparison with each: none leads elsewhere.
        wanted = request.path_params["path"]
        if shown is None or wanted not in _files(shown):
            raise Refusal(404, "There is no such file; the pictures may have to be drawn first.")
        kept = "private, max-age=3600" if wanted == "assets/plotly.min.js" else "no-store"
        return FileResponse(shown / wanted, headers={"Cache-Control": kept})

    return [
        Route("/pictures", folder),
        Route("/pictures/", inside),
        *(Route(f"/pictures/{name}", page) for name in _PAGES),
        Route("/pictures/{path:path}", file),
    ]


def _files(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}

"""Takes the screenshots of the documents, with a headless Chromium.

python -m docs.screenshots [--playbook FILE.csv]

Runs sweeps/quickstart.yaml in a temporary folder, and writes docs/screenshot-report.png (the top of
its report) and docs/screenshot-ui.png (its live page). `--playbook`: the table of the runs of the
Ultra-Scale Playbook; a replay of it gives docs/screenshot-playbook.png and, drawn by `sweep plot`,
docs/report-best-layouts.png.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.ui.served import served
from tests.report.pages.chromium import Browser, chromium

DOCS = Path(__file__).parent
SWEEP = Path(sys.executable).parent / "sweep"
WIDTH = 1100
# Few colours are enough for text and marks, and make the files small.
COLOURS = 128


def main() -> int:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--playbook", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _in_folder(Path(name)) as db, chromium() as browser:
        _sweep("run", DOCS.parent / "sweeps" / "quickstart.yaml", "--quiet")
        _sweep("report", "quickstart", "-o", "report")
        _take(browser, Path("report/index.html").resolve().as_uri(), "report", height=900)
        with served(db, "quickstart") as visitor:
            _take(browser, f"http://{visitor.host}/", "ui", height=1000)
        if arguments.playbook is not None:
            tables = _tables(arguments.playbook)
            for table in tables:
                whole = ["search.strategy=exhaustive", "search.confirm.repeats=0"]
                _sweep("replay", arguments.playbook, "--table", table, *whole, "--quiet")
            names = [f"replay-{table.lower()}" for table in tables]
            _sweep("plot", "best-layouts", *names, "--png", "-o", DOCS / "report-best-layouts.png")
            _sweep("report", *names, "-o", "playbook")
            page = Path("playbook/index.html").resolve().as_uri()
            _take(browser, page, "playbook", height=580, picture="scaling")
    return 0


@contextmanager
def _in_folder(folder: Path) -> Iterator[str]:
    """Work in a folder with a store of its own; the store's URL."""
    os.chdir(folder)
    db = f"sqlite:///{folder}/sweep.sqlite"
    os.environ.update(SWEEP_DB=db, SWEEP_HOME=str(folder / "home"))
    try:
        yield db
    finally:
        os.chdir(DOCS)


def _tables(file: Path) -> list[str]:
    """Return the tables of a file that has those of several sources."""
    with file.open(newline="", encoding="utf-8") as rows:
        return list(dict.fromkeys(row["table_id"] for row in csv.DictReader(rows)))


def _sweep(*arguments: str | Path) -> None:
    done = subprocess.run([SWEEP, *map(str, arguments)], check=False)
    if done.returncode:
        raise SystemExit(f"sweep {arguments[0]} ended with {done.returncode}")


def _take(
    browser: Browser, url: str, name: str, *, height: int, picture: str | None = None
) -> None:
    """Write what is seen of a page, from its top or from a picture on."""
    from PIL import Image

    browser.window(WIDTH, height)
    browser.get(url)
    if picture is not None:
        browser.draw(picture)
    browser.wait("return document.fonts.status === 'loaded'")
    image = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png()))
    small = image.convert("RGB").quantize(COLOURS)
    small.save(DOCS / f"screenshot-{name}.png", optimize=True)


if __name__ == "__main__":
    raise SystemExit(main())

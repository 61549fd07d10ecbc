"""The pictures of a server: drawn by a process of its own, and served from its folder alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.ui.picture_routes import open_pictures
from orchestrator.node.processes import process_identity
from tests.cli.cli_store import Filled
from tests.cli.ui.served import Visitor, served
from tests.report.pages.test_report_folder import Scripts


def test_pictures_are_drawn_when_somebody_opens_them(visitor: Visitor, shown: Filled) -> None:
    assert visitor.get("/pictures/assets/report.js").status == 404
    assert visitor.get("/pictures").headers["location"] == "pictures/index.html"
    by = time.monotonic() + 60.0
    while "refresh" in (page := visitor.get("/pictures/index.html")).headers:
        assert "are being drawn" in page.text and time.monotonic() < by
        time.sleep(0.02)
    assert page.status == 200 and 'data-picture="scaling"' in page.text
    assert '<a href="../">Live</a>' in page.text and "Drawn at 2" in page.text
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    for link in Scripts(page.text).links:
        if not link.startswith(("#", "data:", "trial.html", "../")):
            assert visitor.get(f"/pictures/{link}").status == 200, link
    assert "max-age" in visitor.get("/pictures/assets/plotly.min.js").headers["cache-control"]
    for bad in ("../s", "data/../../x", "data", "", "/etc/passwd"):
        assert visitor.get(f"/pictures/{bad}").status in (303, 404)


def test_a_link_to_a_trial_has_its_pictures_drawn(shown: Filled, shown_url: str) -> None:
    with served(shown_url) as visitor:
        by = time.monotonic() + 60.0
        while "refresh" in (found := visitor.get("/pictures/trial.html")).headers:
            assert "are being drawn" in found.text and time.monotonic() < by
            time.sleep(0.02)
        assert found.status == 200 and "assets/trial.js" in found.text


def test_a_server_removes_the_pictures_of_servers_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed, alive = (process_identity(pid).split(":") for pid in (gone.pid, os.getppid()))
    gone.kill()
    gone.wait()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # A process of the same number in another namespace, or with another start, may be alive.
    names = [
        f"sweep-ui-{'-'.join(killed)}-x",
        f"sweep-ui-{'-'.join(alive)}-x",
        f"sweep-ui-{killed[0]}-{killed[1]}-1-x",
        "sweep-ui-mine-x",
        "other",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    unasked: Any = None  # until somebody opens the pictures
    pictures = open_pictures(unasked)
    [own] = {one.name for one in tmp_path.iterdir()} - set(names)
    assert own.startswith(f"sweep-ui-{os.getpid()}-")
    assert {one.name for one in tmp_path.iterdir()} == {own, *names[1:]}
    pictures.close()
    assert {one.name for one in tmp_path.iterdir()} == set(names[1:])

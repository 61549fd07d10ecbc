"""The pictures of a server: drawn by a process of its own, and served from its folder alone."""

from __future__ import annotations

import time

from tests.cli.cli_store import Filled
from tests.cli.ui.served import Visitor
from tests.report.pages.test_report_folder import Scripts


def test_pictures_are_drawn_when_somebody_opens_them(visitor: Visitor, shown: Filled) -> None:
    assert visitor.get("/pictures/assets/report.js").status == 404
    assert visitor.get("/pictures").headers["location"] == "pictures/index.html"
    by = time.monotonic() + 60.0
    while "refresh" in (page := visitor.get("/pictures/index.html")).headers:
        assert "are being drawn" in page.text and time.monotonic() < by
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

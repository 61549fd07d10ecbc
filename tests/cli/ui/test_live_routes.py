"""The live page of a server: its rows before any script runs, its events, its tables."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from db.store import Store
from orchestrator.cli.ui import live_routes
from tests.cli.cli_store import HOSTILE, Filled, fill
from tests.cli.ui.served import Visitor, served
from tests.db.builders import Bench
from tests.report.pages.test_report_folder import Scripts


def test_the_page_has_the_rows_before_any_script_runs(visitor: Visitor, shown: Filled) -> None:
    page = visitor.get("/").text
    for trial_id in (shown.measured, shown.failed, shown.running, shown.queued):
        assert f'href="trial/{trial_id}"' in page
    assert "3 measured, 2 OOM, 1 failed" in page and "GPU-hours" in page
    assert page.count("<h2") == 7 and "node-a" in page


@pytest.mark.parametrize(
    "target", ["/", "/sql", "/cancel", "/trial/FAILED", "/pictures/index.html"]
)
def test_pages_have_no_script_of_their_own_and_show_text_as_text(
    visitor: Visitor, shown: Filled, target: str
) -> None:
    answer = visitor.get(target.replace("FAILED", str(shown.failed)))
    assert answer.status == 200
    found = Scripts(answer.text)
    assert None not in found.sources and not found.handlers
    # The pictures reserve their height in a style, so that the page does not jump.
    assert "style=" not in answer.text or target.startswith("/pictures/")
    assert not any(re.match(r"[a-z]+:|//", link) for link in found.links if link != "data:,")
    assert "<script>alert" not in answer.text
    assert not set(answer.text) & set("\x1b\x9b\x07\u202e")


def test_the_page_of_a_trial_has_its_log_as_text(visitor: Visitor, shown: Filled) -> None:
    page = visitor.get(f"/trial/{shown.failed}").text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and HOSTILE not in page
    assert "user_error" in page and f"sweep show {shown.failed}" in page
    assert f'href="../retry?trial={shown.failed}"' in page
    assert "retry?trial" not in visitor.get(f"/trial/{shown.running}").text


def test_a_commit_is_an_event_within_two_seconds(store_url: str, either_store: Store) -> None:
    bench = Bench.on(either_store)
    bench.measure(1, 1000.0)
    with served(store_url) as visitor, visitor.events() as events:
        first = next(events)
        assert list(first["tables"]["trials"]["lines"]) == ["trial 1"]
        # A reading without visitors may be under way.
        bench.measure(2, 2000.0)
        committed = time.monotonic()
        while "trial 2" not in next(events)["tables"].get("trials", {}).get("lines", {}):
            pass
        assert time.monotonic() - committed < 2.0


def test_every_visitor_gets_the_same_event(store_url: str, either_store: Store) -> None:
    bench = Bench.on(either_store)
    bench.measure(1, 1000.0)
    with served(store_url) as visitor, ExitStack() as stack:
        streams = [stack.enter_context(visitor.events()) for _ in range(20)]
        versions = {next(one)["version"] for one in streams}
        assert len(versions) == 1
        bench.measure(2, 2000.0)
        second = [next(one) for one in streams]
        assert all(one == second[0] for one in second)


def test_more_visitors_than_it_serves_are_sent_away(
    visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_routes, "MOST_CLIENTS", 2)
    with visitor.events() as one, visitor.events() as other:
        next(one), next(other)
        answer = visitor.get("/events")
        assert answer.status == 503 and answer.headers["retry-after"] == "10"
        assert visitor.get("/").status == 200


def test_a_table_is_sorted_and_filtered(visitor: Visitor, shown: Filled) -> None:
    def order(query: str) -> list[int]:
        answer = visitor.get(f"/table?name=trials&{query}")
        assert answer.headers["content-type"] == "application/json"
        found = re.search(r'"order":\[(.*?)\]', answer.text)
        assert found is not None
        return [int(number) for number in re.findall(r"trial (\d+)", found[1])]

    assert order("sort=speed")[0] == shown.measured
    assert order("sort=trial") == list(range(1, 11))
    assert order("matching=pruned") == [shown.pruned]
    assert order("matching=nothing+of+that+kind") == []


def test_a_store_that_is_not_there_is_said_on_the_page(tmp_path: Path, sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        fill(store, tmp_path)
        path = store.path
    assert path is not None
    with served(sqlite_url) as visitor, visitor.events() as events:
        next(events)
        away = path.with_name("away")
        path.rename(away)
        while not (found := next(events).get("trouble")):
            pass
        assert "cannot be read" in found
        page = visitor.get("/")
        assert page.status == 200 and "The store does not answer" in page.text
        assert visitor.get("/trial/1").status in (404, 503)
        away.rename(path)
        while next(events).get("trouble", found) is not None:
            pass


def test_the_assets_of_a_page_are_there(visitor: Visitor) -> None:
    for link in Scripts(visitor.get("/").text).links:
        if link.startswith("assets/"):
            assert visitor.get(f"/{link}").status == 200
    for name in live_routes.ASSETS:
        answer = visitor.get(f"/assets/{name}")
        assert answer.headers["content-type"].startswith(("text/css", "text/javascript"))
    assert visitor.ask("HEAD", "/").body == b""

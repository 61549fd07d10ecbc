"""The live page as values: what a page gets that knows an earlier version, and what it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from db.store import Store
from orchestrator.report.live_page import (
    MOST_LINES,
    PageSection,
    PageState,
    changes,
    columns,
    page_state,
    sorts,
    whole,
)
from orchestrator.report.live_sweep import LiveRows, LiveSweep
from tests.cli.cli_store import HOSTILE, fill
from tests.db.builders import Bench

NOW = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def rows(sqlite_store: Store, tmp_path: Path) -> LiveRows:
    fill(sqlite_store, tmp_path)
    return LiveSweep(sqlite_store, "tiny").read(0.0)


def state(rows: LiveRows | None, version: int = 1, **more: Any) -> PageState:
    return page_state(version, rows, now=more.pop("now", NOW), progress={}, **more)


def applied(page: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """What the script of the page does with a message."""
    found: dict[str, Any] = json.loads(json.dumps(page))
    for name in ("version", "head", "trouble"):
        if name in message:
            found[name] = message[name]
    for name, difference in message.get("tables", {}).items():
        one = found["tables"][name]
        one["lines"] |= difference.get("lines", {})
        one["order"] = difference.get("order", one["order"])
        one["remark"] = difference.get("remark", one["remark"])
        one["lines"] = {key: one["lines"][key] for key in one["order"]}
    return found


def test_every_table_has_a_title_for_each_text(rows: LiveRows) -> None:
    for section, one in state(rows).tables.items():
        assert sorts(section)
        for line in one.lines:
            assert len(line.texts) == len(columns(section))
    assert {len(one.lines) for one in state(rows).tables.values()} == {1, 2, 3, 10}


def test_changes_lead_from_one_state_to_the_next(sqlite_store: Store) -> None:
    bench = Bench.on(sqlite_store)
    live = LiveSweep(sqlite_store, "tiny")
    bench.measure(1, 1000.0)
    before = state(live.read(0.0))
    bench.measure(2, 2000.0)
    after = state(live.read(1.0), 2)
    message = changes(before, after)
    assert applied(json.loads(json.dumps(whole(before))), message) == json.loads(
        json.dumps(whole(after))
    )
    assert list(message["tables"]["trials"]["lines"]) == ["trial 2"]
    assert message["tables"]["trials"]["order"] == ["trial 2", "trial 1"]
    assert "queue" not in message["tables"]


def test_a_running_trial_costs_its_own_line_alone(rows: LiveRows) -> None:
    before, after = state(rows), state(rows, 2, now=NOW + timedelta(hours=50))
    assert not after.has_same_content(before)
    message = changes(before, after)
    assert set(message["tables"]) == {"running"} and "order" not in message["tables"]["running"]
    assert state(rows, 2).has_same_content(before)


def test_a_silent_store_is_said_beside_what_it_said_last(rows: LiveRows) -> None:
    before, after = state(rows), state(rows, 2, trouble="gone\x1b[2J " + "x" * 999)
    message = changes(before, after)
    assert set(message) == {"version", "after", "trouble"}
    assert message["trouble"].startswith("gone [2J x") and len(message["trouble"]) == 300
    assert changes(after, state(rows, 3))["trouble"] is None
    assert state(None, trouble="no store").trouble == "no store"


def test_hostile_texts_lose_their_control_characters(rows: LiveRows) -> None:
    text = json.dumps(whole(state(rows)), ensure_ascii=False)
    assert "<script>alert(1)</script>" in text and HOSTILE not in text
    assert not set(text) & set("\x1b\x9b\x07\u202e\n")
    assert "\\u00" not in text


def test_gangs_are_shown_by_node(rows: LiveRows) -> None:
    one = rows.status.running[0]
    running = [
        replace(one, trial_id=4, num_gpus=16, nodes=("b", "a")),
        replace(one, trial_id=9, num_gpus=1, nodes=("b",)),
    ]
    many = replace(rows, status=replace(rows.status, running=running))
    assert [line.texts for line in state(many).tables[PageSection.NODES].lines] == [
        ("a", "4", "trial 4: 16 GPUs on 2 nodes"),
        ("b", "4, 9", "trial 4: 16 GPUs on 2 nodes; trial 9: 1 GPU on 1 node"),
    ]


def test_a_large_sweep_shows_its_first_lines_and_counts_the_others(rows: LiveRows) -> None:
    one = next(iter(rows.trials.values()))
    many = replace(rows, trials={number: replace(one, id=number) for number in range(1, 1001)})
    found = state(many).tables[PageSection.TRIALS]
    assert len(found.lines) == MOST_LINES and found.remark == "100 of 1,000 lines"
    assert len(json.dumps(whole(state(many)))) < 40_000

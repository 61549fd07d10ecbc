"""The screen of `sweep top`, without a terminal: keys, questions, texts, a store that goes away."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.color import Color
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from db.store import Store
from orchestrator.cli.live.live_store import LiveStore
from orchestrator.cli.live.sweep_requests import Requests
from orchestrator.cli.top import app as top_app
from orchestrator.cli.top.app import TopApp
from orchestrator.cli.top.dialogs import Detail, Question, detail_text
from orchestrator.core.errors import SweepInUse
from tests.acceptance.command import Command, write_sweep
from tests.cli.cli_store import Filled, fill
from tests.db.builders import Bench

Steps = Callable[[TopApp, Pilot[None]], Awaitable[None]]
SMALL = (80, 24)


class Asked:
    """Notes what was asked for, and answers."""

    def __init__(self, refusal: str | None = None) -> None:
        self.calls: list[object] = []
        self._refusal = refusal

    def stop(self, *, drain: bool) -> str:
        return self._note("drain" if drain else "cancel")

    def retry(self, trial_id: int) -> str:
        return self._note(trial_id)

    def enqueue(self, layout: str, cell: str) -> str:
        return self._note((layout, cell))

    def _note(self, what: object) -> str:
        self.calls.append(what)
        if self._refusal is not None:
            raise SweepInUse(self._refusal)
        return f"asked: {what} [/bold]"


@pytest.fixture
def filled(store: Store, tmp_path: Path) -> Filled:
    return fill(store, tmp_path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_app, "REST_SECONDS", 0.05)


def watch(
    url: str,
    steps: Steps,
    *,
    asks: Asked | Requests | None = None,
    size: tuple[int, int] = SMALL,
    sweep: str = "tiny",
) -> None:
    """Open the screen on a store, and press keys."""

    async def run() -> None:
        app = TopApp(LiveStore(url, sweep), asks if asks is not None else Asked())
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: _head(app) not in ("", "Reading the store ..."))
            await steps(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    by = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < by
        await pilot.pause(0.02)


def _head(app: TopApp) -> str:
    return str(app.screen_stack[0].query_one("#head", Static).render())


def _table(app: TopApp) -> list[list[str]]:
    found = app.screen_stack[0].query_one(DataTable)
    return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]


def test_each_key_shows_its_table_on_a_small_screen(sqlite_url: str, filled: Filled) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "running on host" in _head(app))
        assert len(_table(app)) == 2
        for key, number in (("2", 2), ("3", 1), ("5", 3), ("4", 10), ("1", 2)):
            await pilot.press(key)
            assert len(_table(app)) == number
        await pilot.press("tab")
        assert len(_table(app)) == 2
        assert app.query_one(DataTable).size.height > 12

    watch(sqlite_url, steps)


def test_hostile_texts_are_shown_as_text(sqlite_url: str, filled: Filled) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("5")
        message = next(row[-1] for row in _table(app) if row[1] == str(filled.failed))
        assert message.startswith("[/bold] [link=x]y red") and "<script>" in message
        assert not set(message) & set("\x1b\x9b\x07\u202e\n")
        image = app.export_screenshot()
        assert "\x1b" not in image and "<script>" not in image

    watch(sqlite_url, steps, size=(200, 30))


def test_sorting_and_filtering(sqlite_url: str, filled: Filled) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        assert _table(app)[0][0] == str(filled.measured)
        await pilot.press("s")
        assert _table(app)[0][0] == "1"
        await pilot.press("slash")
        await until(pilot, lambda: bool(app.screen.query(Input)))
        await pilot.press(*"pruned", "enter")
        await until(pilot, lambda: len(_table(app)) == 1)
        assert _table(app)[0][:2] == [str(filled.pruned), "pruned"]
        await pilot.press("slash")
        await until(pilot, lambda: bool(app.screen.query(Input)))
        await pilot.press("escape")
        assert len(_table(app)) == 1

    watch(sqlite_url, steps)


def test_the_detail_of_a_trial_has_what_show_has(
    sqlite_url: str, store: Store, filled: Filled
) -> None:
    text = str(detail_text(store.trial(filled.failed), is_worked_on=True))
    assert f"Trial {filled.failed}: failed" in text and "last lines:" in text
    assert "user_error" in text and not set(text) & set("\x1b\x9b\x07\u202e")

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4", "enter")
        await until(pilot, lambda: isinstance(app.screen, Detail))
        assert f"Trial {filled.measured}: measured" in str(app.screen.query_one(Static).render())
        await pilot.press("escape")
        assert not isinstance(app.screen, Detail)

    watch(sqlite_url, steps)


@pytest.mark.parametrize(
    ("key", "call"),
    [("d", "drain"), ("c", "cancel"), ("r", None)],
    ids=["drain", "cancel", "retry"],
)
def test_a_change_is_asked_about_first(
    sqlite_url: str, filled: Filled, key: str, call: str | None
) -> None:
    asks = Asked()

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        for answer in ("n", "escape", "q"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press(answer)
            await until(pilot, lambda: not isinstance(app.screen, Question))
        assert not asks.calls
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, Question))
        await pilot.press("y")
        await until(pilot, lambda: bool(asks.calls))

    watch(sqlite_url, steps, asks=asks)
    assert asks.calls == [filled.measured if call is None else call]


def test_a_layout_is_asked_for_in_the_cell_under_the_cursor(
    sqlite_url: str, store: Store, filled: Filled
) -> None:
    asks = Asked()

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(_table(app)) == 2)
        await pilot.press("e")
        await until(pilot, lambda: bool(app.screen.query(Input)))
        await pilot.press(*"mbs=4", "enter")
        await until(pilot, lambda: isinstance(app.screen, Question))
        await pilot.press("y")
        await until(pilot, lambda: bool(asks.calls))

    watch(sqlite_url, steps, asks=asks)
    (name, *_) = [one.cell.key for one in store.cells(store.sweep_named("tiny").id)]
    assert asks.calls == [("mbs=4", name)]


def test_a_refusal_is_said(sqlite_url: str, filled: Filled) -> None:
    said: list[str] = []

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, Question))
        await pilot.press("y")
        await until(pilot, lambda: bool(app._notifications))
        said.extend(one.message for one in app._notifications)

    watch(sqlite_url, steps, asks=Asked(refusal="another [/x] holds it"))
    assert said == ["another [/x] holds it"]


def test_the_keys_change_what_the_commands_change(store: Store, sqlite_url: str) -> None:
    bench = Bench.on(store)
    trial = bench.measure(1)
    asks = Requests(sqlite_url, "tiny")
    assert asks.retry(trial).endswith("reads the request within 5 s.")
    assert "running trials may finish" in asks.stop(drain=True)
    assert str(store.sweep_named("tiny").stop_requested) == "drain"
    store.release(bench.sweep_id, bench.epoch)
    assert "nothing to stop" in asks.stop(drain=False)
    assert asks.retry(trial).endswith("The next `sweep run` with its file does it.")
    assert "nothing was changed" in asks.retry(trial)


def test_a_store_that_goes_away_is_said_and_comes_back(
    sqlite_url: str, store: Store, filled: Filled, tmp_path: Path
) -> None:
    path = store.path
    assert path is not None
    store.close()
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "running on host" in _head(app))
        copy.unlink()
        await until(pilot, lambda: "does not answer" in _head(app))
        assert "below is what it said last" in _head(app) and len(_table(app)) == 2
        shutil.copy(path, copy)
        await until(pilot, lambda: "does not answer" not in _head(app))
        assert len(_table(app)) == 2

    watch(f"sqlite:///{copy}", steps)


def test_a_store_that_is_not_there_yet_is_waited_for(
    sqlite_url: str, store: Store, filled: Filled, tmp_path: Path
) -> None:
    path = store.path
    assert path is not None
    store.close()
    late = tmp_path / "late.sqlite"

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "does not answer: the store" in _head(app))
        shutil.copy(path, late)
        await until(pilot, lambda: "running on host" in _head(app))

    watch(f"sqlite:///{late}", steps)


def test_a_cursor_stays_on_its_trial(store: Store, sqlite_url: str) -> None:
    bench = Bench.on(store)
    bench.measure(1, 1000.0)

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(pilot, lambda: len(_table(app)) == 1)
        bench.measure(2, 2000.0)
        # A reading may come while trial 2 still runs: then it is below trial 1.
        await until(pilot, lambda: [line[0] for line in _table(app)] == ["2", "1"])
        assert app.query_one(DataTable).cursor_row == 1

    watch(sqlite_url, steps)


@pytest.mark.parametrize("gone", ["#head", "#tabs", "#hint", "DataTable"])
def test_a_reading_that_comes_while_the_screen_closes_changes_nothing(
    sqlite_url: str, filled: Filled, gone: str
) -> None:
    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: app._reading is not None)
        reading = app._reading
        assert reading is not None
        await app.query_one(gone).remove()
        app._note_reading(reading)
        app._note_trouble("the database is away")

    watch(sqlite_url, steps)


def _colours_of(app: TopApp) -> set[str]:
    """The colours of all characters that a terminal gets, foreground and background."""
    found = set()
    for line in app.screen._compositor.render_strips():
        for segment in line.apply_filter(app._filters[-1], Color(0, 0, 0)):
            style = segment.style
            for colour in (style.color, style.bgcolor) if style is not None else ():
                if colour is not None and not colour.is_default:
                    found.add(colour.name)
    return found


@pytest.mark.parametrize("has_colours", [True, False])
def test_colours_are_those_of_the_terminal_or_none(
    sqlite_url: str, filled: Filled, monkeypatch: pytest.MonkeyPatch, has_colours: bool
) -> None:
    if not has_colours:
        monkeypatch.setenv("NO_COLOR", "1")

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(pilot, lambda: len(_table(app)) == 10)
        await pilot.pause()
        filters = [type(one).__name__ for one in app._filters if one.enabled]
        assert filters == ([] if has_colours else ["NoColor"])
        if not has_colours:
            assert _colours_of(app) == set()
            # The line under the cursor is told from the others all the same.
            cursor = app.query_one(DataTable).get_component_styles("datatable--cursor")
            assert "reverse" in str(cursor.text_style)

    watch(sqlite_url, steps)


def test_it_follows_a_sweep_that_runs(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A simulated sweep lasts for less than a second.
    monkeypatch.setattr(top_app, "REST_SECONDS", 0.01)
    # Half of the time is the writer's.
    monkeypatch.setattr(top_app, "RESTS_PER_READING", 1.0)
    command = Command(tmp_path, sqlite_url)
    file = write_sweep(tmp_path, search={"strategy": "exhaustive"})
    seen: list[str] = []

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "does not answer" in _head(app))
        running = asyncio.create_task(asyncio.to_thread(command.ok, "run", file, "--simulate"))
        while not running.done():
            seen.append(_head(app))
            await pilot.pause(0.05)
        await running
        await until(pilot, lambda: "finished" in _head(app))
        await pilot.press("4")
        await until(pilot, lambda: len(_table(app)) == 16)

    watch(command.store_url, steps, sweep="t-simulated")
    assert any("running on host" in one and "simulated" in one for one in seen)

"""The screen of `sweep top`: lines about the sweep, and one table at a time.

A thread reads the store, and rests at least a second, and longer if a reading takes long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Static

from orchestrator.cli.live.live_store import LiveStore, Reading
from orchestrator.cli.terminal.output import plain
from orchestrator.cli.top.dialogs import Detail, Entry, Question
from orchestrator.core.errors import SweepError
from orchestrator.report.quantities import duration
from orchestrator.report.top_head import head_lines
from orchestrator.report.top_screen import COLUMNS, SORTS, ScreenLine, Table, TableName, Tone, table

REST_SECONDS = 1.0
# So reading takes a tenth of one core at most, however large the sweep is.
RESTS_PER_READING = 10.0
LONGEST_REST_SECONDS = 10.0
# Longer texts in a table are cut: a failure may quote much output.
MOST_CHARACTERS = 300

# Colours of any terminal, by their names; a word says the same each time.
_STYLES = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.WARNING: "yellow",
    Tone.BAD: "red",
    Tone.BUSY: "cyan",
    Tone.DIM: "dim",
}


class Asks(Protocol):
    """The requests that keys make: `Requests`, or a test's."""

    def stop(self, *, drain: bool) -> str: ...

    def retry(self, trial_id: int) -> str: ...

    def enqueue(self, layout: str, cell: str) -> str: ...


class TopApp(App[None]):
    """Shows a sweep until `q`."""

    CSS = """
    #head { height: auto; max-height: 6; }
    #tabs { height: 1; }
    #body { height: 1fr; }
    DataTable { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    DataTable:nocolor:focus > .datatable--cursor { text-style: reverse; }
    #hint { height: auto; max-height: 2; }
    ModalScreen { align: center middle; }
    .window { width: 70; max-width: 95%; height: auto; border: solid white; padding: 0 1; }
    .page { width: 100%; height: 100%; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('cells')", "Cells", show=False),
        Binding("2", "show('running')", "Running", show=False),
        Binding("3", "show('queue')", "Queue", show=False),
        Binding("4", "show('trials')", "Trials", show=False),
        Binding("5", "show('failures')", "Failures", show=False),
        Binding("tab", "next_table", "Next", show=False, priority=True),
        Binding("d", "drain", "Drain"),
        Binding("c", "cancel", "Cancel"),
        Binding("r", "retry", "Retry"),
        Binding("e", "enqueue", "Enqueue"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("enter", "detail", "Detail"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, store: LiveStore, asks: Asks) -> None:
        # The terminal's own 16 colours. Without this, NO_COLOR would turn them into black on black.
        super().__init__(ansi_color=True)
        self._store, self._asks = store, asks
        self._reading: Reading | None = None
        self._trouble: str | None = None  # why the store does not answer
        self._answered_at = time.monotonic()
        self._tab = TableName.CELLS
        self._sorts = {name: orders[0] for name, orders in SORTS.items()}
        self._matching = dict.fromkeys(TableName, "")
        self._shown: Table | None = None
        self._is_over = threading.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tabs")
        with Vertical(id="body"):
            yield DataTable[Text](cursor_type="row")
        yield Static(id="hint")
        yield Footer()

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        self._begin_table()
        self._table.focus()
        self._draw()
        self.run_worker(self._read_on, thread=True, name="reading")

    def on_unmount(self) -> None:
        self._is_over.set()

    # -- reading ---------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Read until the screen is closed. Runs in a thread of its own."""
        while not self._is_over.is_set():
            rest = REST_SECONDS
            try:
                reading = self._store.read()
            except SweepError as exc:
                self._tell(partial(self._note_trouble, str(exc)))
            else:
                rest = max(rest, RESTS_PER_READING * reading.seconds)
                self._tell(partial(self._note_reading, reading))
            self._is_over.wait(min(rest, LONGEST_REST_SECONDS))
        self._store.close()

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self.call_from_thread(what)
        except RuntimeError:  # the screen was closed meanwhile
            self._is_over.set()

    def _note_reading(self, reading: Reading) -> None:
        self._reading, self._trouble = reading, None
        self._answered_at = time.monotonic()
        self._draw_unless_closing()

    def _note_trouble(self, why: str) -> None:
        self._trouble = why
        self._draw_unless_closing()

    def _draw_unless_closing(self) -> None:
        # The screen loses its widgets, one after another, some time before the app is over.
        with suppress(NoMatches):
            if self.screen_stack:
                self._draw()

    # -- drawing ---------------------------------------------------------------------------------

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    def _draw(self) -> None:
        head = Text()
        reading = self._reading
        if reading is not None:
            for text, tone in head_lines(reading.rows, reading.at):
                head.append(f"{plain(text)}\n", _STYLES[tone])
        elif self._trouble is None:
            head.append("Reading the store ...\n")
        if self._trouble is not None:
            since = duration(time.monotonic() - self._answered_at)
            old = f" for {since}; below is what it said last" if reading is not None else ""
            why = plain(self._trouble)[:MOST_CHARACTERS]
            head.append(f"The store does not answer{old}: {why}\n", "bold red")
        head.rstrip()
        self._screen_static("#head").update(head)
        if reading is not None:
            self._draw_table(reading)
        self._draw_tabs()

    def _draw_tabs(self) -> None:
        tabs = Text(no_wrap=True)
        for number, name in enumerate(TableName, 1):
            is_shown = name is self._tab
            tabs.append(f" {number} {name} ", "bold reverse" if is_shown else "")
            tabs.append(" ")
        self._screen_static("#tabs").update(tabs)
        hint = [f"by {self._sorts[self._tab]}"]
        if matching := self._matching[self._tab]:
            hint.append(f"with {plain(matching)!r}")
        if self._shown is not None:
            hint.append(f"{self._shown.num_matching:,} lines")
            if self._shown.num_hidden:
                hint.append(f"the last {self._shown.num_hidden:,} are not shown: filter with /")
        self._screen_static("#hint").update(Text(", ".join(hint), style="dim"))

    def _screen_static(self, query: str) -> Static:
        # A window may be on top.
        return self.screen_stack[0].query_one(query, Static)

    def _draw_table(self, reading: Reading) -> None:
        found = table(
            self._tab,
            reading.rows,
            now=reading.at,
            progress=reading.progress,
            sort=self._sorts[self._tab],
            matching=self._matching[self._tab],
        )
        widget = self.screen_stack[0].query_one(DataTable)
        before, self._shown = self._shown, found
        if before is not None and before.lines == found.lines:
            return
        keys = [line.key for line in found.lines]
        if before is not None and [line.key for line in before.lines] == keys:
            columns = list(widget.columns)
            for old, new in zip(before.lines, found.lines, strict=True):
                for place, cell in enumerate(_cells(new)):
                    if old.tone is not new.tone or old.texts[place] != new.texts[place]:
                        widget.update_cell(new.key, columns[place], cell, update_width=True)
            return
        at = None
        if before is not None and 0 <= widget.cursor_row < len(before.lines):
            at = before.lines[widget.cursor_row].key
        scrolled = widget.scroll_offset
        widget.clear()
        for line in found.lines:
            widget.add_row(*_cells(line), key=line.key)
        if at in keys:
            widget.move_cursor(row=keys.index(at), animate=False, scroll=False)
            widget.scroll_to(scrolled.x, scrolled.y, animate=False)

    def _begin_table(self) -> None:
        """Give the widget the columns of another table."""
        widget = self.screen_stack[0].query_one(DataTable)
        widget.clear(columns=True)
        self._shown = None
        for title in COLUMNS[self._tab]:
            widget.add_column(Text(title, style="bold"))

    # -- keys ------------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        self._tab = TableName(name)
        self._begin_table()
        self._draw()

    def action_next_table(self) -> None:
        names = list(TableName)
        self.action_show(names[(names.index(self._tab) + 1) % len(names)])

    def action_sort(self) -> None:
        orders = SORTS[self._tab]
        place = orders.index(self._sorts[self._tab]) + 1
        self._sorts[self._tab] = orders[place % len(orders)]
        self._draw()

    def action_filter(self) -> None:
        def take(text: str | None) -> None:
            if text is not None:
                self._matching[self._tab] = text
                self._draw()

        question = "Show only lines that contain (empty: all):"
        self.push_screen(Entry(question, self._matching[self._tab]), take)

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        self.action_detail()

    def action_detail(self) -> None:
        line = self._line()
        if line is None or line.trial_id is None:
            self._say("No trial is chosen.")
            return
        trial_id, reading = line.trial_id, self._reading
        is_worked_on = reading is None or reading.rows.status.is_worked_on

        def read() -> None:
            try:
                detail = self._store.trial(trial_id)
            except SweepError as exc:
                self._tell(partial(self._say, str(exc), is_bad=True))
            else:
                self._tell(lambda: self._show_detail(Detail(detail, is_worked_on=is_worked_on)))

        self.run_worker(read, thread=True)

    def _show_detail(self, window: Detail) -> None:
        self.push_screen(window)

    def action_drain(self) -> None:
        self._ask(
            "Drain: let running trials finish, and start no new ones? `sweep run` continues later.",
            partial(self._asks.stop, drain=True),
        )

    def action_cancel(self) -> None:
        self._ask(
            "Cancel: end the running trials now? The next `sweep run` measures them again.",
            partial(self._asks.stop, drain=False),
        )

    def action_retry(self) -> None:
        line = self._line()
        if line is None or line.trial_id is None:
            self._say("No trial is chosen.")
            return
        self._ask(
            f"Measure trial {line.trial_id} again? Its numbers so far no longer count, and layouts"
            " that it ruled out wait again too.",
            partial(self._asks.retry, line.trial_id),
        )

    def action_enqueue(self) -> None:
        """Ask for a layout, of the cell under the cursor."""
        line, titles = self._line(), COLUMNS[self._tab]
        if line is None or "cell" not in titles:
            self._say("Choose a line that names a cell: key 1.")
            return
        cell = line.texts[titles.index("cell")]

        def take(layout: str | None) -> None:
            if layout and layout.strip():
                self._ask(
                    f"Measure {layout.strip()} in {cell} next?",
                    partial(self._asks.enqueue, layout.strip(), cell),
                )

        question = f"Layout to measure next in {cell}, as in mbs=4 recompute=full:"
        self.push_screen(Entry(question), take)

    def _line(self) -> ScreenLine | None:
        """The line under the cursor."""
        lines = self._shown.lines if self._shown is not None else ()
        row = self._table.cursor_row
        return lines[row] if 0 <= row < len(lines) else None

    def _ask(self, question: str, change: Callable[[], str]) -> None:
        """Ask, then change in a thread: a database may take its time."""

        def work() -> None:
            try:
                answer, is_bad = change(), False
            except SweepError as exc:
                answer, is_bad = str(exc), True
            self._tell(partial(self._say, answer, is_bad=is_bad))

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.run_worker(work, thread=True)

        self.push_screen(Question(question), answered)

    def _say(self, text: str, *, is_bad: bool = False) -> None:
        self.notify(
            plain(text)[:MOST_CHARACTERS],
            severity="error" if is_bad else "information",
            timeout=8,
            markup=False,
        )


def _cells(line: ScreenLine) -> list[Text]:
    """The texts of a line as text: what others wrote is no markup and no terminal code."""
    style = _STYLES[line.tone]
    return [Text(plain(text)[:MOST_CHARACTERS], style=style, no_wrap=True) for text in line.texts]

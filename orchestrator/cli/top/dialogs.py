"""The windows over the screen: a question before a change, a line of text, a trial."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from orchestrator.cli.terminal.output import plain
from orchestrator.report import trial_facts
from orchestrator.report.trial_facts import Fact

if TYPE_CHECKING:
    from db.read.rows import TrialDetail


class Question(ModalScreen[bool]):
    """Asks before something is changed. Only `y` says yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)", "Yes"),
        ("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Text(plain(self._text)))
            yield Static(Text("y: yes   n: no", style="bold"))

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class Entry(ModalScreen[str | None]):
    """Asks for a line of text. Escape gives none."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "Back")]

    def __init__(self, question: str, text: str = "") -> None:
        super().__init__()
        self._question, self._text = question, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(Text(plain(self._question)))
            yield Input(self._text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Detail(ModalScreen[None]):
    """Everything known about a trial, as in `sweep show`."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss(None)", "Back")]

    def __init__(self, detail: TrialDetail, *, is_worked_on: bool) -> None:
        super().__init__()
        self._detail, self._is_worked_on = detail, is_worked_on

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="page"):
            yield Static(detail_text(self._detail, is_worked_on=self._is_worked_on))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def detail_text(detail: TrialDetail, *, is_worked_on: bool) -> Text:
    """The same facts as `sweep show`, as one text.

    `is_worked_on`: its sweep has an orchestrator.
    """
    text = Text()

    def add(line: str, style: str = "") -> None:
        text.append(f"{plain(line)}\n", style)

    def add_facts(facts: Iterable[Fact]) -> None:
        for name, value in facts:
            if value:
                text.append(f"  {name:<18}", "dim")
                text.append(f"{plain(str(value))}\n")

    title = trial_facts.title(detail.trial, is_worked_on=is_worked_on)
    add(f"{title}      (Escape: back)", "bold")
    add_facts(trial_facts.head_facts(detail, is_worked_on=is_worked_on))
    add("")
    add(f"  {'':<16}" + "".join(f"{name:>20}" for name in trial_facts.COMPARED_COLUMNS), "dim")
    for name, *values in trial_facts.compared_rows(detail.trial):
        add(f"  {name:<16}" + "".join(f"{value:>20}" for value in values))
    for attempt in detail.attempts:
        add("")
        add(trial_facts.attempt_title(attempt, detail.attempts), "bold")
        add_facts(trial_facts.attempt_facts(attempt, detail.cell.cell.num_gpus))
        lines = trial_facts.log_lines(attempt)
        for line in ["  last lines:", *(f"    {line}" for line in lines)] if lines else []:
            add(line)
    add("")
    add("Events", "bold")
    for row in trial_facts.event_rows(detail):
        add("  " + "  ".join(part for part in row if part))
    return text

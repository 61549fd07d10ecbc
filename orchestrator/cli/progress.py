"""Live progress of a sweep on stderr: a small panel on a terminal, plain lines elsewhere. Draws snapshots; decides nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cli.output import plain
from orchestrator.core.lifecycle import TrialState
from orchestrator.core.spec import Objective
from orchestrator.progress import Snapshot

REDRAW_SECONDS = 0.2
QUIET_SECONDS = 30.0  # elsewhere than on a terminal: a line at least so often while a trial runs
NUM_RUNNING_SHOWN = 6


class Progress:
    """Use as a context manager; call `show` with every snapshot, as often as it comes."""

    def __init__(self, *, objective: Objective, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal and not quiet else None
        self._quiet = quiet
        self._objective = objective
        self._last = "starting"
        self._drawn = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Say something now, unless quiet."""
        if not self._quiet:
            self._console.print(Text(text, style="dim"), soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something once, above the panel. Safe in a signal handler: it is printed with the next snapshot."""
        self._notes.append(text)

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        notes, self._notes = self._notes, []
        for text in notes:
            self._console.print(Text(text, style="yellow"), soft_wrap=True)
        ended = [plain(text) for text in snapshot.ended]  # they may quote what a rank said
        self._last = next(reversed(ended), self._last)
        if self._quiet:
            return
        if self._live is not None:
            for text in ended:
                self._live.console.print(Text(text, style="dim"), soft_wrap=True)
            if ended or now - self._drawn > REDRAW_SECONDS:
                self._live.update(_panel(snapshot, self._objective), refresh=True)
                self._drawn = now
        elif ended or now - self._drawn > QUIET_SECONDS:
            self._drawn = now
            for text in ended or [self._last]:
                print(f"[{_clock(snapshot.seconds)}] {_counts(snapshot)} | {text}", file=sys.stderr, flush=True)  # noqa: T201


def _panel(snapshot: Snapshot, objective: Objective) -> Group:
    table = Table.grid(padding=(0, 2))
    for running in snapshot.running[:NUM_RUNNING_SHOWN]:
        where = f"{running.phase} step {running.step}" if running.phase is not None else "starting"
        table.add_row(
            Text(f"  trial {running.trial_id}"), Text(f"{running.cell.num_gpus} GPU"), Text(running.layout.short), Text(where, style="cyan")
        )
    if len(snapshot.running) > NUM_RUNNING_SHOWN:
        table.add_row(Text(f"  and {len(snapshot.running) - NUM_RUNNING_SHOWN} more"))
    for cell, (layout, value) in list(snapshot.best.items())[:NUM_RUNNING_SHOWN]:
        shown = f"{value:.4g} s a step" if objective is Objective.STEP_SECONDS else f"{value:,.0f} tokens/s/GPU"
        table.add_row(Text("  best", style="green"), Text(cell.key), Text(layout.short), Text(shown, style="bold green"))
    head = Text(
        f"{snapshot.sweep}  {_clock(snapshot.seconds)}  {_counts(snapshot)}{_eta(snapshot)}  {snapshot.gpu_seconds / 3600:.3g} GPU-hours"
    )
    return Group(head, table)


def _counts(snapshot: Snapshot) -> str:
    count = snapshot.counts.get
    parts = [f"{count(TrialState.MEASURED, 0)} measured", f"{len(snapshot.running)} running", f"{snapshot.untried} untried"]
    labels = {TrialState.OUT_OF_MEMORY: "out of memory", TrialState.PRUNED: "pruned", TrialState.FAILED: "failed"}
    parts += [f"{count(state, 0)} {label}" for state, label in labels.items() if count(state, 0)]
    return ", ".join(parts)


def _eta(snapshot: Snapshot) -> str:
    """What is left at the pace so far; an upper bound, since a search may stop before every layout is tried."""
    if snapshot.launched_now < 3 or not snapshot.untried:
        return ""
    return f"  at most {_clock(snapshot.seconds / snapshot.launched_now * snapshot.untried)} more"


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"

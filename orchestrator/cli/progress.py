"""Live progress of a sweep on stderr: a small panel on a terminal, plain lines elsewhere. Draws snapshots; decides nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cli.output import plain
from orchestrator.core.sweepfile.sections import Objective
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report.quantities import counted
from orchestrator.sweep.progress import Running, Snapshot, TimeLeft

REDRAW_SECONDS = 0.2
QUIET_SECONDS = 30.0  # elsewhere than on a terminal: a line at least so often while a trial runs
NUM_RUNNING_SHOWN = 6
_LABELS = {
    TrialState.MEASURED: "measured",
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.PRUNED: "pruned",
    TrialState.FAILED: "failed",
}


class Progress:
    """Use as a context manager; call `show` with every snapshot, as often as it comes."""

    def __init__(self, *, objective: Objective, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True)
            if self._console.is_terminal and not quiet
            else None
        )
        self._quiet = quiet
        self._objective = objective
        self._drawn = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if self._quiet:
            return
        if self._live is not None:
            for _, text in _news(snapshot, with_counts=False):
                self._live.console.print(Text(text, style="dim"), soft_wrap=True)
            if snapshot.ended or snapshot.searched or now - self._drawn > REDRAW_SECONDS:
                self._live.update(_panel(snapshot, self._objective), refresh=True)
                self._drawn = now
            return
        for seconds, text in _news(snapshot, with_counts=True):
            _print(seconds, text)
        if not snapshot.ended and now - self._drawn > QUIET_SECONDS:
            counts = _counts(snapshot, snapshot.num_launched, snapshot.counts)
            _print(snapshot.seconds, f"{counts}{_left(snapshot.left)} | {_what_runs(snapshot)}")
            self._drawn = now
        if snapshot.ended:
            self._drawn = now


def _news(snapshot: Snapshot, *, with_counts: bool) -> list[tuple[float, str]]:
    """What happened since the last snapshot, in order: seconds since the call began, and a line."""
    news = []
    for place, one in enumerate(snapshot.ended, 1):
        text = plain(one.text)  # it may quote what a rank said
        if with_counts:
            left = _left(snapshot.left) if place == len(snapshot.ended) else ""
            text = f"{_counts(snapshot, one.num_launched, one.counts)}{_at_once(one.num_running)}{left} | {text}"
        news.append((one.seconds, text))
    for search in snapshot.searched:
        untried = f"; {counted(search.untried, 'layout')} never tried" if search.untried else ""
        news.append(
            (
                search.seconds,
                f"{search.cell.key}: no new layout is started: {search.reason}{untried}",
            )
        )
    return sorted(news, key=lambda item: item[0])


def _panel(snapshot: Snapshot, objective: Objective) -> Group:
    table = Table.grid(padding=(0, 2))
    for running in snapshot.running[:NUM_RUNNING_SHOWN]:
        where = _where(running)
        table.add_row(
            Text(f"  trial {running.trial_id}"),
            Text(f"{running.cell.num_gpus} GPU"),
            Text(running.layout.short),
            Text(where, style="cyan"),
        )
    if len(snapshot.running) > NUM_RUNNING_SHOWN:
        table.add_row(Text(f"  and {len(snapshot.running) - NUM_RUNNING_SHOWN} more"))
    for cell, (layout, value) in list(snapshot.best.items())[:NUM_RUNNING_SHOWN]:
        shown = (
            f"{value:.4g} s a step"
            if objective is Objective.STEP_SECONDS
            else f"{value:,.0f} tokens/s/GPU"
        )
        table.add_row(
            Text("  best", style="green"),
            Text(cell.key),
            Text(layout.short),
            Text(shown, style="bold green"),
        )
    head = Text(
        f"{snapshot.sweep}  {_clock(snapshot.seconds)}  {_counts(snapshot, snapshot.num_launched, snapshot.counts)}{_left(snapshot.left)}  {snapshot.gpu_seconds / 3600:.3g} GPU-hours"
    )
    return Group(head, table)


def _counts(snapshot: Snapshot, num_launched: int, counts: Mapping[TrialState, int]) -> str:
    """`3 of at most 10 launched: 2 measured, 1 out of memory`."""
    parts = [
        f"{counts[state]:,} {label}" for state, label in _LABELS.items() if counts.get(state, 0)
    ]
    of_them = f": {', '.join(parts)}" if parts else ""
    return f"{num_launched:,} of at most {snapshot.at_most:,} launched{of_them}"


def _at_once(number: int) -> str:
    return f", {number} running" if number else ""


def _what_runs(snapshot: Snapshot) -> str:
    """`trial 4, 1 GPU, dp1 mbs8 ga1 none fp32: first step`, and how many more."""
    if not snapshot.running:
        return "nothing runs now"
    first, more = snapshot.running[0], len(snapshot.running) - 1
    gpus = counted(first.cell.num_gpus, "GPU")
    return f"trial {first.trial_id}, {gpus}, {first.layout.short}: {_where(first)}{f'; and {more} more' if more else ''}"


def _where(running: Running) -> str:
    if running.phase is None:
        return "starting"
    return f"{running.phase.replace('_', ' ')}{f', step {running.step}' if running.step else ''}"


def _left(left: TimeLeft | None) -> str:
    """`, about 4 min left`, `, 1 min to 4 min left`, `, at most 4 min left`; nothing where nothing tells."""
    if left is None or left.most < 1:
        return ""
    most, least = _roughly(left.most), _roughly(left.least)
    if most == least:
        return f", about {most} left"
    return f", at most {most} left" if left.least < left.most / 10 else f", {least} to {most} left"


def _roughly(seconds: float) -> str:
    """No more digits than an estimate has: `20 s`, `4 min`, `2 h 10 min`, `3 d`."""
    if seconds < 55:
        return f"{max(10 * round(seconds / 10), 10)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60 // 10 * 10:02d} min"
    return f"{round(minutes / 1440)} d"


def _print(seconds: float, text: str) -> None:
    print(f"[{_clock(seconds)}] {text}", file=sys.stderr, flush=True)  # noqa: T201


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"

"""Live progress of a sweep on stderr: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cli.terminal.output import plain, shortened
from orchestrator.core.sweepfile.objective import Objective
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.purpose import REASONS, REPEATS
from orchestrator.report.quantities import counted, gpu_hours
from orchestrator.report.time_left import left_text
from orchestrator.sweep.progress import Running, Snapshot

REDRAW_SECONDS = 0.2
# Longest time without a line while a trial runs and stderr is no terminal.
MAX_SECONDS_WITHOUT_A_LINE = 30.0
NUM_RUNNING_SHOWN = 6
_LABELS = {
    TrialState.MEASURED: "measured",
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.PRUNED: "pruned",
    TrialState.FAILED: "failed",
}


class Progress:
    """Shows snapshots. Use it as a context manager, and call `show` with every snapshot."""

    def __init__(self, *, objective: Objective, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._quiet = quiet
        self._objective = objective
        self._drawn = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a text now, unless quiet."""
        if not self._quiet:
            self._console.print(Text(shortened(text), style="dim"), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a text with the next snapshot, above the panel. Safe in a signal handler."""
        self._notes.append(text)

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        notes, self._notes = self._notes, []
        for text in notes:
            self._console.print(Text(text, style="yellow"), soft_wrap=True)
        if self._quiet:
            return
        if self._live is not None:
            for _, text in _events(snapshot, with_counts=False):
                self._live.console.print(Text(text, style="dim"), soft_wrap=True)
            if snapshot.ended or snapshot.searched or now - self._drawn > REDRAW_SECONDS:
                self._live.update(_panel(snapshot, self._objective), refresh=True)
                self._drawn = now
            return
        for seconds, text in _events(snapshot, with_counts=True):
            _print(seconds, text)
        if not snapshot.ended and now - self._drawn > MAX_SECONDS_WITHOUT_A_LINE:
            counts = _counts_now(snapshot)
            _print(snapshot.seconds, f"{counts}{left_text(snapshot.left)} | {_what_runs(snapshot)}")
            self._drawn = now
        if snapshot.ended:
            self._drawn = now


def _events(snapshot: Snapshot, *, with_counts: bool) -> list[tuple[float, str]]:
    """Return a line for each change since the last snapshot, with seconds since the call began."""
    events = []
    for place, one in enumerate(snapshot.ended, 1):
        # It may quote the output of a rank.
        text = shortened(plain(one.text))
        if with_counts:
            counts = _counts(snapshot, one.num_launched, one.counts, one.num_repeats)
            running = f", {one.num_running} running" if one.num_running else ""
            left = left_text(snapshot.left) if place == len(snapshot.ended) else ""
            text = f"{counts}{running}{left} | {text}"
        events.append((one.seconds, text))
    for search in snapshot.searched:
        untried = f"; {counted(search.untried, 'layout')} never tried" if search.untried else ""
        text = f"{search.cell.key}: no new layout is started: {search.reason}{untried}"
        events.append((search.seconds, text))
    return sorted(events, key=lambda item: item[0])


def _panel(snapshot: Snapshot, objective: Objective) -> Group:
    table = Table.grid(padding=(0, 2))
    for running in snapshot.running[:NUM_RUNNING_SHOWN]:
        texts = [
            f"  trial {running.trial_id}",
            f"{running.cell.num_gpus} GPU",
            running.layout.short,
        ]
        table.add_row(*map(Text, texts), Text(_where(running), style="cyan"))
    if len(snapshot.running) > NUM_RUNNING_SHOWN:
        table.add_row(Text(f"  and {len(snapshot.running) - NUM_RUNNING_SHOWN} more"))
    for cell, (layout, value) in list(snapshot.best.items())[:NUM_RUNNING_SHOWN]:
        speed = f"{value:,.0f} tokens/s/GPU"
        if objective is Objective.STEP_SECONDS:
            speed = f"{value:.4g} s a step"
        best, place = Text("  best", style="green"), (Text(cell.key), Text(layout.short))
        table.add_row(best, *place, Text(speed, style="bold green"))
    counts = f"{_counts_now(snapshot)}{left_text(snapshot.left)}"
    hours = f"{gpu_hours(snapshot.gpu_seconds)} GPU-hours"
    head = f"{snapshot.sweep}  {_clock(snapshot.seconds)}  {counts}  {hours}"
    return Group(Text(head), table)


def _counts_now(snapshot: Snapshot) -> str:
    return _counts(snapshot, snapshot.num_launched, snapshot.counts, snapshot.num_repeats)


def _counts(
    snapshot: Snapshot, num_launched: int, counts: Mapping[TrialState, int], num_repeats: int
) -> str:
    """`3 of at most 10 launched: 2 measured; 1 repeat so far, up to 6 more expected`.

    How many more depends on what each repeat shows of the machine, so no total is promised.
    """
    parts = [
        f"{counts[state]:,} {label}" for state, label in _LABELS.items() if counts.get(state, 0)
    ]
    of_them = f": {', '.join(parts)}" if parts else ""
    repeats = ""
    if num_repeats or any(one.purpose in REPEATS for one in snapshot.running):
        repeats = f"; {counted(num_repeats, 'repeat')} so far"
        if num_more := max(snapshot.most_repeats - num_repeats, 0):
            repeats += f", up to {num_more:,} more expected"
    return f"{num_launched:,} of at most {snapshot.at_most:,} launched{of_them}{repeats}"


def _what_runs(snapshot: Snapshot) -> str:
    """`trial 4, 1 GPU, dp1 mbs8 ga1 none fp32: first step`, and how many more."""
    if not snapshot.running:
        return "nothing runs now"
    first, more = snapshot.running[0], len(snapshot.running) - 1
    gpus = counted(first.cell.num_gpus, "GPU")
    also = f"; and {more} more" if more else ""
    again = f" again {REASONS[first.purpose]}" if first.purpose in REASONS else ""
    return f"trial {first.trial_id}{again}, {gpus}, {first.layout.short}: {_where(first)}{also}"


def _where(running: Running) -> str:
    if running.phase is None:
        return "starting"
    return f"{running.phase.replace('_', ' ')}{f', step {running.step}' if running.step else ''}"


def _print(seconds: float, text: str) -> None:
    print(f"[{_clock(seconds)}] {text}", file=sys.stderr, flush=True)  # noqa: T201


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"

"""The tables of `sweep top` and `sweep ui`, from the rows of a sweep.

Pure functions of rows, sort orders and filters. They know no terminal, so each text is checked
without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from orchestrator.core.trial.lifecycle import TrialEvent, TrialState
from orchestrator.core.trial.peak_memory import needed_bytes
from orchestrator.core.trial.purpose import Purpose
from orchestrator.report import quantities as show
from orchestrator.report.remarks import why_no_best
from orchestrator.report.sweep_status import COUNTED, PhaseAndStep, SweepStatus, phase_text
from orchestrator.report.trial_line import layout_text, memory_text, short

if TYPE_CHECKING:
    from db.read.rows import CellStatus, EventRow, TrialRow, UnderWayRow
    from orchestrator.report.live_sweep import LiveRows

# Most rows of a table. More would make a terminal over ssh slow, and nobody scrolls that far.
MOST_LINES = 500
NUM_NODES_NAMED = 2


class Tone(StrEnum):
    """The subject of a text; a terminal may give each a colour."""

    PLAIN = "plain"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    BUSY = "busy"
    DIM = "dim"


STATE_TONES: Mapping[str, Tone] = {
    TrialState.MEASURED: Tone.GOOD,
    TrialState.OUT_OF_MEMORY: Tone.WARNING,
    TrialState.FAILED: Tone.BAD,
    TrialState.LAUNCHING: Tone.BUSY,
    TrialState.RUNNING: Tone.BUSY,
    TrialState.PRUNED: Tone.DIM,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScreenLine:
    """A line of a table. `trial_id`: the trial that it is about, if it is about one."""

    key: str  # the same at each reading
    texts: tuple[str, ...]  # by the columns of its table
    tone: Tone = Tone.PLAIN
    trial_id: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of the screen; `num_hidden` lines are left out, since there are too many."""

    lines: Sequence[ScreenLine]
    num_matching: int
    num_hidden: int = 0


class TableName(StrEnum):
    CELLS = "cells"
    RUNNING = "running"
    QUEUE = "queue"
    TRIALS = "trials"
    FAILURES = "failures"


COLUMNS: Mapping[TableName, tuple[str, ...]] = {
    TableName.CELLS: ("cell", "tokens/s/GPU", "MFU", "layout", "search", *COUNTED),
    TableName.RUNNING: ("trial", "phase", "for", "nodes", "GPUs", "layout", "cell", "made for"),
    TableName.QUEUE: ("trial", "attempts", "last failure", "layout", "cell"),
    TableName.TRIALS: (
        "trial",
        "state",
        "tokens/s/GPU",
        "±95%",
        "MFU",
        "peak memory",
        "layout",
        "cell",
    ),
    TableName.FAILURES: ("at (UTC)", "trial", "attempt", "kind", "message"),
}
# The orders of each table, the first by default.
SORTS: Mapping[TableName, tuple[str, ...]] = {
    TableName.CELLS: ("file", "best", "failed"),
    TableName.RUNNING: ("trial", "longest", "cell"),
    TableName.QUEUE: ("trial", "attempts"),
    TableName.TRIALS: ("speed", "trial", "memory", "newest"),
    TableName.FAILURES: ("newest", "trial", "kind"),
}


def table(
    name: TableName,
    rows: LiveRows,
    *,
    now: datetime,
    progress: Mapping[int, PhaseAndStep],
    sort: str | None = None,
    matching: str = "",
    most: int = MOST_LINES,
) -> Table:
    """The lines of a table in an order of SORTS, those that contain a text in any column.

    `progress`: of the trials under way for which it is known. `most`: so many lines at most.
    """
    order = sort if sort in SORTS[name] else SORTS[name][0]
    match name:
        case TableName.CELLS:
            return _bounded(*_cell_lines(rows.status, order), matching, most)
        case TableName.RUNNING:
            return _bounded(*_running_lines(rows.status, order, now, progress), matching, most)
        case TableName.QUEUE:
            return _bounded(*_queue_lines(rows, order), matching, most)
        case TableName.TRIALS:
            return _bounded(*_trial_lines(rows, order), matching, most)
        case TableName.FAILURES:
            return _bounded(*_failure_lines(rows.failures, order), matching, most)


def status_counts(
    num_trials: Mapping[TrialState, int], running: Sequence[UnderWayRow]
) -> dict[str, int]:
    """The numbers of COUNTED. A trial that is measured again counts twice: it keeps its state."""
    counts = {title: sum(num_trials[one] for one in states) for title, states in COUNTED.items()}
    return counts | {"under way": len(running)}


# What lines are about, in their order, and the line of each.
_Lines = tuple[Sequence[Any], Callable[[Any], ScreenLine]]


def _bounded(
    about: Sequence[Any], line_of: Callable[[Any], ScreenLine], matching: str, most: int
) -> Table:
    """The first lines that match; the others are only counted.

    Texts are made of the lines that are shown alone, unless they are searched.
    """
    wanted = matching.strip().casefold()
    if not wanted:
        shown = [line_of(one) for one in about[:most]]
        return Table(lines=shown, num_matching=len(about), num_hidden=len(about) - len(shown))
    found = [
        line
        for line in map(line_of, about)
        if any(wanted in text.casefold() for text in line.texts)
    ]
    return Table(lines=found[:most], num_matching=len(found), num_hidden=max(len(found) - most, 0))


def _cell_lines(status: SweepStatus, order: str) -> _Lines:
    keys: Mapping[str, Callable[[CellStatus], float]] = {
        "file": lambda cell: cell.cell.id,
        "best": lambda cell: -((cell.best and cell.best.tokens_per_second_per_gpu) or 0.0),
        "failed": lambda cell: -cell.num_trials[TrialState.FAILED],
    }
    running: dict[int, list[UnderWayRow]] = {}
    for one in status.running:
        running.setdefault(one.cell_id, []).append(one)

    def line(cell: CellStatus) -> ScreenLine:
        best, under_way = cell.best, running.get(cell.cell.id, [])
        counts = status_counts(cell.num_trials, under_way)
        return ScreenLine(
            key=f"cell {cell.cell.id}",
            texts=(
                cell.cell.cell.key,
                show.tokens_rate(best.tokens_per_second_per_gpu if best else None),
                show.percent(best.mfu if best else None),
                layout_text(best) if best is not None else why_no_best(cell),
                _search_text(status, cell, under_way),
                *(f"{number:,}" for number in counts.values()),
            ),
            tone=Tone.PLAIN if best is not None else Tone.WARNING,
            trial_id=best.id if best is not None else None,
        )

    return sorted(status.cells, key=keys[order]), line


def _search_text(status: SweepStatus, cell: CellStatus, running: Sequence[UnderWayRow]) -> str:
    """Describe what the search of a cell does, or why it ended."""
    if not status.is_worked_on:
        return cell.cell.stop_reason or "not finished"
    if not running:
        return "nothing runs now"
    if all(one.purpose is Purpose.CONFIRMATION for one in running):
        return "confirms its best"
    return "searches"


def _running_lines(
    status: SweepStatus, order: str, now: datetime, progress: Mapping[int, PhaseAndStep]
) -> _Lines:
    keys: Mapping[str, Callable[[UnderWayRow], Any]] = {
        "trial": lambda one: one.trial_id,
        "longest": lambda one: one.since,
        "cell": lambda one: (one.cell, one.trial_id),
    }
    is_worked_on = status.is_worked_on

    def line(one: UnderWayRow) -> ScreenLine:
        where = progress.get(one.trial_id, (None, None))
        return ScreenLine(
            key=f"trial {one.trial_id}",
            texts=(
                str(one.trial_id),
                phase_text(one, where, is_worked_on=is_worked_on),
                show.duration(max(show.age_seconds(one.since, now), 0.0)),
                nodes_text(one.nodes),
                str(one.num_gpus),
                short(one.layout),
                one.cell,
                str(one.purpose or show.UNKNOWN),
            ),
            tone=Tone.BUSY if is_worked_on else Tone.WARNING,
            trial_id=one.trial_id,
        )

    return sorted(status.running, key=keys[order]), line


def _queue_lines(rows: LiveRows, order: str) -> _Lines:
    waiting = [one for one in rows.trials.values() if one.state is TrialState.QUEUED]
    if order == "attempts":
        waiting.sort(key=lambda one: (-one.num_attempts, one.id))
    else:
        waiting.sort(key=lambda one: one.id)
    cells = _cell_keys(rows)

    def line(one: TrialRow) -> ScreenLine:
        failure = f"{one.failure_kind}: {one.failure_message}" if one.failure_kind else ""
        return ScreenLine(
            key=f"trial {one.id}",
            texts=(
                str(one.id),
                str(one.num_attempts),
                failure,
                one.layout.short,
                cells.get(one.cell_id, show.UNKNOWN),
            ),
            trial_id=one.id,
        )

    return waiting, line


def _trial_lines(rows: LiveRows, order: str) -> _Lines:
    keys: Mapping[str, Callable[[TrialRow], Any]] = {
        "speed": lambda one: (
            one.is_current_fingerprint is False,
            -(one.tokens_per_second_per_gpu or 0.0),
            one.id,
        ),
        "trial": lambda one: one.id,
        "memory": lambda one: (-(needed_bytes(one) or 0), one.id),
        "newest": lambda one: (-one.updated_at.timestamp(), -one.id),
    }
    cells = _cell_keys(rows)

    def line(one: TrialRow) -> ScreenLine:
        sure = show.confidence(one.relative_confidence)
        return ScreenLine(
            key=f"trial {one.id}",
            texts=(
                str(one.id),
                one.state.replace("_", " "),
                show.tokens_rate(one.tokens_per_second_per_gpu),
                f"{sure}?" if one.confident is False else sure,
                show.percent(one.mfu),
                memory_text(one),
                layout_text(one),
                cells.get(one.cell_id, show.UNKNOWN),
            ),
            tone=STATE_TONES.get(one.state, Tone.PLAIN),
            trial_id=one.id,
        )

    return sorted(rows.trials.values(), key=keys[order]), line


def _failure_lines(failures: Sequence[EventRow], order: str) -> _Lines:
    keys: Mapping[str, Callable[[EventRow], Any]] = {
        "newest": lambda one: -one.id,
        "trial": lambda one: (one.trial_id or 0, -one.id),
        "kind": lambda one: (_detail(one, "kind"), -one.id),
    }

    def line(one: EventRow) -> ScreenLine:
        is_result = one.event == TrialEvent.OUT_OF_MEMORY
        return ScreenLine(
            key=f"event {one.id}",
            texts=(
                f"{show.at(one.at)[11:]}",
                str(one.trial_id or show.UNKNOWN),
                str(one.attempt or show.UNKNOWN),
                _detail(one, "kind"),
                _detail(one, "message"),
            ),
            tone=Tone.WARNING if is_result else Tone.BAD,
            trial_id=one.trial_id,
        )

    return sorted(failures, key=keys[order]), line


def _detail(event: EventRow, name: str) -> str:
    return str((event.detail or {}).get(name, show.UNKNOWN))


def _cell_keys(rows: LiveRows) -> dict[int, str]:
    return {one.cell.id: one.cell.cell.key for one in rows.status.cells}


def nodes_text(nodes: Sequence[str]) -> str:
    """`node-a, node-b and 6 more`."""
    if not nodes:
        return show.UNKNOWN
    named = ", ".join(nodes[:NUM_NODES_NAMED])
    more = len(nodes) - NUM_NODES_NAMED
    return f"{named} and {more} more" if more > 0 else named

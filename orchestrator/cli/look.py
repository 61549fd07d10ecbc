"""The commands that look at sweeps: status, best, trials.

They read the store and print; nothing here changes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.chosen import SweepArgument, chosen_sweep, existing_store
from orchestrator.cli.output import (
    Cell,
    Column,
    DbOption,
    Format,
    FormatOption,
    JsonOption,
    chosen_format,
    examples,
    note,
    plain,
    write,
    write_json,
    write_line,
    write_records,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.layout import parse_key
from orchestrator.core.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report import records

if TYPE_CHECKING:
    from db.rows import CellRow, CellStatus, SweepRow, TrialRow
    from db.store import Store

WATCH_SECONDS = 2.0
STATE_STYLES: Mapping[str, str] = {
    TrialState.MEASURED: "green",
    TrialState.OUT_OF_MEMORY: "yellow",
    TrialState.FAILED: "red",
    TrialState.LAUNCHING: "cyan",
    TrialState.RUNNING: "cyan",
    TrialState.PRUNED: "dim",
    TrialState.CANCELLED: "dim",
}


class Sort(StrEnum):
    SPEED = "speed"  # fastest first, then what was not measured
    ID = "id"
    MEMORY = "memory"
    UPDATED = "updated"  # newest first


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(epilog=examples("sweep status", "sweep status 8b --watch", "sweep status --json"))(status)
    app.command(epilog=examples("sweep best", "sweep best 8b --top 5", "sweep best 8b --format csv > best.csv"))(best)
    app.command(
        epilog=examples(
            "sweep trials --state out_of_memory --state failed",
            "sweep trials 8b --cell 8gpu --sort memory --limit 20",
            "sweep trials --json",
        )
    )(trials)


def status(
    sweep: SweepArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how far a sweep is.

    Trials by state, the best so far, what runs now. Without a name, all sweeps of the store.
    """
    if watch and as_json:
        raise UsageInvalid("--watch is for people; a program asks again: sweep status --json")
    with existing_store(db) as store:
        while True:
            # A sweep that ends while watched is shown once more, as it ended.
            is_held = _show_status(store, sweep, db, as_json=as_json, clear=watch and sys.stdout.isatty())
            if not watch or not is_held:
                return
            time.sleep(WATCH_SECONDS)


def _show_status(store: Store, name: str | None, db: str | None, *, as_json: bool, clear: bool) -> bool:
    """Show one sweep, or all; return whether somebody works on any of them."""
    sweeps = store.sweeps()
    chosen = [chosen_sweep(store, name)] if name is not None or len(sweeps) == 1 else sweeps
    if clear:
        write("\x1b[H\x1b[2J")
    cells = {row.id: store.status(row.id) for row in chosen}
    running = {row.id: _running(db, row.id) for row in chosen}
    if as_json:
        write_json("status", {"sweeps": [_status_record(row, cells[row.id], running[row.id]) for row in chosen]})
    elif not chosen:
        write_line(f"{store.url} holds no sweep yet; begin one: sweep run FILE")
    elif len(chosen) == 1:
        _print_status(chosen[0], cells[chosen[0].id], running[chosen[0].id])
    else:
        _print_sweeps([(row, cells[row.id]) for row in chosen])
    return any(row.holder is not None for row in chosen)


def _running(db: str | None, sweep_id: int) -> list[dict[str, Any]]:
    """The trials in flight. By the index over states: reading every trial of a large sweep takes seconds."""
    from db import readonly  # needs SQLAlchemy, which takes 0.3 s to import

    found = readonly.query(
        db,
        "SELECT trial_id, cell, layout, state, num_attempts AS attempt, updated_at FROM v_trial"
        f" WHERE sweep_id = {sweep_id} AND state IN ('launching', 'running') ORDER BY trial_id",
    )
    now = datetime.now(tz=UTC)
    return [
        {**row, "seconds": max(show.age_seconds(moment, now), 0.0)}
        for row in (dict(zip(found.columns, values, strict=True)) for values in found.rows)
        for moment in (_moment(row.pop("updated_at")),)
    ]


def _moment(value: Any) -> datetime:
    """A time as the database's driver gives it: SQLite has only text."""
    return value if isinstance(value, datetime) else datetime.fromisoformat(str(value))


def _status_record(row: SweepRow, cells: Sequence[CellStatus], running: Sequence[Mapping[str, Any]]) -> records.Record:
    return {
        **records.sweep_record(row),
        "num_trials": _totals(cells),
        "gpu_seconds": sum(cell.gpu_seconds for cell in cells),
        "cells": [records.cell_status_record(cell, row.name) for cell in cells],
        "running": running,
    }


def _print_status(row: SweepRow, cells: Sequence[CellStatus], running: Sequence[Mapping[str, Any]]) -> None:
    write_line(f"Sweep {row.name}: {_state_text(row)}", style="bold")
    held = sum(cell.gpu_seconds for cell in cells)
    write_line(f"{sum(_totals(cells).values()):,} trials in {_counted(len(cells), 'cell')}, {show.gpu_hours(held)} GPU-hours held")
    if not cells:
        return
    write()
    shown = _shown_counts(cells)
    columns = [
        Column(title="cell", wrap=True),
        *(Column(title=title, right=True) for title in shown),
        Column(title="GPU-hours", right=True),
    ]
    write_table(columns, [[cell.cell.cell.key, *_count_cells(cell, shown), show.gpu_hours(cell.gpu_seconds)] for cell in cells])
    write()
    columns = [
        Column(title="best so far", right=True),
        Column(title="MFU", right=True),
        Column(title="layout", wrap=True),
        Column(title="cell", wrap=True),
    ]
    write_table(columns, [_best_so_far(cell) for cell in cells])
    if not running:
        return
    write()
    columns = [Column(title="running", right=True), Column(title="phase"), Column(title="for", right=True)]
    columns += [Column(title="layout", wrap=True), Column(title="cell", wrap=True)]
    write_table(
        columns,
        [
            [
                str(r["trial_id"]),
                _phase_text(str(r["state"]), is_held=row.holder is not None),
                show.duration(r["seconds"]),
                _short(str(r["layout"])),
                str(r["cell"]),
            ]
            for r in running
        ],
    )


_COUNTED: Mapping[str, tuple[TrialState, ...]] = {
    "measured": (TrialState.MEASURED,),
    "OOM": (TrialState.OUT_OF_MEMORY,),
    "failed": (TrialState.FAILED,),
    "pruned": (TrialState.PRUNED,),
    "cancelled": (TrialState.CANCELLED,),
    "in flight": (TrialState.LAUNCHING, TrialState.RUNNING),
    "waiting": (TrialState.QUEUED,),
}
_ALWAYS_SHOWN = ("measured", "OOM", "failed")


def _shown_counts(cells: Sequence[CellStatus]) -> list[str]:
    """The states worth a column: a sweep in which nothing was cancelled needs none for it."""
    totals = _totals(cells)
    return [title for title, states in _COUNTED.items() if title in _ALWAYS_SHOWN or any(totals[state] for state in states)]


def _count_cells(status: CellStatus, titles: Sequence[str]) -> list[Cell]:
    counts = {title: sum(status.num_trials.get(state, 0) for state in _COUNTED[title]) for title in titles}
    return [Cell(text=f"{n:,}", style=STATE_STYLES.get(_COUNTED[title][0], "") if n else "dim") for title, n in counts.items()]


def _best_so_far(status: CellStatus) -> list[str | Cell]:
    best = status.best
    if best is None:
        return [show.UNKNOWN, show.UNKNOWN, Cell(text=_why_no_best(status), style="yellow"), status.cell.cell.key]
    speed = f"{show.tokens_rate(best.tokens_per_second_per_gpu)} tokens/s/GPU"
    return [Cell(text=speed, style="green"), show.percent(best.mfu), _layout_text(best), status.cell.cell.key]


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _short(key: str) -> str:
    """A stored layout key in the form for tables."""
    try:
        return parse_key(key).short
    except ValueError:  # written by a later version
        return key


def _print_sweeps(rows: Sequence[tuple[SweepRow, Sequence[CellStatus]]]) -> None:
    shown = _shown_counts([cell for _, cells in rows for cell in cells])
    columns = [Column(title="sweep", wrap=True), Column(title="cells", right=True), *(Column(title=title, right=True) for title in shown)]
    columns += [Column(title="GPU-hours", right=True), Column(title="state", wrap=True)]
    lines = []
    for row, cells in rows:
        totals = _totals(cells)
        counts = [f"{sum(totals[state] for state in _COUNTED[title]):,}" for title in shown]
        lines.append([row.name, str(len(cells)), *counts, show.gpu_hours(sum(cell.gpu_seconds for cell in cells)), _state_text(row)])
    write_table(columns, lines)


def _totals(cells: Sequence[CellStatus]) -> dict[TrialState, int]:
    return {state: sum(cell.num_trials.get(state, 0) for cell in cells) for state in TrialState}


def _state_text(row: SweepRow) -> str:
    if row.holder is None:
        # Its last owner died without giving it back: the same command goes on.
        return "nobody works on it now (its orchestrator is gone)" if row.state == "running" else str(row.state)
    asked = f", asked to {row.stop_requested}" if row.stop_requested else ""
    return f"running on host {row.holder.host}, pid {row.holder.pid}, since {show.at(row.holder.since)} UTC{asked}"


def _phase_text(state: str, *, is_held: bool) -> str:
    if not is_held:
        return "left in flight"  # the next `sweep run` gives it back first
    return "before its first step" if state == TrialState.LAUNCHING else "taking steps"


def best(
    sweep: SweepArgument = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="How many layouts per cell.")] = 1,
    format: FormatOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the fastest layouts of each cell.

    With how sure their numbers are. What was measured under other conditions (code, software, device) stands apart.
    """
    chosen = chosen_format(format, as_json=as_json)
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        cells = store.status(row.id)
        fastest = store.best(row.id, top)
        others = _other_fingerprints(db, row.id)
    found = [
        {"place": place, "is_current": True, **records.trial_record(trial, cell.cell, row.name)}
        for cell in cells
        for place, trial in enumerate(fastest.get(cell.cell.id, ()), start=1)
    ]
    if chosen is Format.JSON:
        without = [{**records.cell_record(cell.cell), "reason": _why_no_best(cell)} for cell in cells if not fastest.get(cell.cell.id)]
        write_json("best", {"sweep": row.name, "top": top, "best": found, "cells_without": without, "other_fingerprints": others})
    elif chosen is Format.TABLE:
        _print_best(row.name, cells, fastest, others)
    else:
        write_records(chosen, found, columns=BEST_COLUMNS)


BEST_COLUMNS = ("place", "is_current", *records.TRIAL_COLUMNS)


def _other_fingerprints(db: str | None, sweep_id: int) -> list[dict[str, Any]]:
    """Per cell and fingerprint that is not the current one, the fastest layout."""
    from db import readonly  # needs SQLAlchemy

    found = readonly.query(
        db,
        "SELECT cell_id, cell, fingerprint_digest, trial_id, layout, tokens_per_second_per_gpu, relative_confidence, mfu, step_seconds_median,"
        f" peak_memory_allocated_bytes, device_memory_bytes FROM v_best WHERE sweep_id = {sweep_id} AND NOT is_current"
        " ORDER BY cell_id, tokens_per_second_per_gpu DESC",
    )
    return [{"is_current": False, **dict(zip(found.columns, values, strict=True))} for values in found.rows]


_SPEED_COLUMNS = (
    Column(title="trial", right=True),
    Column(title="tokens/s/GPU", right=True),
    Column(title="±95%", right=True),
    Column(title="MFU", right=True),
    Column(title="step", right=True),
    Column(title="peak memory", right=True),
    Column(title="layout", wrap=True),
)
_MAX_OTHERS = 5  # per cell: every commit of the measured code is a fingerprint


def _print_best(
    sweep: str, cells: Sequence[CellStatus], fastest: Mapping[int, Sequence[TrialRow]], others: Sequence[Mapping[str, Any]]
) -> None:
    if not cells:
        write_line(f"Sweep {sweep} has no cells yet.")
    for number, cell in enumerate(cells):
        if number:
            write()
        write_line(_cell_title(cell.cell), style="bold")
        found = fastest.get(cell.cell.id, ())
        if found:
            write_table(_SPEED_COLUMNS, [[str(trial.id), *_speed_cells(trial), _layout_text(trial)] for trial in found])
        else:
            write_line(f"  {_why_no_best(cell)}", style="yellow")
        elsewhere = [other for other in others if other["cell_id"] == cell.cell.id]
        if elsewhere:
            write_line("  Measured under other conditions (code, software or device), not comparable with the above:", style="dim")
            columns = [*_SPEED_COLUMNS, Column(title="fingerprint")]
            write_table(columns, [_other_cells(other) for other in elsewhere[:_MAX_OTHERS]])
            if len(elsewhere) > _MAX_OTHERS:
                write_line(f"  and {len(elsewhere) - _MAX_OTHERS} more: sweep sql 'select * from v_best'", style="dim")


def _cell_title(row: CellRow) -> str:
    cell = row.cell
    under = f", fingerprint {show.short_digest(row.fingerprint_digest)}" if row.fingerprint_digest else ""
    gpus = f"{cell.num_gpus} GPU{'s' if cell.num_gpus > 1 else ''}"
    return f"{cell.key}  ({cell.model.name} on {gpus}, sequence {cell.sequence_length:,}, global batch {cell.global_batch_size:,}{under})"


def _speed_cells(trial: TrialRow) -> list[str | Cell]:
    sure = show.confidence(trial.relative_confidence)
    return [
        Cell(text=show.tokens_rate(trial.tokens_per_second_per_gpu), style="green"),
        sure if trial.confident in (None, True) else Cell(text=f"{sure}?", style="yellow"),
        show.percent(trial.mfu),
        show.step_time(trial.step_seconds_median),
        show.memory_of(trial.peak_memory_allocated_bytes, trial.device_memory_bytes),
    ]


def _layout_text(trial: TrialRow) -> str:
    return f"{trial.layout.short}{'  (at the memory edge: thrashing)' if trial.thrashing else ''}"


def _other_cells(other: Mapping[str, Any]) -> list[str]:
    return [
        str(other["trial_id"]),
        show.tokens_rate(other["tokens_per_second_per_gpu"]),
        show.confidence(other["relative_confidence"]),
        show.percent(other["mfu"]),
        show.step_time(other["step_seconds_median"]),
        show.memory_of(other["peak_memory_allocated_bytes"], other["device_memory_bytes"]),
        _short(str(other["layout"])),
        show.short_digest(other["fingerprint_digest"]),
    ]


def _why_no_best(status: CellStatus) -> str:
    count = status.num_trials
    oom, pruned, failed = (count.get(s, 0) for s in (TrialState.OUT_OF_MEMORY, TrialState.PRUNED, TrialState.FAILED))
    open_trials = sum(count.get(s, 0) for s in (TrialState.QUEUED, TrialState.LAUNCHING, TrialState.RUNNING))
    if count.get(TrialState.MEASURED, 0):
        return "nothing is measured under the current conditions"
    if open_trials or not (oom or pruned or failed):
        return "nothing measured yet"
    if failed:
        return f"nothing could be measured: {oom} out of memory, {pruned} pruned with them, {failed} failed"
    return f"nothing fits: {oom} out of memory, {pruned} pruned with them"


def trials(
    sweep: SweepArgument = None,
    state: Annotated[list[TrialState] | None, typer.Option("--state", "-s", help="Only these states; may be repeated.")] = None,
    cell: Annotated[str | None, typer.Option("--cell", help="Only cells whose name has this in it.", show_default=False)] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="What comes first.")] = Sort.SPEED,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many rows.", show_default=False)] = None,
    format: FormatOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the trials of a sweep, one row each."""
    chosen = chosen_format(format, as_json=as_json)
    with existing_store(db) as store:
        row = chosen_sweep(store, sweep)
        cells = {found.id: found for found in _matching_cells(store, row, cell)}
        found = [trial for cell_id in cells for trial in store.trials(row.id, cell_id=cell_id) if not state or trial.state in state]
    found.sort(key=_sort_key(sort))
    total, found = len(found), found[:limit]
    if chosen is Format.TABLE:
        _print_trials(found, cells)
        if len(found) < total:
            note(f"{len(found)} of {total} trials; --limit shows more")
        return
    rows = [records.trial_record(trial, cells[trial.cell_id], row.name) for trial in found]
    if chosen is Format.JSON:
        write_json("trials", {"sweep": row.name, "num_matching": total, "trials": rows})
    else:
        write_records(chosen, rows, columns=records.TRIAL_COLUMNS)


def _matching_cells(store: Store, sweep: SweepRow, part: str | None) -> list[CellRow]:
    cells = store.cells(sweep.id)
    matching = [row for row in cells if part is None or part in row.cell.key]
    if part is not None and not matching:
        raise UsageInvalid(
            f"no cell of {sweep.name} has {part!r} in its name; there are {', '.join(row.cell.key for row in cells) or 'none yet'}"
        )
    return matching


def _sort_key(sort: Sort) -> Callable[[TrialRow], tuple[float, ...]]:
    match sort:
        case Sort.SPEED:  # what other conditions gave comes after what it cannot be compared with
            return lambda trial: (trial.is_current_fingerprint is False, -(trial.tokens_per_second_per_gpu or 0.0), trial.id)
        case Sort.MEMORY:
            return lambda trial: (-(trial.peak_memory_allocated_bytes or 0), trial.id)
        case Sort.UPDATED:
            return lambda trial: (-trial.updated_at.timestamp(), -trial.id)
        case Sort.ID:
            return lambda trial: (trial.id,)


def _print_trials(found: Sequence[TrialRow], cells: Mapping[int, CellRow]) -> None:
    """A table per cell: their speeds are not to be compared."""
    if not found:
        write_line("No trial matches.")
    columns = [_SPEED_COLUMNS[0], Column(title="state"), *_SPEED_COLUMNS[1:]]
    for number, cell_id in enumerate(dict.fromkeys(trial.cell_id for trial in found)):
        if number:
            write()
        write_line(_cell_title(cells[cell_id]), style="bold")
        own = [trial for trial in found if trial.cell_id == cell_id]
        write_table(columns, [[str(trial.id), state_cell(trial.state), *_speed_cells(trial), _explained(trial)] for trial in own])


def _explained(trial: TrialRow) -> str:
    """The layout, and beneath it why there is no number, or none to compare."""
    if trial.tokens_per_second_per_gpu is not None:
        other = trial.is_current_fingerprint is False
        return (
            f"{_layout_text(trial)}\nother conditions: fingerprint {show.short_digest(trial.fingerprint_digest)}"
            if other
            else _layout_text(trial)
        )
    if trial.state is TrialState.PRUNED:
        reason = f"needs at least the memory of trial {trial.condemned_by}" if trial.condemned_by is not None else trial.why
    else:
        reason = plain(trial.failure_message) if trial.failure_message else None
    return f"{trial.layout.short}\n{reason[:200]}" if reason else trial.layout.short


def state_cell(state: TrialState) -> Cell:
    """A state as a cell in its colour."""
    return Cell(text=state.replace("_", " "), style=STATE_STYLES.get(state, ""))

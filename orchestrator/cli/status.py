"""The command `status`: how far sweeps are, once or every two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, Json, complete_names
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.store.heartbeats import phase_and_step
from orchestrator.cli.terminal import trial_text
from orchestrator.cli.terminal.output import (
    Column,
    StyledText,
    TableRow,
    numbers,
    write,
    write_json,
    write_line,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.report import quantities as show
from orchestrator.report import trial_line
from orchestrator.report.ranked_cells import RankedStatus, rank_status
from orchestrator.report.remarks import why_no_best
from orchestrator.report.software_change import SoftwareChange, software_changes
from orchestrator.report.sweep_status import (
    COUNTED,
    SweepStatus,
    phase_text,
    read_status,
    shown_counts,
    state_text,
    use_text,
)

if TYPE_CHECKING:
    from db.read.rows import CellStatus
    from db.store_reads import StoreReads
    from orchestrator.report.records import Record

WATCH_SECONDS = 2.0


def status(
    sweep: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP",
            help="The sweep's name. Default: all sweeps of the store.",
            autocompletion=complete_names,
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Show it every 2 s, until the sweep ends or Ctrl-C."),
    ] = False,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Show how far a sweep is.

    Trials by state, the best so far, and what runs now. Without a name, shows all sweeps.

    Examples:
      sweep status
      sweep status 8b --watch
      sweep status --json
    """
    if watch and as_json:
        raise UsageInvalid("--watch is for people; a program repeats: sweep status --json")
    with existing_store(db) as store:
        while True:
            if watch and sys.stdout.isatty():
                write("\x1b[H\x1b[2J")
            is_over = _show(store, sweep, as_json=as_json)
            if not watch or is_over:
                return
            try:
                time.sleep(WATCH_SECONDS)
            except KeyboardInterrupt:
                return


def _show(store: StoreReads, name: str | None, *, as_json: bool) -> bool:
    """Show one sweep, or all. Return True if all of them have ended.

    A sweep whose orchestrator died has not ended: it may be started again.
    """
    rows = store.sweeps()
    if name is not None or len(rows) == 1:
        rows = [select_sweep(store, name)]
    sweeps = [read_status(store, row) for row in rows]
    ranked = rank_status(store, sweeps[0]) if len(sweeps) == 1 else None
    if ranked is not None:
        sweeps = [ranked.status]
    if as_json:
        write_json("status", {"sweeps": [_record(store, one) for one in sweeps]})
    elif not sweeps:
        write_line(f"{store.url} holds no sweep yet; start one: sweep run FILE")
    elif ranked is not None:
        changes = software_changes(store, rows[0].id, rows[0].name)
        _print(ranked, store.num_with_longer_steps(rows[0].id), changes)
    else:
        _print_all(sweeps)
    return all(row.holder is None and row.state in ("finished", "stopped") for row in rows)


def _record(store: StoreReads, sweep: SweepStatus) -> Record:
    from orchestrator.report import records  # every column

    row, reserved = sweep.row, sweep.reserved
    noise = store.noise_floors(row.id)
    return {
        **records.sweep_record(row),
        "stop_reasons": list(sweep.stop_reasons),
        "num_untried": sum(sweep.untried.values()) if sweep.stop_reasons else None,
        "num_trials": sweep.totals,
        **records.reserved_record(reserved, sweep.price),
        "cells": [
            records.cell_status_record(cell, row.name, reserved.by_cell[cell.cell.id])
            | _stop_record(cell, has_ended=bool(sweep.stop_reasons))
            | {"noise_floor": noise[cell.cell.id].relative if cell.cell.id in noise else None}
            for cell in sweep.cells
        ],
        "running": _running_records(sweep),
        "software_changes": [asdict(one) for one in software_changes(store, row.id, row.name)],
        "num_attempts_of_longer_steps": store.num_with_longer_steps(row.id),
    }


def _stop_record(cell: CellStatus, *, has_ended: bool) -> Record:
    """Why the search of a cell ended, and what it left; None while a call goes on."""
    row = cell.cell
    return {
        "stop_reason": row.stop_reason if has_ended else None,
        "num_untried": row.num_untried if has_ended else None,
    }


def _running_records(sweep: SweepStatus) -> list[Record]:
    now = datetime.now(tz=UTC)
    rows = []
    for trial in sweep.running:
        phase, step = phase_and_step(sweep.row, trial)
        seconds = max(show.age_seconds(trial.since, now), 0.0)
        names = ("trial_id", "cell", "layout", "state", "attempt", "nodes")
        record = {name: getattr(trial, name) for name in names}
        rows.append(record | {"phase": phase, "step": step, "seconds": seconds})
    return rows


def _print(
    ranked: RankedStatus, num_with_longer_steps: int, changes: Sequence[SoftwareChange]
) -> None:
    sweep = ranked.status
    row, cells, reserved = sweep.row, sweep.cells, sweep.reserved
    write_line(f"Sweep {row.name}: {state_text(sweep)}", style="bold")
    trials = show.counted(sum(sweep.totals.values()), "trial")
    hours = f"{show.gpu_hours(reserved.total.reserved)} GPU-hours reserved{use_text(sweep)}"
    write_line(f"{trials} in {show.counted(len(cells), 'cell')}, {hours}")
    if num_with_longer_steps:
        attempts = show.counted(num_with_longer_steps, "attempt")
        their = "its" if num_with_longer_steps == 1 else "their"
        write_line(
            f"  {attempts} reported more seconds of steps than {their} GPUs were reserved; all of"
            " that time counts as useful. Either the steps were not run in real time, or a clock is"
            " wrong",
            style="dim",
        )
    if not cells:
        return
    write()
    shown = shown_counts([sweep])
    untried = sweep.untried
    rows: list[TableRow] = [
        [
            cell.cell.cell.key,
            *_count_cells(cell, shown),
            *([f"{untried.get(cell.cell.id, 0):,}"] if untried else ()),
            show.gpu_hours(reserved.by_cell[cell.cell.id].reserved),
        ]
        for cell in cells
    ]
    added = ("never tried",) if untried else ()
    write_table([Column("cell", wrap=True), *numbers(*shown, *added, "GPU-hours")], rows)
    for line in _why_untried(sweep):
        write_line(line, style="dim")
    for change in changes:
        write_line(change.sentences(), style="yellow")
    write()
    layout_and_cell = [Column("layout", wrap=True), Column("cell", wrap=True)]
    columns = [*numbers("best so far", "MFU"), *layout_and_cell]
    write_table(columns, [_best_so_far(cell) for cell in cells])
    for line in (*ranked.ties, *ranked.variations):
        write_line(line, style="dim")
    for line in ranked.drifts:
        write_line(line, style="yellow")
    if not sweep.running:
        return
    write()
    columns = [*numbers("running"), Column("phase"), *numbers("for"), *layout_and_cell]
    is_worked_on, now = sweep.is_worked_on, datetime.now(tz=UTC)
    running = [
        [
            str(trial.trial_id),
            phase_text(trial, phase_and_step(row, trial), is_worked_on=is_worked_on),
            show.duration(max(show.age_seconds(trial.since, now), 0.0)),
            trial_line.short(trial.layout),
            trial.cell,
        ]
        for trial in sweep.running
    ]
    write_table(columns, running)


def _why_untried(sweep: SweepStatus) -> list[str]:
    """A line for each reason for which searches ended before all layouts were tried."""
    untried = sweep.untried
    found: dict[str, list[int]] = {}
    for row in (cell.cell for cell in sweep.cells):
        if row.id in untried:
            found.setdefault(row.stop_reason or show.UNKNOWN, []).append(untried[row.id])
    return [
        f"{show.counted(sum(nums), 'layout')} never tried in {show.counted(len(nums), 'cell')}:"
        f" {reason}"
        for reason, nums in found.items()
    ]


def _count_cells(status: CellStatus, titles: Sequence[str]) -> list[StyledText]:
    cells = []
    for title in titles:
        count = sum(status.num_trials[state] for state in COUNTED[title])
        style = trial_text.STATE_STYLES.get(COUNTED[title][0], "") if count else "dim"
        cells.append(StyledText(f"{count:,}", style))
    return cells


def _best_so_far(status: CellStatus) -> list[str | StyledText]:
    found, key = status.best, status.cell.cell.key
    if found is None:
        why = StyledText(why_no_best(status), "yellow")
        return [show.UNKNOWN, show.UNKNOWN, why, key]
    speed = f"{show.tokens_rate(found.tokens_per_second_per_gpu)} tokens/s/GPU"
    layout = trial_line.layout_text(found)
    return [StyledText(speed, "green"), show.percent(found.mfu), layout, key]


def _print_all(sweeps: Sequence[SweepStatus]) -> None:
    shown = shown_counts(sweeps)
    added = ("never tried",) if any(sweep.untried for sweep in sweeps) else ()
    columns = [Column("sweep", wrap=True), *numbers("cells", *shown, *added, "GPU-hours")]
    rows = []
    for sweep in sweeps:
        totals = sweep.totals
        counts = [f"{sum(totals[state] for state in COUNTED[title]):,}" for title in shown]
        counts += [f"{sum(sweep.untried.values()):,}"] if added else []
        hours = show.gpu_hours(sweep.reserved.total.reserved)
        cells = [sweep.row.name, str(len(sweep.cells)), *counts, hours, state_text(sweep)]
        rows.append(cells)
    write_table([*columns, Column("state", wrap=True)], rows)

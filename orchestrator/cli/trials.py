"""The command `trials`: the trials of a sweep, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Db, FormatOption, Json, SweepArgument
from orchestrator.cli.store.defaults import existing_store, select_sweep
from orchestrator.cli.terminal import trial_text
from orchestrator.cli.terminal.output import (
    Column,
    Format,
    StyledText,
    note,
    output_format,
    write,
    write_json,
    write_line,
    write_rows,
    write_table,
)
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.trial.lifecycle import UNDER_WAY, TrialState
from orchestrator.core.trial.peak_memory import needed_bytes
from orchestrator.report import trial_line
from orchestrator.report.sweep_status import INTERRUPTED, WHAT_INTERRUPTED_IS

if TYPE_CHECKING:
    from db.read.rows import CellRow, SweepRow, TrialRow
    from db.store_reads import StoreReads


class Sort(StrEnum):
    SPEED = "speed"
    ID = "id"
    MEMORY = "memory"
    UPDATED = "updated"


_SORT_KEYS: Mapping[Sort, Callable[[TrialRow], tuple[float, ...]]] = {
    # Results of other conditions come last: they cannot be compared with the others.
    Sort.SPEED: lambda trial: (
        trial.is_current_fingerprint is False,
        -(trial.tokens_per_second_per_gpu or 0.0),
        trial.id,
    ),
    Sort.ID: lambda trial: (trial.id,),
    Sort.MEMORY: lambda trial: (-(needed_bytes(trial) or 0), trial.id),
    Sort.UPDATED: lambda trial: (-trial.updated_at.timestamp(), -trial.id),
}


def trials(
    sweep: SweepArgument = None,
    state: Annotated[
        list[TrialState] | None,
        typer.Option("--state", "-s", help="Only trials in this state; may be repeated."),
    ] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only cells whose name contains this.")
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="Fastest, first, largest or newest trials first.")
    ] = Sort.SPEED,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Show at most this many rows.")
    ] = None,
    format: FormatOption = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """List the trials of a sweep, one row each.

    Examples:
      sweep trials --state out_of_memory --state failed
      sweep trials 8b --cell 8gpu --sort memory --limit 20
      sweep trials --json
    """
    from db.read.holder import is_worked_on  # SQLAlchemy
    from orchestrator.report import records  # every column

    format = output_format(format, as_json=as_json)
    with existing_store(db) as store:
        row = select_sweep(store, sweep)
        cells = {found.id: found for found in _matching_cells(store, row, cell)}
        found = [
            trial
            for cell_id in cells
            for trial in store.trials(row.id, cell_id=cell_id)
            if not state or trial.state in state
        ]
    found.sort(key=_SORT_KEYS[sort])
    total, found = len(found), found[:limit]
    rows = (records.trial_record(trial, cells[trial.cell_id], row.name) for trial in found)
    match format:
        case Format.JSON:
            write_json("trials", {"sweep": row.name, "num_matching": total, "trials": list(rows)})
        case Format.CSV:
            write_rows(format, records.TRIAL_COLUMNS, (list(record.values()) for record in rows))
        case Format.MD:
            trial_text.write_markdown([(trial, cells[trial.cell_id]) for trial in found])
        case Format.TABLE:
            _print(found, cells, is_worked_on=is_worked_on(row))
    if len(found) < total:
        note(f"{len(found)} of {total} trials; a higher --limit shows more")


def _matching_cells(store: StoreReads, sweep: SweepRow, part: str | None) -> list[CellRow]:
    cells = store.cells(sweep.id)
    matching = [row for row in cells if part is None or part in row.cell.key]
    if part is not None and not matching:
        names = ", ".join(row.cell.key for row in cells) or "none yet"
        raise UsageInvalid(f"no cell of {sweep.name} has {part!r} in its name; there are {names}")
    return matching


def _print(found: Sequence[TrialRow], cells: Mapping[int, CellRow], *, is_worked_on: bool) -> None:
    """Print a table for each cell: speeds of different cells are not to be compared."""
    if not found:
        write_line("No trial matches.")
    first, *rest = trial_text.SPEED_COLUMNS
    for number, cell_id in enumerate(dict.fromkeys(trial.cell_id for trial in found)):
        if number:
            write()
        write_line(trial_line.cell_title(cells[cell_id]), style="bold")
        rows = [
            [
                str(trial.id),
                _state_cell(trial, is_worked_on=is_worked_on),
                *trial_text.speed_cells(trial),
                trial_text.explained_layout(trial),
            ]
            for trial in found
            if trial.cell_id == cell_id
        ]
        write_table([first, Column("state"), *rest], rows)
    trial_text.print_doubts(found)
    if not is_worked_on and any(trial.state in UNDER_WAY for trial in found):
        write_line(f"{INTERRUPTED}: {WHAT_INTERRUPTED_IS}", style="yellow")


def _state_cell(trial: TrialRow, *, is_worked_on: bool) -> StyledText:
    if not is_worked_on and trial.state in UNDER_WAY:
        return StyledText(INTERRUPTED, "yellow")
    return StyledText(trial.state.replace("_", " "), trial_text.STATE_STYLES.get(trial.state, ""))

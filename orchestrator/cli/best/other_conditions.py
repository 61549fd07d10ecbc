"""The table of layouts measured under other conditions, below the best of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.cli.terminal import trial_text
from orchestrator.cli.terminal.output import Column, plain, write_line, write_table
from orchestrator.report import quantities as show
from orchestrator.report import trial_line
from orchestrator.report.other_conditions import (
    MAX_OTHERS_SHOWN,
    NOT_COMPARABLE,
    OtherConditions,
    with_changes,
)

if TYPE_CHECKING:
    from db.read.rows import CellStatus, TrialRow
    from db.store_reads import StoreReads


def print_others(others: OtherConditions, cell_id: int) -> Sequence[TrialRow]:
    """Print those of a cell, and return them."""
    of_cell = others.of_cell(cell_id)
    found = of_cell[:MAX_OTHERS_SHOWN]
    if not found:
        return found
    write_line(f"  {NOT_COMPARABLE}:", style="dim")
    rows = [
        [
            str(trial.id),
            *trial_text.speed_cells(trial),
            trial_line.layout_text(trial),
            show.short_digest(trial.fingerprint_digest),
        ]
        for trial in found
    ]
    write_table([*trial_text.SPEED_COLUMNS, Column("fingerprint")], rows)
    differences = {trial.fingerprint_digest: others.changed[trial.id] for trial in found}
    for digest, text in differences.items():
        if text:
            write_line(f"  changed since {show.short_digest(digest)}: {plain(text)}", style="dim")
    if len(of_cell) > len(found):
        more = len(of_cell) - len(found)
        write_line(f"  and {more} more: sweep sql 'select * from v_best'", style="dim")
    return found


def other_conditions(
    store: StoreReads, sweep_id: int, cells: Sequence[CellStatus]
) -> OtherConditions:
    """Read the fastest layout of each cell and fingerprint, without the current fingerprint."""
    trials = store.best_of_other_fingerprints(sweep_id)
    fingerprints = store.fingerprints(sweep_id) if trials else ()
    return with_changes(trials, [status.cell for status in cells], fingerprints)

"""Layouts measured with other code, software or devices than now: `best` shows them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.cli import trial_text
from orchestrator.cli.output import Column, plain, write_line, write_table
from orchestrator.report import quantities as show
from orchestrator.report import trial_line

if TYPE_CHECKING:
    from db.read.rows import CellStatus, TrialRow
    from db.store import Store

# Per cell: every commit of the measured code is a fingerprint.
MAX_OTHERS_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class OtherConditions:
    """The fastest layout of each cell and fingerprint that is not current."""

    trials: Sequence[TrialRow]
    # By trial id: what has changed from its fingerprint to the current one.
    changed: Mapping[int, str]

    def print(self, cell_id: int) -> Sequence[TrialRow]:
        """Print those of a cell, and return them."""
        of_cell = [trial for trial in self.trials if trial.cell_id == cell_id]
        found = of_cell[:MAX_OTHERS_SHOWN]
        if not found:
            return found
        write_line(
            "  Measured under other conditions (code, software or device), not comparable with the"
            " above:",
            style="dim",
        )
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
        differences = {trial.fingerprint_digest: self.changed[trial.id] for trial in found}
        for digest, text in differences.items():
            if text:
                write_line(
                    f"  changed since {show.short_digest(digest)}: {plain(text)}", style="dim"
                )
        if len(of_cell) > len(found):
            more = len(of_cell) - len(found)
            write_line(f"  and {more} more: sweep sql 'select * from v_best'", style="dim")
        return found


def other_conditions(
    db: str | None, store: Store, sweep_id: int, cells: Sequence[CellStatus]
) -> OtherConditions:
    """Read the fastest layout of each cell and fingerprint, without the current fingerprint."""
    from db.sql import readonly  # needs SQLAlchemy
    from orchestrator.core.trial.fingerprint import changes  # pydantic, 0.05 s

    found = readonly.own_query(
        db,
        f"SELECT trial_id FROM v_best WHERE sweep_id = {sweep_id} AND NOT is_current"
        " ORDER BY cell_id, tokens_per_second_per_gpu DESC",
    )
    trials = store.trials_by_id([trial_id for (trial_id,) in found.rows])
    known = {one.digest: one for one in store.fingerprints(sweep_id)} if trials else {}
    current = {status.cell.id: status.cell.fingerprint_digest for status in cells}
    changed = {}
    for trial in trials:
        before = known.get(trial.fingerprint_digest or "")
        now = known.get(current[trial.cell_id] or "")
        changed[trial.id] = ""
        if before is not None and now is not None:
            changed[trial.id] = changes(before, now)
    return OtherConditions(trials=trials, changed=changed)

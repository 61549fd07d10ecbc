"""The texts and table columns of trials that `best`, `trials`, `status` and `show` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.cli.terminal.output import (
    Column,
    Format,
    StyledText,
    numbers,
    plain,
    write_line,
    write_rows,
)
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.report import quantities as show
from orchestrator.report.trial_line import (
    SPEED_TITLES,
    layout_text,
    speed_texts,
    unchecked_lines,
    why_unsure_lines,
)

if TYPE_CHECKING:
    from db.read.rows import CellRow, TrialRow

STATE_STYLES: Mapping[str, str] = {
    TrialState.MEASURED: "green",
    TrialState.OUT_OF_MEMORY: "yellow",
    TrialState.FAILED: "red",
    TrialState.LAUNCHING: "cyan",
    TrialState.RUNNING: "cyan",
    TrialState.PRUNED: "dim",
}
SPEED_COLUMNS = (*numbers(*SPEED_TITLES[:-1]), Column(SPEED_TITLES[-1], wrap=True))


def speed_cells(trial: TrialRow) -> list[str | StyledText]:
    """The cells of SPEED_COLUMNS between trial and layout."""
    speed, sure, *others = speed_texts(trial)
    is_unsure = trial.confident is False
    return [
        StyledText(speed, "green"),
        StyledText(sure, "yellow") if is_unsure else sure,
        *others,
    ]


def explained_layout(trial: TrialRow) -> str:
    """The layout, and on a second line why it has no number, or none to compare."""
    if trial.tokens_per_second_per_gpu is not None:
        text = layout_text(trial)
        if trial.is_current_fingerprint is False:
            digest = show.short_digest(trial.fingerprint_digest)
            text += f"\nother conditions: fingerprint {digest}"
        return text
    reason = plain(trial.failure_message) if trial.failure_message else None
    if trial.state is TrialState.PRUNED:
        reason = trial.why
        if trial.condemned_by is not None:
            reason = f"needs at least the memory of trial {trial.condemned_by}"
    return f"{trial.layout.short}\n{reason[:200]}" if reason else trial.layout.short


def write_markdown(trials: Sequence[tuple[TrialRow, CellRow]]) -> None:
    """The table for people, to be pasted into a document; CSV and JSON have every field."""
    names = ["cell", "trial", "state", *(column.title for column in SPEED_COLUMNS[1:])]
    rows = []
    for trial, cell in trials:
        parts = [*speed_cells(trial), explained_layout(trial)]
        texts = [part.text if isinstance(part, StyledText) else part for part in parts]
        rows.append([cell.cell.key, str(trial.id), trial.state.replace("_", " "), *texts])
    write_rows(Format.MD, names, rows)


def print_doubts(trials: Sequence[TrialRow]) -> None:
    """Explain each `?` of a table, and name the trials whose numbers are not fully checked."""
    for line in why_unsure_lines(trials):
        write_line(line, style="dim")
    for line in unchecked_lines(trials):
        write_line(line, style="yellow")

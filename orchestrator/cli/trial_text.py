"""The texts and table columns of trials that `best`, `trials`, `status` and `show` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.cli.output import (
    Column,
    Format,
    StyledText,
    numbers,
    plain,
    write_line,
    write_rows,
)
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import spoils
from orchestrator.report import quantities as show

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
SPEED_COLUMNS = (
    *numbers("trial", "tokens/s/GPU", "±95%", "runs", "MFU", "step", "peak memory"),
    Column("layout", wrap=True),
)


def speed_cells(trial: TrialRow) -> list[str | StyledText]:
    """The cells of SPEED_COLUMNS between trial and layout."""
    sure = show.confidence(trial.relative_confidence)
    return [
        StyledText(show.tokens_rate(trial.tokens_per_second_per_gpu), "green"),
        StyledText(f"{sure}?", "yellow") if trial.confident is False else sure,
        str(trial.num_measurements or "-"),
        show.percent(trial.mfu),
        show.step_time(trial.step_seconds_median),
        memory_text(trial),
    ]


def memory_text(trial: TrialRow) -> str:
    """The peak that the program told; else what a driver or kernel saw, marked with its kind."""
    told, seen = trial.peak_memory_allocated_bytes, trial.peak_memory_driver_bytes
    if told is None and seen is not None:
        return (
            f"{show.memory_of(seen, trial.device_memory_bytes)} ({trial.peak_memory_driver_kind})"
        )
    return show.memory_of(told, trial.device_memory_bytes)


def layout_text(trial: TrialRow) -> str:
    """The layout, marked if its number is not to be trusted."""
    marks = ["  (at the memory edge: thrashing)"] if trial.thrashing else []
    marks += ["  (cannot be true)"] if trial.implausible else []
    marks += ["  (ended early: cannot win)"] if trial.step_seconds_bound is not None else []
    marks += ["  (disturbed)"] if spoils(trial.load) else []
    return f"{trial.layout.short}{''.join(marks)}"


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


def short(key: str) -> str:
    """A stored layout key in the short form for tables."""
    from orchestrator.core.problem.layout import parse_key

    try:
        return parse_key(key).short
    except ValueError:  # written by a later version
        return key


def cell_title(row: CellRow) -> str:
    cell = row.cell
    gpus = f"{cell.num_gpus} GPU{'s' if cell.num_gpus > 1 else ''}"
    batch = f"sequence {cell.sequence_length:,}, global batch {cell.global_batch_size:,}"
    under = ""
    if row.fingerprint_digest:
        under = f", fingerprint {show.short_digest(row.fingerprint_digest)}"
    return f"{cell.key}  ({cell.model.name} on {gpus}, {batch}{under})"


def write_markdown(trials: Sequence[tuple[TrialRow, CellRow]]) -> None:
    """The table for people, to be pasted into a document; CSV and JSON have every field."""
    names = ["cell", "trial", "state", *(column.title for column in SPEED_COLUMNS[1:])]
    rows = []
    for trial, cell in trials:
        parts = [*speed_cells(trial), explained_layout(trial)]
        texts = [part.text if isinstance(part, StyledText) else part for part in parts]
        rows.append([cell.cell.key, str(trial.id), trial.state.replace("_", " "), *texts])
    write_rows(Format.MD, names, rows)


def print_why_unsure(trials: Sequence[TrialRow]) -> None:
    """Explain each `?` of a table; if the reasons differ, name the trials of each."""
    from orchestrator.core.trial.measurement import why_unsure  # pydantic, 0.05 s

    unsure: dict[str, list[int]] = {}
    for trial in trials:
        why = why_unsure(
            confident=trial.confident,
            num_steps=trial.num_steps,
            relative_confidence=trial.relative_confidence,
            implausible=trial.implausible,
            unsteady=trial.unsteady,
            step_seconds_bound=trial.step_seconds_bound,
        )
        if why is not None:
            unsure.setdefault(why, []).append(trial.id)
    for reason, ids in unsure.items():
        of = f", of {show.numbered('trial', ids)}" if len(unsure) > 1 else ""
        write_line(f"?: {reason}{of}", style="dim")

"""A trial and a cell in one line: the texts that tables of `sweep` and of its reports share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.core.trial.machine_load import is_disturbed
from orchestrator.core.trial.peak_memory import ALLOCATED, needed_peak
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import CellRow, TrialRow

SPEED_TITLES = ("trial", "tokens/s/GPU", "±95%", "runs", "MFU", "step", "peak memory", "layout")


def speed_texts(trial: TrialRow) -> list[str]:
    """The texts of SPEED_TITLES between trial and layout."""
    sure = show.confidence(trial.relative_confidence)
    return [
        show.tokens_rate(trial.tokens_per_second_per_gpu),
        f"{sure}?" if trial.confident is False else sure,
        str(trial.num_measurements or "-"),
        show.percent(trial.mfu),
        show.step_time(trial.step_seconds_median),
        memory_text(trial),
    ]


def memory_text(trial: TrialRow) -> str:
    """The peak that was needed, marked with its source if the program's allocations are unknown."""
    peak = needed_peak(trial)
    text = show.memory_of(peak.bytes if peak is not None else None, trial.device_memory_bytes)
    return text if peak is None or peak.source == ALLOCATED else f"{text} ({peak.source})"


def layout_text(trial: TrialRow) -> str:
    """The layout, marked if its number is not to be trusted."""
    marks = ["  (at the memory edge: thrashing)"] if trial.thrashing else []
    marks += ["  (cannot be true)"] if trial.implausible else []
    marks += ["  (ended early: cannot win)"] if trial.step_seconds_bound is not None else []
    marks += ["  (disturbed)"] if is_disturbed(trial.load) else []
    return f"{trial.layout.short}{''.join(marks)}"


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


def why_unsure_lines(trials: Sequence[TrialRow]) -> list[str]:
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
    lines = []
    for reason, ids in unsure.items():
        of = f"{show.numbered('trial', ids)}: " if len(unsure) > 1 else ""
        lines.append(f"?: {of}{reason}")
    return lines


def unchecked_lines(trials: Sequence[TrialRow]) -> list[str]:
    """Name the trials of a table of whose numbers nothing checks a part, and say which."""
    unchecked: dict[str, list[int]] = {}
    for trial in trials:
        if trial.unchecked is not None:
            unchecked.setdefault(trial.unchecked, []).append(trial.id)
    return [
        f"The numbers of {show.numbered('trial', ids)} are not fully checked: {reason}"
        for reason, ids in unchecked.items()
    ]

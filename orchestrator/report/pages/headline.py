"""The head of a report: the best layouts of each cell, how sure their order is, and what to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.trial.peak_memory import needed_bytes
from orchestrator.report import quantities as show
from orchestrator.report.other_conditions import fastest_of_others, with_changes
from orchestrator.report.ranking import DRIFT_TITLES, MAX_TIED_SHOWN, Ranking
from orchestrator.report.remarks import (
    ended_early_text,
    failed_repeats_text,
    implausible_text,
    load_text,
    unknown_interval_text,
    why_no_best,
)
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.tie_advice import tie_advice
from orchestrator.report.trial_commands import UNTRAINED, export_command
from orchestrator.report.trial_line import (
    SPEED_TITLES,
    cell_title,
    layout_text,
    speed_texts,
    unchecked_lines,
    why_unsure_lines,
)

if TYPE_CHECKING:
    from db.read.rows import CellStatus, TrialDetail, TrialRow

MOST_LAYOUTS = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout of the table: its trial, and the texts of the titles after it."""

    trial_id: int
    texts: Sequence[str]
    is_tied: bool


@dataclass(frozen=True, kw_only=True)
class CellHeadline:
    """The layout to run in one cell, in the words of `sweep best`."""

    title: str
    sweep: str
    verdict: str
    titles: Sequence[str] = SPEED_TITLES
    rows: Sequence[Row] = ()
    remarks: Sequence[str] = ()
    limits: Sequence[str] = ()
    command: str | None = None


def headlines(sweeps: Sequence[SweepRows]) -> list[CellHeadline]:
    """Return the headline of each cell."""
    return [_headline(sweep, status) for sweep in sweeps for status in sweep.cells]


def _headline(sweep: SweepRows, status: CellStatus) -> CellHeadline:
    title, ranking = cell_title(status.cell), sweep.rankings.get(status.cell.id)
    of_cell = [one.trial for one in sweep.of_cell(status.cell.id)]
    others = with_changes(fastest_of_others(of_cell), [status.cell], sweep.fingerprints)
    changes = [change.sentences() for change in sweep.changes.get(status.cell.id, ())]
    remarks = [*changes, *_left_out(of_cell), *others.lines(status.cell.id)]
    if ranking is None or not ranking.leading:
        return CellHeadline(
            title=title, sweep=sweep.name, verdict=why_no_best(status), remarks=remarks
        )
    shown = _shown(ranking)
    best = next(one for one in sweep.trials if one.trial.id == ranking.leading[0].id)
    is_tie = len(ranking.tied) > 1
    advice = tie_advice(sweep.sweep, ranking, status.cell.stop_reason) if is_tie else None
    without_drift = ranking.without_drift(shown)
    added = {} if without_drift is None else without_drift.texts
    known = [advice, load_text(shown), ranking.drift]
    if without_drift is not None:
        known += [unknown_interval_text(ranking, shown), without_drift.remark]
    known += [failed_repeats_text(trial, sweep.failed_repeats) for trial in shown]
    workload = str(sweep.sweep.conditions.get("workload"))
    return CellHeadline(
        title=title,
        sweep=sweep.name,
        verdict=ranking.text,
        titles=[SPEED_TITLES[0], *(DRIFT_TITLES if added else ()), *SPEED_TITLES[1:]],
        rows=[
            Row(
                trial_id=trial.id,
                texts=[*added.get(trial.id, ()), *speed_texts(trial), layout_text(trial)],
                is_tied=trial.id in ranking.tied,
            )
            for trial in shown
        ],
        remarks=[
            *(text for text in known if text),
            *remarks,
            *why_unsure_lines(shown),
            *unchecked_lines(shown),
        ],
        limits=limits(best, workload=workload),
        command=export_command(best.trial.id, workload=workload, sweep=sweep.name),
    )


def _shown(ranking: Ranking) -> list[TrialRow]:
    """The fastest layouts, and those that the words below them name."""
    named = ranking.tied[:MAX_TIED_SHOWN]
    return [
        trial
        for place, trial in enumerate(ranking.leading)
        if place < MOST_LAYOUTS or trial.id in named
    ]


def _left_out(of_cell: Sequence[TrialRow]) -> list[str]:
    lines = []
    implausible = {
        trial.id: trial.implausible for trial in of_cell if trial.implausible is not None
    }
    ended_early = [trial.id for trial in of_cell if trial.step_seconds_bound is not None]
    if implausible:
        lines.append(implausible_text(implausible))
    if ended_early:
        lines.append(ended_early_text(ended_early))
    return lines


def limits(best: TrialDetail, *, workload: str) -> list[str]:
    """Return what limits a layout: its memory, and the parts of its step if it was profiled."""
    from orchestrator.report.profile_text import PART_NAMES  # pydantic

    trial, lines = best.trial, []
    peak, limit = needed_bytes(trial), trial.device_memory_bytes
    if peak is not None and limit:
        lines.append(
            f"Memory: {show.memory_of(peak, limit)}, {show.percent(peak / limit)} of the device."
        )
    profile = next((one for one in reversed(best.profiles) if one.ranks), None)
    if profile is None and workload in UNTRAINED:
        return lines
    if profile is None:
        how = f"sweep profile {trial.id}"
        lines.append(f"What its steps are spent on is not known: `{how}` profiles a few of them.")
        return lines
    rank, split = next(iter(profile.ranks.items()))
    parts = sorted(split.parts, key=lambda part: -split.share(part))[:3]
    texts = [f"{PART_NAMES[part]} {show.percent(split.share(part))}" for part in parts]
    lines.append(f"A step of rank {rank} is mostly {', '.join(texts)}.")
    return [*lines, *profile.advice]

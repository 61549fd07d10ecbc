"""The page of one trial as plain values: the texts of `sweep show`, and how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.core.trial.peak_memory import needed_bytes
from orchestrator.report import quantities as show
from orchestrator.report import trial_facts
from orchestrator.report.pictures.profiles import split_in, split_of, timeline_of
from orchestrator.report.profile_text import remarks, split_rows
from orchestrator.report.sweep_rows import SweepRows
from orchestrator.report.trial_commands import commands
from orchestrator.report.trial_file import TrialFiles
from orchestrator.report.trial_line import SPEED_TITLES, layout_text, speed_texts

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, ProfileRow, TrialDetail

# Columns of the table of all trials.
TABLE_TITLES = ("trial", "state", *SPEED_TITLES[1:-1], "GPUs", "sweep", "layout")


def document(files: TrialFiles, one: TrialDetail, *, is_worked_on: bool) -> dict[str, Any]:
    """Return all that the page of a trial shows. `is_worked_on`: its sweep has an orchestrator."""
    return {
        "id": one.trial.id,
        "title": trial_facts.title(one.trial, is_worked_on=is_worked_on),
        "state": one.trial.state.value,
        "facts": _facts(trial_facts.head_facts(one, is_worked_on=is_worked_on)),
        "compared": trial_facts.compared_rows(one.trial),
        "attempts": [_attempt(attempt, one) for attempt in one.attempts],
        "profiles": [_profile(profile, one) for profile in one.profiles],
        "events": trial_facts.event_rows(one),
        "file": files.sweep_file(one),
        "program": files.program_script(one),
        "commands": commands(one, workload=files.workload),
    }


def _facts(facts: Sequence[trial_facts.Fact]) -> list[list[str]]:
    return [[name, text] for name, text in facts if text]


def _attempt(attempt: AttemptRow, one: TrialDetail) -> dict[str, Any]:
    return {
        "title": trial_facts.attempt_title(attempt, one.attempts),
        "facts": _facts(trial_facts.attempt_facts(attempt, one.cell.cell.num_gpus)),
        "log": "\n".join(trial_facts.log_lines(attempt)),
    }


def _profile(profile: ProfileRow, one: TrialDetail) -> dict[str, Any]:
    pictures = []
    if profile.ranks:
        pictures.append(split_of([split_in(one, profile)]))
    if profile.memory:
        pictures.append(timeline_of(one, profile))
    traces = [
        f"rank {rank}: {split.trace_path}"
        for rank, split in profile.ranks.items()
        if split.trace_path
    ]
    return {
        "title": f"Profile {profile.number}: {profile.state}, {show.at(profile.started_at)} UTC",
        "ranks": [f"rank {rank}" for rank in profile.ranks],
        "rows": split_rows(profile.ranks) if profile.ranks else [],
        "remarks": [
            *(remarks(profile.ranks) if profile.ranks else []),
            *profile.advice,
            *([profile.failure_message] if profile.failure_message else []),
        ],
        "pictures": [
            {"title": it.title, "caption": it.caption, "figure": it.figure} for it in pictures
        ],
        "traces": traces,
    }


def table_row(sweep: SweepRows, one: TrialDetail) -> list[str]:
    """Return the texts of a trial by TABLE_TITLES."""
    return [
        str(one.trial.id),
        one.trial.state.replace("_", " "),
        *speed_texts(one.trial),
        f"{one.cell.cell.num_gpus:,}",
        sweep.name,
        layout_text(one.trial),
    ]


def sort_keys(one: TrialDetail) -> list[float | None]:
    """Return the numbers by which the columns of speed are sorted."""
    trial = one.trial
    numbers = (
        trial.tokens_per_second_per_gpu,
        trial.relative_confidence,
        trial.num_measurements or None,
        trial.mfu,
        trial.step_seconds_median,
        needed_bytes(trial),
    )
    return [None if number is None else float(f"{number:.6g}") for number in numbers]

"""The command `show`: all that is known of one trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.cli.options import Db, Json, TrialArgument
from orchestrator.cli.profile import print_profile
from orchestrator.cli.store.defaults import existing_store
from orchestrator.cli.terminal.output import (
    Column,
    numbers,
    plain,
    write,
    write_facts,
    write_json,
    write_line,
    write_table,
)
from orchestrator.cli.terminal.trial_text import STATE_STYLES
from orchestrator.report import trial_facts

if TYPE_CHECKING:
    from db.read.rows import AttemptRow, TrialDetail


def show(trial: TrialArgument, db: Db = None, as_json: Json = False) -> None:
    """Show all that is known of a trial.

    Why it was proposed, what was predicted and measured, and each attempt: when, where and with
    which software it ran, and how it failed.

    Examples:
      sweep show 17
      sweep show 17 --json
    """
    from db.read.holder import is_worked_on  # SQLAlchemy

    with existing_store(db) as store:
        detail = store.trial(trial)
        is_alive = is_worked_on(store.sweep_named(detail.sweep_name))
    if as_json:
        from orchestrator.report import records  # every column

        write_json("show", records.detail_record(detail))
        return
    _print_head(detail, is_worked_on=is_alive)
    for attempt in detail.attempts:
        _print_attempt(attempt, detail)
    if detail.profiles:
        write()
        print_profile(detail.profiles[-1])
    _print_events(detail)


def _print_head(detail: TrialDetail, *, is_worked_on: bool) -> None:
    trial = detail.trial
    title = trial_facts.title(trial, is_worked_on=is_worked_on)
    write_line(title, style=STATE_STYLES.get(trial.state, "bold"))
    write_facts(trial_facts.head_facts(detail, is_worked_on=is_worked_on))
    write()
    columns = [Column(), *numbers(*trial_facts.COMPARED_COLUMNS)]
    write_table(columns, trial_facts.compared_rows(trial))


def _print_attempt(attempt: AttemptRow, detail: TrialDetail) -> None:
    write()
    write_line(trial_facts.attempt_title(attempt, detail.attempts), style="bold")
    write_facts(trial_facts.attempt_facts(attempt, detail.cell.cell.num_gpus))
    if lines := trial_facts.log_lines(attempt):
        write_line("  last lines:", style="dim")
        for line in lines:
            write(f"    {plain(line)}")


def _print_events(detail: TrialDetail) -> None:
    write()
    write_line("Events", style="bold")
    at, event, attempt, state, more = trial_facts.EVENT_COLUMNS
    columns = [Column(at), Column(event), *numbers(attempt), Column(state)]
    write_table([*columns, Column(more, wrap=True)], trial_facts.event_rows(detail))

"""The lines above the tables of `sweep top` and `sweep ui`: state, trials, budgets, time left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from orchestrator.core.trial.lifecycle import TERMINAL
from orchestrator.report import quantities as show
from orchestrator.report.sweep_status import SweepStatus
from orchestrator.report.sweep_status import state_text as sweep_state_text
from orchestrator.report.time_left import SPENT, left_text
from orchestrator.report.top_screen import Tone, status_counts

if TYPE_CHECKING:
    from orchestrator.report.live_sweep import LiveRows


def head_lines(rows: LiveRows, now: datetime) -> list[tuple[str, Tone]]:
    """The lines above the tables: the sweep's state, its trials, its budget."""
    status = rows.status
    simulated = ", simulated: nothing is measured" if status.row.is_simulated else ""
    tone = Tone.BUSY if status.is_worked_on else Tone.PLAIN
    return [
        (f"{status.row.name}: {sweep_state_text(status)}{simulated}", tone),
        (_trials_line(status), Tone.PLAIN),
        (_budget_line(status, now), Tone.PLAIN),
    ]


def _trials_line(status: SweepStatus) -> str:
    counts = status_counts(status.totals, status.running)
    parts = [f"{number:,} {title}" for title, number in counts.items() if number]
    used = sum(one.num_gpus for one in status.running)
    gpus = ""
    if status.session is not None and status.is_worked_on:
        gpus = f"; {used:,} of {show.counted(status.session.num_gpus, 'GPU')} in use"
    return f"{', '.join(parts) or 'no trial yet'}{gpus}"


def _budget_line(status: SweepStatus, now: datetime) -> str:
    """Return what is spent of each budget, and the time that is left."""
    search, reserved = _search(status), status.reserved.total.reserved
    hours = show.gpu_hours(reserved)
    limit = search.get("max_gpu_hours")
    parts = [f"{hours} of {limit:g} GPU-hours" if limit else f"{hours} GPU-hours"]
    if status.price is not None:
        dollars = status.reserved.total.dollars(status.price)
        most = search.get("max_cost")
        parts.append(f"${dollars:,.2f} of ${most:,.2f}" if most else f"${dollars:,.2f}")
    if search.get("max_trials"):
        launched = sum(cell.num_launched for cell in status.cells)
        parts.append(f"{launched:,} of {search['max_trials'] * len(status.cells):,} trials")
    session = status.session
    if session is not None and status.is_worked_on:
        seconds = show.age_seconds(session.started_at, now)
        wall = search.get("max_wall_time")
        of = f" of {show.duration(wall)}" if wall else ""
        parts.append(f"this call {show.duration(max(seconds, 0.0))}{of}")
        return f"{', '.join(parts)}{_left(status, search, seconds)}"
    return ", ".join(parts)


def _left(status: SweepStatus, search: Mapping[str, Any], seconds: float) -> str:
    """The time left, as `sweep run` estimates it, of what the store knows.

    The store has no number of layouts that are still to try: without `max_trials`, budgets alone
    tell.
    """
    from orchestrator.sweep.progress import time_left  # SQLAlchemy

    if status.row.stop_requested is not None:
        return ""
    ended = sum(cell.num_trials[state] for cell in status.cells for state in TERMINAL)
    reserved, limit = status.reserved.total.reserved, search.get("max_gpu_hours")
    wall, most = search.get("max_wall_time"), search.get("max_trials")
    budgets: dict[str, Any] = {
        "wall_seconds_left": wall - seconds if wall else None,
        "gpu_seconds_left": limit * 3600 - reserved if limit else None,
        "gpu_seconds": reserved,
    }
    if not most:
        # Without a number of trials only the budgets bound it.
        bounds = [budgets["wall_seconds_left"]] if wall else []
        if limit and reserved > 0:
            bounds.append(budgets["gpu_seconds_left"] / reserved * seconds)
        if not bounds:
            return ""
        least = min(bounds)
        return f", at most {show.duration(least)} left" if least > 0 else SPENT
    confirm = search.get("confirm") or {}
    repeats = int(confirm.get("contenders", 0)) * int(confirm.get("repeats", 0))
    left = time_left(
        seconds=seconds,
        attempt_seconds=seconds,
        num_ended=ended,
        num_running=len(status.running),
        most_new=sum(max(most - cell.num_launched, 0) for cell in status.cells),
        most_repeats=[repeats] * len(status.cells),
        may_end_early=True,
        **budgets,
    )
    return left_text(left)


def _search(status: SweepStatus) -> Mapping[str, Any]:
    """The section `search` of the sweep file."""
    spec = json.loads(status.row.spec_json)
    found = spec.get("search") if isinstance(spec, dict) else None
    return found if isinstance(found, dict) else {}

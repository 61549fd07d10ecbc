"""Remarks in one line about a cell without a best layout, and about trials that are not ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.core.trial.lifecycle import UNFINISHED, TrialState
from orchestrator.core.trial.machine_load import disturbance_text, is_disturbed, relative_sd
from orchestrator.report import quantities as show

if TYPE_CHECKING:
    from db.read.rows import CellRow, CellStatus, FailedRepeatRow, TrialRow
    from orchestrator.report.ranking import Ranking


def why_no_best(status: CellStatus) -> str:
    """Say why a cell has no best layout: nothing fits, nothing worked, or nothing is known yet."""
    count = status.num_trials.get
    oom, pruned = count(TrialState.OUT_OF_MEMORY, 0), count(TrialState.PRUNED, 0)
    failed = count(TrialState.FAILED, 0)
    if num := status.num_implausible:
        others = count(TrialState.MEASURED, 0) - num
        parts = [f"{num} measured and left out, since the numbers cannot be true"]
        parts += [f"{others} measured under other conditions"] * bool(others)
        parts += [f"{oom} out of memory"] * bool(oom) + [f"{failed} failed"] * bool(failed)
        return f"no layout can be ranked: {', '.join(parts)}"
    if count(TrialState.MEASURED, 0):
        return "nothing is measured under the current conditions"
    if any(count(state, 0) for state in UNFINISHED) or not (oom or pruned or failed):
        return "nothing measured yet"
    memory = f"{oom} out of memory, {pruned} pruned with them"
    if failed:
        return f"nothing could be measured: {memory}, {failed} failed (`sweep trials` shows why)"
    return f"nothing has fitted: {memory}"


def load_text(trials: Sequence[TrialRow]) -> str | None:
    """A line about the worst load by others; None if no trial was disturbed."""
    busy = [trial for trial in trials if is_disturbed(trial.load)]
    if not busy:
        return None
    worst = max(busy, key=lambda trial: relative_sd(trial.load))
    load, trial_ids = (
        disturbance_text(worst.load),
        show.numbered("trial", [trial.id for trial in busy]),
    )
    if len(busy) == 1:
        return f"{trial_ids}: {load} while it was measured"
    return f"{trial_ids}: {load} while they were measured, at the worst (trial {worst.id})"


def unknown_interval_text(ranking: Ranking, shown: Sequence[TrialRow]) -> str | None:
    """A line about compared speeds whose 95 % interval is unknown; None if all are known."""
    unknown = [
        trial.id
        for trial in shown
        if (found := ranking.compared.get(trial.id)) is not None
        and show.is_too_wide(found.relative_confidence)
    ]
    if not unknown:
        return None
    which = show.numbered("trial", unknown)
    return (
        f"unknown: the speed without drift of {which} may differ by 100% or more from what is"
        f" shown; {ranking.varies}. More repeats make it more precise (search.confirm.repeats)"
    )


def implausible_text(why: Mapping[int, str]) -> str:
    """A line about trials whose numbers cannot be true, and why, by trial id."""
    left_out = f"Left out, because the numbers cannot be true: {show.numbered('trial', list(why))}"
    (first, reason), *_ = why.items()
    if num_others := len(set(why.values())) - 1:
        others = show.counted(num_others, "other reason")
        return f"{left_out}. Trial {first}: {reason} ({others}: sweep trials)"
    return f"{left_out}; {reason}"


def ended_early_text(trial_ids: Sequence[int]) -> str:
    """A line about trials that were ended early."""
    which = show.numbered("trial", trial_ids)
    return f"Ended early, since they could not be the fastest, and not ranked: {which}"


def failed_repeats_text(trial: TrialRow, failed: Sequence[FailedRepeatRow]) -> str | None:
    """A line about the repeats of a trial that are among those that failed; None if none is."""
    failed = [one for one in failed if one.trial_id == trial.id]
    if not failed:
        return None
    last, nums = failed[-1], show.counted(len(failed), "repeat")
    why = f"{'the last with ' * (len(failed) > 1)}{last.failure_kind}: {last.failure_message}"
    runs = "only 1 run counts" if trial.num_measurements == 1 else "only its other runs count"
    return f"{nums} of trial {trial.id} failed, so {runs} ({why})"


def untried_text(cell: CellRow) -> str:
    """A line about the layouts of a cell that were never tried, and why."""
    nums = show.counted(cell.num_untried or 0, "layout")
    return f"{nums} of this cell never tried: {cell.stop_reason}"


def failed_text(sweep: str, num: int) -> str:
    """A line about the layouts of a cell that failed, without those that ran out of memory."""
    layouts = show.counted(num, "layout")
    return f"{layouts} of this cell failed: sweep trials {sweep} --state failed"


def waiting_text(cell: CellRow, num: int) -> str:
    """A line about the layouts of a cell that wait, while no call works on the sweep.

    A layout that the file no longer names waits in the store: its axis may come back.
    """
    waits = f"{show.counted(num, 'layout')} {'waits' if num == 1 else 'wait'} to be measured"
    if (key := key_of_spent_budget(cell.stop_reason)) is not None:
        return f"{waits}: {key} is spent, so raise it for `sweep run` to continue with them"
    return f"{waits}: the same `sweep run` measures what its file still names of them"


def key_of_spent_budget(stop_reason: str | None) -> str | None:
    """Return the key of the budget of all calls that ended a search; None if none did.

    `search.max_wall_time` is one of each call.
    """
    from orchestrator.sweep.progress import StopReason  # SQLAlchemy

    keys: dict[str | None, str] = {
        StopReason.GPU_HOURS: "search.max_gpu_hours",
        StopReason.COST: "search.max_cost",
    }
    return keys.get(stop_reason)

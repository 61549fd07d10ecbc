"""Shares a budget among the cells of a sweep: which of them goes on first, and what is kept for first trials and for confirming each best.

It knows what cells have launched, measured and are expected to gain. It starts nothing; spending.py counts what was spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.core.sweepfile.sections import Confirm
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.placement import FIRST_TRIALS
from orchestrator.sweep.progress import CONFIRMED

# Factor on what is kept: launches of one layout differ by a fifth, and a repeat that is not started confirms nothing.
MARGIN = 1.15
FEWEST_TO_CONFIRM = 2  # layouts measured: before, another one tells more than a repeat
# Expected gain, relative, below which a cell goes on after those that have more to gain.
LITTLE = 0.002


@dataclass(frozen=True, kw_only=True)
class ReservedBudget:
    """The part of a budget that is kept for other attempts."""

    gpu_seconds: float = 0.0
    # Time of the cluster for these attempts, side by side where they fit.
    seconds: float = 0.0


NOTHING = ReservedBudget()


def turn(run: CellSearch) -> tuple[float, float, float]:
    """The place of a cell among those that share a budget, smallest first.

    Cells of which nothing is measured, the cheapest first; then in rounds of one launch each, in each of them what should gain most per
    GPU-second first; then what has little to gain. The first repeat of a best of several goes before any of these rounds, further ones last.
    """
    if run.stopped is not None and not run.waiting:
        return (1, -1, 0) if _wants_a_repeat(run) else (3, 0, 0)
    if run.has_nothing and not run.num_new and run.launched < FIRST_TRIALS:
        return 0, run.launched, run.guessed_gpu_seconds
    gain = run.expected_gain()
    if gain is None:
        return 1, run.launched, 0
    return (1 if gain >= LITTLE else 2), run.launched, -gain / max(run.guessed_gpu_seconds, 1e-9)


def expected_by_others(run: CellSearch, runs: Sequence[CellSearch]) -> float | None:
    """Expected GPU-seconds of a trial in a cell without any ended trial, by what trials of other cells held. None: nothing was measured."""
    scale = _scale(runs)
    return None if scale is None else run.guessed_gpu_seconds * scale


def reserved_from(
    run: CellSearch,
    runs: Sequence[CellSearch],
    *,
    confirm: Confirm,
    is_repeat: bool,
    slots: int,
    at_once: int,
) -> ReservedBudget:
    """The part of a budget that a cell leaves to the others, and to the confirmation of its own best, when it launches one more.

    A cell of which nothing is measured leaves nothing; the repeat that something is kept for leaves what first trials of other cells take.
    """
    if run.has_nothing:
        return NOTHING
    others = [other for other in runs if other is not run]
    scale = _scale(runs) or 1.0
    firsts = [
        (other, other.guessed_gpu_seconds * scale) for other in others if _wants_a_first(other)
    ]
    is_kept_for = is_repeat and _wants_a_repeat(run)
    to_confirm = (
        []
        if is_kept_for or not confirm.repeats
        else [other for other in others if _wants_a_repeat(other)]
    )
    if confirm.repeats and not is_repeat and _will_want_a_repeat(run, is_alone=not others):
        to_confirm.append(run)
    repeats = [(one, one.guessed_gpu_seconds) for one in to_confirm]
    return _sum([*firsts, *repeats], slots=slots, at_once=at_once)


def _sum(some: Iterable[tuple[CellSearch, float]], *, slots: int, at_once: int) -> ReservedBudget:
    held = list(some)
    gpu_seconds = MARGIN * sum(one for _, one in held)
    one_by_one = MARGIN * sum(one / run.cell.num_gpus for run, one in held)
    return ReservedBudget(
        gpu_seconds=gpu_seconds,
        seconds=max(gpu_seconds / max(slots, 1), one_by_one / max(at_once, 1)),
    )


def _wants_a_first(run: CellSearch) -> bool:
    return (
        run.has_nothing
        and run.stopped is None
        and not run.num_new
        and run.launched < FIRST_TRIALS
        and run.searcher.untried > 0
    )


def _wants_a_repeat(run: CellSearch) -> bool:
    may_be_confirmed = (run.stopped is None or run.stopped in CONFIRMED) and not run.is_settled
    return (
        may_be_confirmed
        and run.confirmation.num_measured >= FEWEST_TO_CONFIRM
        and not run.confirmation.is_best_repeated
    )


def _will_want_a_repeat(run: CellSearch, *, is_alone: bool) -> bool:
    """Say whether a cell that launches another layout should have a repeat left after it. A single cell measures a second layout first."""
    return not run.confirmation.is_best_repeated and (not is_alone or _wants_a_repeat(run))


def _scale(runs: Iterable[CellSearch]) -> float | None:
    """The ratio of what trials held to what was predicted, the median over cells that have measured. None: no cell has."""
    known = [
        run.trial_gpu_seconds / (run.predicted_seconds * run.cell.num_gpus)
        for run in runs
        if run.has_measured and run.trial_gpu_seconds and run.predicted_seconds
    ]
    return median(known) if known else None

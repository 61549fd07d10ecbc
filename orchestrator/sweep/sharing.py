"""Shares a budget among the cells of a sweep.

It decides which cell goes on first, and what is reserved for first trials and for confirming each
best. It knows what cells have launched, measured and are expected to gain. It starts nothing;
spending.py counts what was spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.core.sweepfile.search_section import Confirm
from orchestrator.sweep.cell_search import CellSearch

# Trials of each cell before any cell continues: after this many a search is near its best, and a
# budget may end soon.
FIRST_TRIALS = 8
# Factor on what is reserved: launches of one layout differ by a fifth, and a repeat that is not
# started confirms nothing.
MARGIN = 1.15
# With fewer measured layouts, another layout tells more than a repeat.
FEWEST_TO_CONFIRM = 2
# A cell with a smaller expected relative gain goes after those that have more to gain.
LITTLE = 0.002


@dataclass(frozen=True, kw_only=True)
class ReservedBudget:
    """The part of a budget that is reserved for other attempts."""

    gpu_seconds: float = 0.0
    # How long the cluster takes for these attempts, which run side by side if they fit.
    seconds: float = 0.0


NOTHING = ReservedBudget()


def precedence(search: CellSearch) -> tuple[float, float, float]:
    """Return the place of a cell among those that share a budget, smallest first.

    1. Cells without a measurement, the cheapest first.
    2. The first repeat of a best of several, once the search has ended.
    3. Rounds of one launch each, in each round the best expected gain per GPU-second first.
    4. Cells that have little to gain.
    5. Further repeats.
    """
    if not search.is_searched and not search.retries.waiting:
        return (1, -1, 0) if _wants_a_repeat(search) else (3, 0, 0)
    if search.has_nothing and not search.num_new and search.launched < FIRST_TRIALS:
        return 0, search.launched, search.cost.guessed_gpu_seconds
    gain = search.expected_gain()
    if gain is None:
        return 1, search.launched, 0
    rate = gain / max(search.cost.guessed_gpu_seconds, 1e-9)
    return (1 if gain >= LITTLE else 2), search.launched, -rate


def expected_by_others(search: CellSearch, searches: Sequence[CellSearch]) -> float | None:
    """Return GPU-seconds of a trial in a cell without ended trials, by trials of other cells.

    None: nothing was measured.
    """
    scale = _scale(searches)
    return None if scale is None else search.cost.guessed_gpu_seconds * scale


def reserved_from(
    search: CellSearch,
    searches: Sequence[CellSearch],
    *,
    confirm: Confirm,
    is_repeat: bool,
    slots: int,
    at_once: int,
) -> ReservedBudget:
    """Return what a cell that launches one more leaves to the others and to its own confirmation.

    The first trials of a cell reserve nothing for others, as long as it has no measurement and none
    of them runs. The repeat that the budget is reserved for leaves only what first trials of other
    cells take.
    """
    if _wants_a_first(search):
        return NOTHING
    others = [other for other in searches if other is not search]
    scale = _scale(searches) or 1.0
    reserved = [
        (one, one.cost.guessed_gpu_seconds * scale) for one in others if _wants_a_first(one)
    ]
    if confirm.repeats:
        if not (is_repeat and _wants_a_repeat(search)):
            repeats = [one for one in others if _wants_a_repeat(one)]
            reserved += [(one, one.cost.guessed_gpu_seconds) for one in repeats]
        if not is_repeat and _will_want_a_repeat(search, is_alone=not others):
            reserved.append((search, search.cost.guessed_gpu_seconds))
    return _sum(reserved, slots=slots, at_once=at_once)


def _sum(
    reserved: Sequence[tuple[CellSearch, float]], *, slots: int, at_once: int
) -> ReservedBudget:
    gpu_seconds = MARGIN * sum(one for _, one in reserved)
    one_by_one = MARGIN * sum(one / search.cell.num_gpus for search, one in reserved)
    seconds = max(gpu_seconds / max(slots, 1), one_by_one / max(at_once, 1))
    return ReservedBudget(gpu_seconds=gpu_seconds, seconds=seconds)


def _wants_a_first(search: CellSearch) -> bool:
    return (
        search.has_nothing
        and search.is_searched
        and not search.num_new
        and search.launched < FIRST_TRIALS
        and search.searcher.untried > 0
    )


def _wants_a_repeat(search: CellSearch) -> bool:
    return (
        search.life.may_be_confirmed
        and search.confirmation.runs.num_trials >= FEWEST_TO_CONFIRM
        and not search.confirmation.is_best_repeated
    )


def _will_want_a_repeat(search: CellSearch, *, is_alone: bool) -> bool:
    """Return whether a cell that launches another layout needs a repeat after it.

    A single cell measures a second layout first.
    """
    is_repeated = search.confirmation.is_best_repeated
    return not is_repeated and (not is_alone or _wants_a_repeat(search))


def _scale(searches: Iterable[CellSearch]) -> float | None:
    """Return the ratio of the time that trials reserved to the predicted time.

    It is the median over cells that have measured. None: no cell has.
    """
    known = [one for search in searches if (one := search.cost.over_prediction) is not None]
    return median(known) if known else None

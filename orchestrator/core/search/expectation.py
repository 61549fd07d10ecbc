"""Estimates how many layouts of a cell fit, run out of memory, or fail otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.core.physics.calibration import Predicted
from orchestrator.core.physics.trainer import USABLE_SHARE
from orchestrator.core.problem.arrays import Floats, Ints
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.search.planner import Candidates
from orchestrator.core.search.proposer import FAILS_UNTIL_KNOWN

# In log bytes, on an unknown device, for which memory cannot be calibrated.
UNKNOWN_DEVICE_MEMORY_SD = 0.18
# Probability above which a layout counts as fitting; below 1 - LIKELY it counts as not fitting.
LIKELY = 0.9
MAX_ROWS = 4096  # of more, an even selection
FEWEST_TRIALS = 10.0  # weigh like the usual share


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """The number of layouts of a cell that fit: a sum of probabilities, and bounds."""

    expected: float
    at_least: int  # the likely ones
    at_most: int  # all but the unlikely ones


def probability_of_fitting(
    candidates: Candidates, rows: Ints, predicted: Predicted | None = None
) -> Floats | None:
    """Return the probability, 0 to 1, that each row stays within the usable memory.

    None: there is no limit. `predicted` may be given if `candidates.predict` was called for these
    rows before.
    """
    if candidates.memory_limit_bytes is None:
        return None
    if predicted is None and candidates.predict is not None:
        predicted = candidates.predict(candidates.table.take(rows))
    return chance_within(
        candidates.memory_limit_bytes, candidates.memory_bytes[rows], predicted=predicted
    )


def chance_within(
    limit_bytes: float, memory_bytes: Floats, *, predicted: Predicted | None
) -> Floats:
    """Return the probability, 0 to 1, that each peak stays within what is usable of a limit.

    `predicted` has the same peaks with their uncertainty; None on an unknown device.
    """
    if predicted is not None:
        return predicted.probability_of_fitting(limit_bytes * predicted.usable_share)
    below = np.log(limit_bytes * USABLE_SHARE) - np.log(memory_bytes)
    return normal_cdf(below / UNKNOWN_DEVICE_MEMORY_SD)


def fitting(candidates: Candidates) -> Fitting | None:
    """Return how many layouts of a cell should fit; None without a memory limit."""
    num = len(candidates)
    rows = even_selection(num)
    chances = probability_of_fitting(candidates, rows)
    if chances is None:
        return None
    scale = num / max(len(rows), 1)
    return Fitting(
        expected=float(chances.sum()) * scale,
        at_least=round(float((chances >= LIKELY).sum()) * scale),
        at_most=round(float((chances > 1.0 - LIKELY).sum()) * scale),
    )


def expected_out_of_memory(candidates: Candidates, *, num_trials: int) -> float | None:
    """Return the expected number of out-of-memories if the first layouts were all launched.

    None without a memory limit.
    """
    rows = candidates.order[:num_trials]
    selected = rows[even_selection(len(rows))]
    chances = probability_of_fitting(candidates, selected)
    if chances is None:
        return None
    return float((1.0 - chances).sum()) * len(rows) / max(len(selected), 1)


def even_selection(num_rows: int) -> Ints:
    """Return at most MAX_ROWS indices, evenly spread over the rows."""
    rows = np.linspace(0, max(num_rows - 1, 0), min(num_rows, MAX_ROWS))
    return np.unique(rows.astype(np.int64))


def share_that_fails(*, num_failed: int, num_measured: int) -> float:
    """Return the share, 0 to 1, of fitting layouts that fail otherwise.

    It is the usual share, corrected by the trials of this cell.
    """
    return (FEWEST_TRIALS * FAILS_UNTIL_KNOWN + num_failed) / (
        FEWEST_TRIALS + num_failed + num_measured
    )

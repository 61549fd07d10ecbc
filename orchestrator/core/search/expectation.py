"""Expected outcomes of the layouts of a cell when they are launched: how many fit, run out of memory, or fail otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.physics.calibration import Predicted
from orchestrator.core.problem.layout_table import Ints
from orchestrator.core.problem.normal import normal_cdf
from orchestrator.core.search.planner import Candidates
from orchestrator.core.search.proposer import FAILS_UNTIL_KNOWN, USABLE_SHARE

Floats = NDArray[np.float64]

# Of log bytes, where the device is unknown, so that memory cannot be calibrated.
UNKNOWN_DEVICE_MEMORY_SD = 0.18
# Probability above which a layout counts as fitting; below 1 - LIKELY it counts as not fitting.
LIKELY = 0.9
MAX_ROWS = 4096  # that are looked at; of more, an even selection stands for all
FEWEST_TRIALS = 10.0  # whose outcomes weigh as much as what is usual


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """The number of layouts of a cell that fit into the memory of a device: a sum of probabilities, and bounds."""

    expected: float
    at_least: int  # that are likely to
    at_most: int  # that are not unlikely to


def probability_of_fitting(
    candidates: Candidates, rows: Ints, predicted: Predicted | None = None
) -> Floats | None:
    """The probability that the layouts of some rows stay within the usable memory. None where the limit is not known.

    `predicted` is what `candidates.predict` says of these rows, where that is at hand.
    """
    if candidates.memory_limit_bytes is None:
        return None
    usable = candidates.memory_limit_bytes * USABLE_SHARE
    if predicted is None and candidates.predict is not None:
        predicted = candidates.predict(candidates.table.take(rows))
    if predicted is not None:
        return predicted.probability_of_fitting(usable)
    return normal_cdf(
        (np.log(usable) - np.log(candidates.memory_bytes[rows])) / UNKNOWN_DEVICE_MEMORY_SD
    )


def fitting(candidates: Candidates) -> Fitting | None:
    """How many of all layouts of a cell fit. None where the limit of the memory is not known."""
    num = len(candidates)
    rows = np.unique(np.linspace(0, max(num - 1, 0), min(num, MAX_ROWS)).astype(np.int64))
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
    """The expected number of out-of-memories if the first layouts of the order were all launched."""
    rows = candidates.order[:num_trials]
    chosen = rows[
        np.unique(np.linspace(0, max(len(rows) - 1, 0), min(len(rows), MAX_ROWS)).astype(np.int64))
    ]
    chances = probability_of_fitting(candidates, chosen)
    return (
        None if chances is None else float((1.0 - chances).sum()) * len(rows) / max(len(chosen), 1)
    )


def share_that_fails(*, num_failed: int, num_measured: int) -> float:
    """The share of fitting layouts that fail by their own or the code's fault: the usual share, corrected by trials of the sweep."""
    return (FEWEST_TRIALS * FAILS_UNTIL_KNOWN + num_failed) / (
        FEWEST_TRIALS + num_failed + num_measured
    )

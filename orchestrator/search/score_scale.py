"""The scores of a cell's layouts: logarithms of the seconds of a step, or of what replaces them."""

from __future__ import annotations

from math import exp, log

import numpy as np

from orchestrator.core.search.planner import Candidates
from orchestrator.core.sweepfile.objective import Objective


class ScoreScale:
    """Turns values of the objective into scores, less is better, and scores into words."""

    def __init__(self, candidates: Candidates, objective: Objective) -> None:
        self._scale = _scale(candidates)
        self._is_time = objective is Objective.STEP_SECONDS

    def score(self, value: float) -> float:
        """Return the score of a value of the objective."""
        return log(value if self._is_time else self._scale / value)

    def tokens_per_second_per_gpu(self, score: float) -> float | None:
        """Return the speed of a score. None: the objective is the seconds of a step."""
        return None if self._is_time else self._scale / exp(score)

    def gain(self, improvement: float) -> float:
        """Return how much better a score is that is so much lower, relative."""
        return 1 - exp(-improvement) if self._is_time else exp(improvement) - 1

    def text(self, score: float) -> str:
        """Return the value of a score for people."""
        tokens = self.tokens_per_second_per_gpu(score)
        if tokens is None:
            return f"{exp(score):,.3g} s a step"
        return f"{tokens:,.0f} tokens/s/GPU" if tokens >= 100 else f"{tokens:,.3g} tokens/s/GPU"


def _scale(candidates: Candidates) -> float:
    """Seconds of a step times tokens per second and GPU: the same for every layout of a cell.

    1 if nothing is predicted.
    """
    products = candidates.step_seconds * candidates.tokens_per_second_per_gpu
    known = products[np.isfinite(products)]
    return float(known[0]) if len(known) else 1.0

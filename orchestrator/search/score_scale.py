"""Turns scores, the logarithms of the seconds of a step, into numbers and words for people."""

from __future__ import annotations

from math import exp

from orchestrator.core.problem.cell import Cell
from orchestrator.core.sweepfile.objective import Objective


class ScoreScale:
    """The scores of a cell's layouts as values of the objective. A lower score is better."""

    def __init__(self, cell: Cell, objective: Objective) -> None:
        self._cell = cell
        self._is_time = objective is Objective.STEP_SECONDS

    def tokens_per_second_per_gpu(self, score: float) -> float | None:
        """Return the speed of a score. None: the objective is the seconds of a step."""
        return None if self._is_time else self._cell.tokens_per_second_per_gpu(exp(score))

    def gain(self, improvement: float) -> float:
        """Return how much better a score is that is so much lower, relative."""
        return 1 - exp(-improvement) if self._is_time else exp(improvement) - 1

    def text(self, score: float) -> str:
        """Return the value of a score for people."""
        tokens = self.tokens_per_second_per_gpu(score)
        if tokens is None:
            return f"{exp(score):,.3g} s a step"
        return f"{tokens:,.0f} tokens/s/GPU" if tokens >= 100 else f"{tokens:,.3g} tokens/s/GPU"

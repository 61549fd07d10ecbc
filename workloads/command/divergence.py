"""Notices that a training diverged, by the loss and the gradient norm that its lines tell."""

from __future__ import annotations

import math
from typing import Any

from workloads.rank import NotFinite


class Divergence:
    """The first loss, or the last gradient norm, that is not finite."""

    def __init__(self) -> None:
        self.found: NotFinite | None = None
        # The last gradient norm and its step.
        self._norm: tuple[Any, float] | None = None

    @property
    def is_possible(self) -> bool:
        """True if it was found, or the last norm is not finite."""
        return self.found is not None or self._norm_is_not_finite

    def note(self, *, loss: Any, norm: Any, step: float) -> None:
        """Note what the line of a step tells; None: nothing."""
        if self.found is None and _is_not_finite(loss):
            self.found = NotFinite.of("loss", loss, step=step)
        if norm is not None:
            self._norm = norm, step

    def judge_norm(self) -> None:
        """Count the last norm. A scaler of fp16 losses skips single steps that overflow."""
        if self.found is None and self._norm is not None and self._norm_is_not_finite:
            value, step = self._norm
            self.found = NotFinite.of("gradient norm", value, step=step)

    @property
    def _norm_is_not_finite(self) -> bool:
        return self._norm is not None and _is_not_finite(self._norm[0])


def _is_not_finite(value: Any) -> bool:
    """True for NaN and infinity, also as texts; False for null and for what is no number."""
    try:
        return value is not None and not isinstance(value, bool) and not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
    except OverflowError:  # an integer beyond any float
        return True

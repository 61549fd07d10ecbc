"""One run of a layout, as drift and winners are judged by."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.trial.purpose import Purpose

# Relative, of runs without an interval of their own: published repeats differ by 0.7 to 4 %.
USUAL_SD = 0.02


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurement of one attempt of a layout."""

    step_seconds: float  # median
    # Half the 95 % interval of that median, relative; None: too few steps for one.
    relative_confidence: float | None = None
    load_sd: float = 0.0  # relative, by the load of others
    at: float | None = None  # seconds, on one clock; None: unknown
    nodes: tuple[str, ...] = ()
    purpose: Purpose | None = None  # None: unknown
    thrashing: bool = False  # it ran at the memory edge

    @property
    def variance(self) -> float:
        """The variance of the logarithm of its step time, with all possible effect of the load."""
        return self.variance_at(1.0)

    def variance_at(self, load_scale: float) -> float:
        """Return the same if runs show this part of the load's possible effect, 0 to 1."""
        return self.own_variance + (load_scale * self.load_sd) ** 2

    @property
    def own_variance(self) -> float:
        """The same without the load."""
        own = USUAL_SD if self.relative_confidence is None else self.relative_confidence / 1.96
        return own**2

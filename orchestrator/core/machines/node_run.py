"""One measurement, as nodes are scored by."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_RUNS = 2000  # older ones are out of date


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRun:
    """One measurement of an attempt."""

    nodes: tuple[str, ...]
    cell: int
    trial: int  # its runs have one layout
    log_seconds: float  # of a step
    log_predicted: float | None = None  # by the search

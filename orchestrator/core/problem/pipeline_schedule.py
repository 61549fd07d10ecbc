"""The order in which pipeline stages work on micro-batches, and how many stages a rank holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class ScheduleKind(StrEnum):
    # All forward passes, then all backward passes (Huang et al. 2019).
    GPIPE = "gpipe"
    # One forward, one backward pass in turn (Narayanan et al. 2019).
    ONE_F_ONE_B = "1f1b"
    # The same with several stages on each rank (Narayanan et al. 2021).
    INTERLEAVED = "interleaved"


MAX_VIRTUAL_STAGES = 999
_TEXT = re.compile(r"gpipe|1f1b|interleaved:([1-9]\d{0,2})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """A schedule; `virtual_stages` are the stages of each rank, more than one if interleaved."""

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        is_interleaved = self.kind is ScheduleKind.INTERLEAVED
        if is_interleaved != (2 <= self.virtual_stages <= MAX_VIRTUAL_STAGES):
            raise ValueError(
                f"pipeline_schedule {self.kind} with {self.virtual_stages} stages per rank:"
                f" expected 2 to {MAX_VIRTUAL_STAGES} of interleaved, and 1 of the others"
            )

    @classmethod
    def parse(cls, text: str) -> PipelineSchedule:
        """Read `gpipe`, `1f1b` or `interleaved:2`. Raises ValueError with what is allowed."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"pipeline_schedule {text!r} is not one of gpipe, 1f1b,"
                " interleaved:STAGES (per rank: interleaved:2)"
            )
        kind = ScheduleKind(text.split(":")[0])
        return cls(kind=kind, virtual_stages=int(match[1] or 1))

    def num_in_flight(self, *, num_ranks: int, num_micro_batches: int) -> float:
        """The micro-batches whose activations the first rank keeps at once, each in all its layers.

        Korthikanti et al. 2022: interleaving keeps (p - 1) / v more than 1f1b.
        """
        if self.kind is ScheduleKind.GPIPE:
            return num_micro_batches
        is_interleaved = self.kind is ScheduleKind.INTERLEAVED
        more = (num_ranks - 1) / self.virtual_stages if is_interleaved else 0
        return min(num_ranks + more, num_micro_batches)

    def __str__(self) -> str:
        return f"{self.kind}:{self.virtual_stages}" if self.virtual_stages > 1 else str(self.kind)


ONE_F_ONE_B = PipelineSchedule()

"""The objectives of a sweep file, and the value that a measured layout has of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from orchestrator.core.problem.cell import Cell
from orchestrator.core.trial.merit import (
    NOTHING_ELSE,
    Merit,
    OtherMerits,
    dollars_per_billion_tokens,
)


class Objective(StrEnum):
    TOKENS_PER_SECOND_PER_GPU = "tokens_per_second_per_gpu"
    STEP_SECONDS = "step_seconds"
    MEMORY_HEADROOM = "memory_headroom"
    DOLLARS_PER_BILLION_TOKENS = "dollars_per_billion_tokens"
    JOULES_PER_TOKEN = "joules_per_token"

    @property
    def merit(self) -> Merit:
        """The merit that orders a cell's layouts as this does: one price holds for all of them."""
        match self:
            case Objective.MEMORY_HEADROOM:
                return Merit.HEADROOM
            case Objective.JOULES_PER_TOKEN:
                return Merit.EFFICIENCY
            case (
                Objective.TOKENS_PER_SECOND_PER_GPU
                | Objective.STEP_SECONDS
                | Objective.DOLLARS_PER_BILLION_TOKENS
            ):
                return Merit.SPEED

    @property
    def is_larger_better(self) -> bool:
        """True if it is maximised."""
        return self in (Objective.TOKENS_PER_SECOND_PER_GPU, Objective.MEMORY_HEADROOM)


@dataclass(frozen=True, kw_only=True)
class LayoutNumbers:
    """The numbers of a measured layout from which its objectives follow; None: unknown."""

    tokens_per_second_per_gpu: float | None
    step_seconds: float | None
    others: OtherMerits = NOTHING_ELSE
    price_per_gpu_hour: float | None = None  # US dollars

    @classmethod
    def of_step(
        cls,
        cell: Cell,
        step_seconds: float,
        *,
        others: OtherMerits = NOTHING_ELSE,
        price_per_gpu_hour: float | None = None,
    ) -> Self:
        """Return the numbers of a layout of the cell that takes so long for a step."""
        return cls(
            tokens_per_second_per_gpu=cell.tokens_per_second_per_gpu(step_seconds),
            step_seconds=step_seconds,
            others=others,
            price_per_gpu_hour=price_per_gpu_hour,
        )

    def value(self, objective: Objective) -> float | None:
        """Return the layout's value of an objective."""
        match objective:
            case Objective.TOKENS_PER_SECOND_PER_GPU:
                return self.tokens_per_second_per_gpu
            case Objective.STEP_SECONDS:
                return self.step_seconds
            case Objective.MEMORY_HEADROOM:
                return self.others.headroom
            case Objective.DOLLARS_PER_BILLION_TOKENS:
                speed, price = self.tokens_per_second_per_gpu, self.price_per_gpu_hour
                if speed is None or price is None:
                    return None
                return dollars_per_billion_tokens(speed, price)
            case Objective.JOULES_PER_TOKEN:
                return self.others.joules_per_token


def ranked_by(objectives: Sequence[Objective]) -> Objective:
    """Return the objective by which layouts are ranked, one of speed."""
    speeds = (Objective.TOKENS_PER_SECOND_PER_GPU, Objective.STEP_SECONDS)
    return next((one for one in objectives if one in speeds), speeds[0])


def objectives_of(stored: str | Sequence[str] | None) -> tuple[Objective, ...]:
    """Return the objectives of a stored sweep file: one, several, or the default."""
    names = [stored] if isinstance(stored, str) else stored or ["tokens_per_second_per_gpu"]
    return tuple(map(Objective, names))

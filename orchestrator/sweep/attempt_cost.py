"""Estimates the cost of a cell's next attempt from the last ones, or from its prediction."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.problem.cell import Cell
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.search.proposal import Proposal


@dataclass(eq=False, kw_only=True)
class AttemptCost:
    """Seconds and GPU-seconds of the attempts of one cell."""

    cell: Cell
    # Predicted for one trial, before the first one has ended.
    predicted_seconds: float
    # The last attempt of this call took this, from launch to end.
    last_seconds: float = 0.0
    # Reserved by the last measured trial, else by the last trial. None: none has ended.
    gpu_seconds: float | None = None
    has_measured: bool = False

    def note_reserved(self, gpu_seconds: float, *, is_measured: bool) -> None:
        """Note what an attempt reserved.

        An attempt without a number tells how long the next one takes only until one is measured.
        """
        if is_measured or not self.has_measured:
            self.gpu_seconds = gpu_seconds
        self.has_measured |= is_measured

    @property
    def expected_seconds(self) -> float:
        """Return the seconds of the next attempt: those of the last one, or the predicted ones."""
        return self.last_seconds or self.predicted_seconds

    def expected_gpu_seconds(self, proposal: Proposal | None, cost: TrialCost) -> float | None:
        """Return what the next attempt is expected to reserve; None: unknown.

        It is predicted once launches were measured. Before, it is what the last attempt reserved.
        """
        rate = proposal.predicted_tokens_per_second_per_gpu if proposal is not None else None
        if rate is None or not cost.is_launch_measured:
            return self.gpu_seconds
        num_gpus = self.cell.num_gpus
        return cost.seconds(self.cell.tokens_per_step / num_gpus / rate) * num_gpus

    @property
    def guessed_gpu_seconds(self) -> float:
        """Return what the last attempt reserved, else the prediction with a usual launch."""
        return self._predicted_gpu_seconds if self.gpu_seconds is None else self.gpu_seconds

    @property
    def over_prediction(self) -> float | None:
        """Return the reserved time of measured trials over the prediction; None: not known."""
        if not (self.has_measured and self.gpu_seconds and self.predicted_seconds):
            return None
        return self.gpu_seconds / self._predicted_gpu_seconds

    @property
    def _predicted_gpu_seconds(self) -> float:
        return self.predicted_seconds * self.cell.num_gpus

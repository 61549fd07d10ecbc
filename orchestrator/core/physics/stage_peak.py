"""The peak of a pipeline stage: what its layouts hold throughout, and at their fullest moment."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.physics.stage_rows import StageRows
from orchestrator.core.problem.arrays import Floats, Mask


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePeak:
    """Bytes of a rank: columns of `rows` with an entry for each group, or for every layout."""

    rows: StageRows
    # For each group.
    parameters: Floats
    gradients: Floats
    optimizer: Floats
    # For every layout: kept for the backward pass.
    activations: Floats
    # For every layout: needed on top of these at the fullest moment; and whether that moment is the
    # loss or the head's backward pass.
    temporaries: Floats
    at_head: Mask

    @property
    def total(self) -> Floats:
        """The bytes by layout. The order of the sum is that of `MemoryPrediction.total`."""
        found = self.rows.groups.spread(self.parameters + self.gradients + self.optimizer)
        return found + self.activations + self.temporaries + self.rows.trainer.reserve_bytes

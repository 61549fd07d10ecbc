"""The factor on the loss in fp16: large, so that small gradients are not rounded to zero.

As torch.amp.GradScaler, and with its constants, for gradients that no torch optimizer holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """Halves after a step with gradients that overflow, and doubles after 2,000 without."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _FIRST, device=device)
        self._good_steps = torch.zeros((), device=device)

    def update(self, overflows: Tensor) -> None:
        """Adapt after a step. `overflows` is 1 or 0; nothing waits for the device."""
        good_steps = (self._good_steps + 1.0) * (1.0 - overflows)
        grows = (good_steps == _GROWTH_INTERVAL).float()
        factor = torch.where(overflows > 0, _BACKOFF, 1.0 + (_GROWTH - 1.0) * grows)
        self.value *= factor
        self._good_steps = good_steps * (1.0 - grows)

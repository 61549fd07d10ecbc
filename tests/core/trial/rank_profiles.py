"""Builds profiles of ranks."""

from __future__ import annotations

from typing import Any

from orchestrator.core.trial.kernel_names import Axis
from orchestrator.core.trial.rank_profile import RankProfile
from orchestrator.core.trial.trace_split import AttentionKernel, Part


def rank_profile(parts: dict[Part, int] | None = None, **known: Any) -> RankProfile:
    """A step of 1,000,000 ns. What the parts leave of it is matrix products."""
    given = parts or {}
    rest = 1_000_000 - sum(given.values())
    defaults: dict[str, Any] = {
        "num_steps": 1,
        "window_nanoseconds": 1_000_000,
        "parts": {**dict.fromkeys(Part, 0), Part.MATMUL: rest, **given},
        "overlapped": dict.fromkeys(Axis, 0),
        "num_kernels": 900,
        "median_kernel_nanoseconds": 50_000,
        "is_on_device": True,
        "host_nanoseconds": 100_000,
        "attention": AttentionKernel.FUSED,
    }
    return RankProfile.model_validate(defaults | known)

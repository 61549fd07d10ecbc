"""A quantile of the standard normal distribution, for processes that need no numpy."""

from __future__ import annotations

Z90 = 1.2816  # nine tenths lie below

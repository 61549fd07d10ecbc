"""The SQL condition of attempts that still count, as `AttemptRow.still_counts` has it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def still_counts(attempt: Any) -> sa.ColumnElement[bool]:
    """True for attempts that nothing has replaced or invalidated.

    Of several runs of a trial that count together, only the median is not superseded.
    """
    return sa.or_(attempt.c.pooled, sa.not_(attempt.c.superseded))

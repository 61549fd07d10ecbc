"""Counts with which code, software and devices the trials of a sweep were measured."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read.rows import FingerprintCounts
from db.read.still_counts import still_counts
from orchestrator.core.trial.lifecycle import TrialState

cell, trial, attempt = schema.cell, schema.trial, schema.attempt
_COUNTS = still_counts(attempt)


def fingerprint_counts(connection: Connection, sweep_id: int) -> list[FingerprintCounts]:
    """Count the measured trials of each cell by fingerprint, and the repeats kept apart."""
    of_sweep = (
        sa.select(trial.c.cell_id, attempt.c.fingerprint_digest)
        .join(attempt, attempt.c.trial_id == trial.c.id)
        .where(
            trial.c.sweep_id == sweep_id,
            trial.c.state == TrialState.MEASURED,
            attempt.c.state == sa.literal_column("'measured'"),
        )
    )
    counted = of_sweep.add_columns(
        sa.func.count(sa.distinct(trial.c.id)).label("num_trials"),
        sa.func.max(attempt.c.id).label("newest"),
    )
    by_cell, apart = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    for row in connection.execute(
        counted.where(_COUNTS).group_by(trial.c.cell_id, attempt.c.fingerprint_digest)
    ):
        by_cell[row.cell_id].append(row)
    not_counted = of_sweep.add_columns(attempt.c.id).where(sa.not_(_COUNTS))
    for row in connection.execute(not_counted.order_by(attempt.c.id)):
        apart[row.cell_id].append(row)
    cells = sa.select(cell.c.id, cell.c.fingerprint_digest).where(cell.c.sweep_id == sweep_id)
    return [
        _counts_of(row.id, row.fingerprint_digest, by_cell[row.id], apart[row.id])
        for row in connection.execute(cells.order_by(cell.c.id))
    ]


def _counts_of(
    cell_id: int, digest: str | None, counted: list[Any], not_counted: list[Any]
) -> FingerprintCounts:
    """`not_counted`: runs that do not count, the oldest first."""
    current = [row for row in counted if row.fingerprint_digest == digest]
    earlier = sorted(
        (row for row in counted if row.fingerprint_digest != digest), key=lambda row: row.newest
    )
    newest = max((row.newest for row in current), default=None)
    apart = [
        row
        for row in not_counted
        if newest is not None and row.id > newest and row.fingerprint_digest != digest
    ]
    return FingerprintCounts(
        cell_id=cell_id,
        num_current=sum(row.num_trials for row in current),
        digest=digest,
        earlier=tuple((row.fingerprint_digest, row.num_trials) for row in earlier),
        num_apart=len(apart),
        apart_digest=apart[-1].fingerprint_digest if apart else None,
        newest_attempt_id=newest,
    )

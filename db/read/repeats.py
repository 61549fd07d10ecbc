"""The statements that read repeats: further runs of measured trials, and those that failed.

A repeat with other code than the runs of its trial says nothing of them. It matters only as long as
no run of the cell followed that counts: until then its code may be the present one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.portions import portions
from db.read import records
from db.read.rows import FailedRepeatRow, OtherRepeat, Repeats
from db.read.still_counts import still_counts
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.fingerprint import Fingerprint
from orchestrator.core.trial.lifecycle import TrialState
from orchestrator.core.trial.machine_load import relative_sd
from orchestrator.core.trial.purpose import REPEATS, Purpose
from orchestrator.core.trial.run import Run

cell, trial, attempt = schema.cell, schema.trial, schema.attempt
measurement, fingerprint = schema.measurement, schema.fingerprint
_earlier = attempt.alias("earlier")
_counting = attempt.alias("counting")


def repeats(connection: Connection, cell_id: int) -> dict[int, Repeats]:
    first = (
        sa.select(attempt.c.trial_id, sa.func.min(attempt.c.number).label("number"))
        .where(attempt.c.pooled)
        .group_by(attempt.c.trial_id)
        .subquery()
    )
    statement = (
        sa.select(
            trial.c.id,
            attempt.c.id.label("attempt_id"),
            attempt.c.pooled,
            attempt.c.failure_kind,
            attempt.c.fingerprint_digest,
            attempt.c.purpose,
            attempt.c.nodes,
            sa.func.coalesce(attempt.c.measured_at, attempt.c.ended_at).label("measured_at"),
            measurement.c.step_seconds_median,
            measurement.c.relative_confidence,
            measurement.c.thrashing,
            *(attempt.c[name] for name in records.LOAD_COLUMNS),
        )
        .join(first, first.c.trial_id == trial.c.id)
        .join(
            attempt, sa.and_(attempt.c.trial_id == trial.c.id, attempt.c.number >= first.c.number)
        )
        .outerjoin(measurement, measurement.c.attempt_id == attempt.c.id)
        .where(
            trial.c.cell_id == cell_id,
            trial.c.state == TrialState.MEASURED,
            trial.c.num_attempts > first.c.number,
        )
        .order_by(trial.c.id, attempt.c.number)
    )
    by_trial: dict[int, list[Any]] = {}
    for row in connection.execute(statement):
        by_trial.setdefault(row.id, []).append(row)
    digests = {row.fingerprint_digest for rows in by_trial.values() for row in rows}
    # Most cells have one fingerprint, and need none of this.
    has_others = len(digests) > 1
    known = _fingerprints(connection, digests) if has_others else {}
    newest = _newest_counting(connection, [cell_id]).get(cell_id, 0) if has_others else 0
    return {trial_id: _repeats_of(rows, known, newest) for trial_id, rows in by_trial.items()}


def _repeats_of(rows: Sequence[Any], known: Mapping[str, Fingerprint], newest: int) -> Repeats:
    """`rows`: attempts of a trial; `newest`: the last attempt of its cell that counts, by id."""
    digest = next(row.fingerprint_digest for row in rows if row.pooled)
    failures = Counter[FailureKind]()
    others: list[OtherRepeat] = []
    for row in rows:
        kind = None if row.failure_kind is None else FailureKind(row.failure_kind)
        if kind is not None and not _is_other_code(known, row.fingerprint_digest, digest):
            failures[kind] += 1
            continue
        is_apart = (
            kind is None
            and not row.pooled
            and row.step_seconds_median is not None
            and row.fingerprint_digest != digest
        )
        if (kind is not None or is_apart) and row.attempt_id > newest:
            found = known.get(row.fingerprint_digest)
            others.append(OtherRepeat(fingerprint=found, failure_kind=kind))
    return Repeats(
        runs=tuple(_run(row) for row in rows if row.pooled),
        failures=failures,
        fingerprint=known.get(digest),
        others=tuple(others),
    )


def _run(row: Any) -> Run:
    return Run(
        step_seconds=row.step_seconds_median,
        relative_confidence=row.relative_confidence,
        load_sd=relative_sd(records.load_of(row._mapping)),
        at=None if row.measured_at is None else row.measured_at.timestamp(),
        nodes=tuple(row.nodes or ()),
        purpose=None if row.purpose is None else Purpose(row.purpose),
        thrashing=bool(row.thrashing),
    )


def failed_repeats(connection: Connection, trial_ids: Collection[int]) -> list[FailedRepeatRow]:
    """The failed repeats of measured trials, oldest trial first; none was cancelled.

    Those with other code than the runs of their trial are left out if a run of the cell followed.
    """
    follows_a_run = sa.exists().where(
        _earlier.c.trial_id == attempt.c.trial_id,
        _earlier.c.pooled,
        _earlier.c.number < attempt.c.number,
    )
    statement = (
        sa.select(
            trial.c.cell_id,
            attempt.c.trial_id,
            attempt.c.id,
            attempt.c.number.label("attempt"),
            attempt.c.failure_kind,
            attempt.c.failure_message,
            attempt.c.fingerprint_digest,
            _counting.c.fingerprint_digest.label("of_trial"),
        )
        .join(trial, trial.c.id == attempt.c.trial_id)
        .join(
            _counting,
            sa.and_(
                _counting.c.trial_id == trial.c.id, _counting.c.pooled, ~_counting.c.superseded
            ),
        )
        .where(
            trial.c.state == TrialState.MEASURED,
            attempt.c.purpose.in_(sorted(REPEATS)),
            sa.not_(attempt.c.superseded),
            attempt.c.failure_kind != FailureKind.CANCELLED,
            follows_a_run,
        )
        .order_by(attempt.c.trial_id, attempt.c.number)
    )
    rows = [
        row
        for some in portions(sorted(trial_ids))
        for row in connection.execute(statement.where(trial.c.id.in_(some)))
    ]
    digests = {digest for row in rows for digest in (row.fingerprint_digest, row.of_trial)}
    known = _fingerprints(connection, digests) if len(digests) > 1 else {}
    others = {
        row.id: row.cell_id
        for row in rows
        if _is_other_code(known, row.fingerprint_digest, row.of_trial)
    }
    newest = _newest_counting(connection, set(others.values())) if others else {}
    return [
        FailedRepeatRow(
            cell_id=row.cell_id,
            trial_id=row.trial_id,
            attempt=row.attempt,
            failure_kind=FailureKind(row.failure_kind),
            failure_message=row.failure_message or "",
        )
        for row in rows
        if row.id not in others or row.id > newest.get(row.cell_id, 0)
    ]


def _is_other_code(
    known: Mapping[str, Fingerprint], digest: str | None, of_trial: str | None
) -> bool:
    """Return whether two fingerprints are known to be of different code."""
    one, other = known.get(digest or ""), known.get(of_trial or "")
    return one is not None and other is not None and not one.has_code_of(other)


def _fingerprints(
    connection: Connection, digests: Collection[str | None]
) -> dict[str, Fingerprint]:
    found: dict[str, Fingerprint] = {}
    for some in portions(sorted(digest for digest in digests if digest is not None)):
        statement = sa.select(fingerprint).where(fingerprint.c.digest.in_(some))
        for row in connection.execute(statement).mappings():
            found[row["digest"]] = records.fingerprint_of(row)
    return found


def _newest_counting(connection: Connection, cell_ids: Collection[int]) -> dict[int, int]:
    """The last attempt of each cell that counts with the cell's fingerprint, by id.

    It is the `newest_attempt_id` of `fingerprint_counts`.
    """
    found: dict[int, int] = {}
    for some in portions(sorted(cell_ids)):
        statement = (
            sa.select(trial.c.cell_id, sa.func.max(attempt.c.id).label("newest"))
            .join(trial, trial.c.id == attempt.c.trial_id)
            .join(cell, cell.c.id == trial.c.cell_id)
            .where(
                trial.c.cell_id.in_(some),
                trial.c.state == TrialState.MEASURED,
                attempt.c.state == sa.literal_column("'measured'"),
                still_counts(attempt),
                attempt.c.fingerprint_digest == cell.c.fingerprint_digest,
            )
            .group_by(trial.c.cell_id)
        )
        found |= {row.cell_id: row.newest for row in connection.execute(statement)}
    return found

"""The statements that write sessions: a row per call of `run_sweep` that got its sweep.

The caller has locked the sweep's row, or has just proved to own it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.types import now
from db.write.writes import StoppedCell
from orchestrator.core.trial.reserved_time import Leased

session, sweep, event, cell = schema.session, schema.sweep, schema.event, schema.cell


def begin(
    connection: Connection,
    sweep_id: int,
    epoch: int,
    *,
    num_gpus: int,
    price_per_gpu_hour: float | None,
    leased: Leased,
) -> None:
    """Insert the session of the sweep's owner, unless it is there."""
    if connection.scalar(sa.select(session.c.id).where(*_is(sweep_id, epoch))) is not None:
        return
    owner = connection.execute(
        sa.select(sweep.c.owner_host, sweep.c.owner_pid, sweep.c.owner_since).where(
            sweep.c.id == sweep_id
        )
    ).one()
    values = {
        "sweep_id": sweep_id,
        "epoch": epoch,
        "host": owner.owner_host,
        "pid": owner.owner_pid,
        "started_at": owner.owner_since,
        "num_gpus": num_gpus,
        "price_per_gpu_hour": price_per_gpu_hour,
        **_columns(leased),
    }
    connection.execute(sa.insert(session).values(seen_at=now(), **values))


def note(connection: Connection, sweep_id: int, epoch: int, leased: Leased) -> None:
    """Note that the call is alive, and what it has leased."""
    connection.execute(
        sa.update(session).where(*_is(sweep_id, epoch)).values(seen_at=now(), **_columns(leased))
    )


def end(
    connection: Connection,
    sweep_id: int,
    epoch: int,
    leased: Leased,
    stopped: Sequence[StoppedCell],
) -> None:
    """Note that the call ends by itself, with everything released, and why its cells stopped."""
    values = {**_columns(leased), "stop_reasons": sorted({one.reason for one in stopped})}
    connection.execute(
        sa.update(session)
        .where(*_is(sweep_id, epoch))
        .values(seen_at=now(), ended_at=now(), **values)
    )
    for one in stopped:
        connection.execute(
            sa.update(cell)
            .filter_by(**records.cell_identity(sweep_id, one.cell))
            .values(stop_reason=one.reason, num_untried=one.num_untried)
        )


def end_left(
    connection: Connection, sweep_id: int, epoch: int, *, latest: dt.datetime
) -> dt.datetime:
    """End the session of an owner that could not, at its last sign of life, and return that time.

    A sign of life is a renewal or any write. After a kill some seconds stay uncounted, but none is
    counted that was not reserved.
    """
    row = connection.execute(sa.select(session).where(*_is(sweep_id, epoch))).one_or_none()
    if row is None:
        return latest
    if row.ended_at is not None:
        ended: dt.datetime = row.ended_at
        return min(ended, latest)
    # This order walks the index of sweeps backwards: only the end of a long log is read.
    wrote = (
        sa.select(event.c.at)
        .where(event.c.sweep_id == sweep_id, event.c.epoch == epoch)
        .order_by(event.c.id.desc())
        .limit(1)
    )
    at: dt.datetime = min(max([row.seen_at, *connection.execute(wrote).scalars()]), latest)
    # The cluster existed until then; what was leased between attempts is not known.
    unseen_seconds = (at - row.seen_at).total_seconds()
    capacity = (
        row.capacity_gpu_seconds + unseen_seconds * row.num_gpus
        if row.capacity_gpu_seconds is not None
        else None
    )
    connection.execute(
        sa.update(session)
        .where(*_is(sweep_id, epoch))
        .values(ended_at=at, capacity_gpu_seconds=capacity)
    )
    return at


def _columns(leased: Leased) -> records.Columns:
    return {
        "reserved_gpu_seconds": leased.reserved,
        "idle_gpu_seconds": leased.idle,
        "capacity_gpu_seconds": leased.capacity,
    }


def _is(sweep_id: int, epoch: int) -> tuple[sa.ColumnElement[bool], ...]:
    return session.c.sweep_id == sweep_id, session.c.epoch == epoch

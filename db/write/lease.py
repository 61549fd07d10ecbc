"""The lease of a sweep: one owner at a time may write, until the lease ends.

Each owner has a larger epoch than the one before. Every write checks its epoch under a lock on the
sweep's row, so an owner that slept past its lease cannot write after the next one came.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read.holder import live_holder, process_namespace
from db.read.rows import Holder
from db.types import StopRequest, SweepState, now
from db.write import sessions
from orchestrator.core.errors import LeaseLost, SweepInUse, UsageInvalid

sweep, attempt = schema.sweep, schema.attempt


def acquire(
    connection: Connection,
    sweep_id: int,
    *,
    host: str,
    pid: int,
    token: str,
    ttl_seconds: float,
    spec_json: str | None = None,
    takeover: bool = False,
    holder_is_dead: Callable[[Holder], bool] | None = None,
) -> int:
    """Take the sweep and return the new epoch.

    Raises SweepInUse if another owner has it and is not known to be dead, unless `takeover`.
    """
    row = connection.execute(
        sa.select(sweep, now().label("now")).where(sweep.c.id == sweep_id).with_for_update()
    ).one_or_none()
    if row is None:
        raise UsageInvalid(f"there is no sweep with id {sweep_id}")
    holder = live_holder(row)
    if (
        holder is not None
        and row.owner_token != token
        and not takeover
        and not (holder_is_dead is not None and holder_is_dead(holder))
    ):
        raise SweepInUse(_in_use(row.name, holder, row.now))
    taken = connection.execute(
        sa.update(sweep)
        .where(sweep.c.id == sweep_id, sweep.c.owner_epoch == row.owner_epoch)
        .values(
            state=SweepState.RUNNING,
            spec_json=row.spec_json if spec_json is None else spec_json,
            owner_host=host,
            owner_pid=pid,
            owner_namespace=process_namespace(),
            owner_token=token,
            owner_since=now(),
            owner_epoch=row.owner_epoch + 1,
            lease_until=now(ttl_seconds),
            stop_requested=None,
        )
    )
    assert taken.rowcount == 1, "the row was locked, yet it changed"
    last_seen = sessions.end_left(
        connection, sweep_id, row.owner_epoch, latest=min(row.now, row.lease_until)
    )
    _end_attempts(connection, sweep_id, last_seen)
    return int(row.owner_epoch) + 1


def acquire_for_transaction(
    connection: Connection,
    sweep_id: int,
    *,
    token: str,
    holder_is_dead: Callable[[Holder], bool] | None,
) -> int:
    """Take the sweep until the end of this transaction, and return the new epoch.

    So no orchestrator works on it meanwhile. Raises SweepInUse as `acquire`.
    """
    return acquire(
        connection,
        sweep_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        token=token,
        ttl_seconds=0.0,
        holder_is_dead=holder_is_dead,
    )


def renew(
    connection: Connection, sweep_id: int, epoch: int, ttl_seconds: float
) -> StopRequest | None:
    """Extend the lease, also one that has ended, if nobody took the sweep since.

    Returns what a person asked of this orchestrator meanwhile.
    """
    statement = (
        sa.update(sweep)
        .where(*_is_owner(sweep_id, epoch))
        .values(lease_until=now(ttl_seconds))
        .returning(sweep.c.stop_requested)
    )
    # All rows: SQLite keeps its write lock until the last one is fetched.
    rows = connection.execute(statement).fetchall()
    if not rows:
        raise LeaseLost(lost(connection, sweep_id, epoch))
    return StopRequest(rows[0].stop_requested) if rows[0].stop_requested else None


def release(connection: Connection, sweep_id: int, epoch: int, state: SweepState) -> None:
    values = {
        "state": state,
        "owner_host": None,
        "owner_pid": None,
        "owner_token": None,
        "owner_namespace": None,
        "lease_until": now(),
    }
    statement = sa.update(sweep).where(*_is_owner(sweep_id, epoch)).values(**values)
    if connection.execute(statement).rowcount != 1:
        raise LeaseLost(lost(connection, sweep_id, epoch))


def epoch_of(connection: Connection, sweep_id: int, token: str) -> int | None:
    """The epoch in which the owner with this token has the sweep; None: it has not."""
    statement = (
        sa.select(sweep.c.owner_epoch)
        .where(sweep.c.id == sweep_id, sweep.c.owner_token == token)
        .with_for_update(read=True)
    )
    found: int | None = connection.execute(statement).scalar_one_or_none()
    return found


def fence(connection: Connection, sweep_id: int, epoch: int) -> None:
    """Lock the sweep's row until the transaction ends, or raise LeaseLost.

    No other orchestrator can take the sweep over in between.
    """
    statement = sa.select(sweep.c.id).where(*_is_owner(sweep_id, epoch)).with_for_update(read=True)
    if not connection.execute(statement).fetchall():
        raise LeaseLost(lost(connection, sweep_id, epoch))


def lost(connection: Connection, sweep_id: int, epoch: int) -> str:
    """Return the message of LeaseLost, with the present owner."""
    row = connection.execute(sa.select(sweep).where(sweep.c.id == sweep_id)).one_or_none()
    if row is None:
        return f"sweep {sweep_id} was removed"
    owner = (
        f"now held by host {row.owner_host}, pid {row.owner_pid}, epoch {row.owner_epoch}"
        if row.owner_token
        else "now without an orchestrator"
    )
    return f"sweep {row.name!r}: the lease of epoch {epoch} is lost; {owner}. Nothing was written"


def _end_attempts(connection: Connection, sweep_id: int, at: dt.datetime) -> None:
    """End the running attempts of the earlier owner at its last sign of life, for good.

    An attempt that began after that ended when it began.
    """
    of_sweep = sa.select(schema.trial.c.id).where(schema.trial.c.sweep_id == sweep_id)
    left = (
        attempt.c.state == sa.literal_column("'running'"),
        attempt.c.ended_at.is_(None),
        attempt.c.trial_id.in_(of_sweep),
    )
    ended_at = sa.case(
        (attempt.c.started_at > at, attempt.c.started_at),
        else_=sa.literal(at, attempt.c.ended_at.type),
    )
    connection.execute(sa.update(attempt).where(*left).values(ended_at=ended_at))


def _is_owner(sweep_id: int, epoch: int) -> tuple[sa.ColumnElement[bool], ...]:
    return sweep.c.id == sweep_id, sweep.c.owner_epoch == epoch, sweep.c.owner_token.is_not(None)


def _in_use(name: str, holder: Holder, now_at: dt.datetime) -> str:
    left = (holder.lease_until - now_at).total_seconds()
    return (
        f"sweep {name!r} is held by host {holder.host}, pid {holder.pid}, "
        f"since {holder.since:%Y-%m-%d %H:%M:%S} UTC; its lease ends in {left:.0f} s "
        f"(at {holder.lease_until:%H:%M:%S} UTC) unless renewed. "
        "Wait for it, stop it, or take it over with --takeover"
    )

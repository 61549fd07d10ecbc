"""The statements that make, rename and remove sweeps, make cells, and take and return a sweep.

Every function that takes an epoch first proves it on the sweep's locked row.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import records
from db.read.rows import Holder, SweepRow
from db.types import AttemptState, StopRequest, SweepState, now
from db.write import invalidation, lease, sessions
from db.write.inserts import insert_absent
from orchestrator.core.errors import SweepChanged, UsageInvalid
from orchestrator.core.problem.cell import Cell
from orchestrator.core.trial.reserved_time import Leased

sweep, trial, attempt = schema.sweep, schema.trial, schema.attempt


def new_token() -> str:
    return uuid.uuid4().hex


def ensure_sweep(
    connection: Connection,
    change: Change,
    name: str,
    spec_json: str,
    conditions: Mapping[str, Any],
) -> int:
    """The id of the sweep, made if it is new. Raises SweepChanged as `acquire` does."""
    values = {
        "name": name,
        "run_token": new_token()[:12],
        "spec_json": spec_json,
        "conditions": conditions,
        "state": SweepState.WAITING,
        "created_at": now(),
        "lease_until": now(),
    }
    insert_absent(connection, sweep, values)
    found = connection.execute(sa.select(sweep.c.id).where(sweep.c.name == name))
    sweep_id: int = found.scalar_one()
    _differs(connection, sweep_id, conditions)
    return sweep_id


def set_conditions(connection: Connection, sweep_id: int, conditions: Mapping[str, Any]) -> None:
    """Set the conditions of a sweep without trials; `bind` does it for one that has some.

    Raises SweepChanged if the sweep was measured under other conditions.
    """
    if _differs(connection, sweep_id, conditions) and not _has_trials(connection, sweep_id):
        _update(connection, sweep_id, conditions=conditions)


def bind(
    connection: Connection,
    change: Change,
    sweep_id: int,
    conditions: Mapping[str, Any],
    epoch: int,
) -> int:
    """Set the conditions of a sweep that has trials, none of them measured.

    Its attempts were made under other conditions: they are kept, superseded, and its trials wait
    again. Returns how many trials had ended. Raises SweepChanged if something was measured.
    """
    lease.fence(connection, sweep_id, epoch)
    was = connection.execute(sa.select(sweep.c.conditions).where(sweep.c.id == sweep_id)).scalar()
    if not _differs(connection, sweep_id, conditions):
        return 0
    _update(connection, sweep_id, conditions=conditions)
    found = connection.execute(sa.select(trial.c.id).where(trial.c.sweep_id == sweep_id)).fetchall()
    detail = {"conditions": _changes(was or {}, conditions)}
    num_ended = 0
    for some in portions([int(row.id) for row in found]):
        num_ended += invalidation.invalidate_some(connection, change, sweep_id, some, detail, epoch)
        # Also the attempts of trials that wait for another one.
        connection.execute(
            sa.update(attempt)
            .where(attempt.c.trial_id.in_(some))
            .values(superseded=True, pooled=False)
        )
    return num_ended


def give_back(
    connection: Connection,
    change: Change,
    before: SweepRow,
    epoch: int | None,
    token: str,
    leased: Leased | None,
) -> None:
    """Leave a sweep as it was `before` its owner, if that has launched nothing.

    `epoch` None: the owner is the one with this token, if it owns the sweep at all.
    """
    own = epoch if epoch is not None else lease.epoch_of(connection, before.id, token)
    if own is None:
        return
    lease.fence(connection, before.id, own)
    if _has_launched(connection, before.id, own):
        lease.release(connection, before.id, own, SweepState.STOPPED)
    elif before.state is SweepState.WAITING and not _has_trials(connection, before.id):
        connection.execute(sa.delete(sweep).where(sweep.c.id == before.id))
        return
    else:
        # By now a sweep that a dead orchestrator left as running has been recovered.
        state = SweepState.STOPPED if before.state is SweepState.RUNNING else before.state
        lease.release(connection, before.id, own, state)
        _update(connection, before.id, spec_json=before.spec_json)
        if not _has_trials(connection, before.id):
            # Else they are those of its trials, which `bind` has freed for new conditions or not.
            _update(connection, before.id, conditions=dict(before.conditions))
    if leased is not None:
        sessions.end(connection, before.id, own, leased, ())


def request_stop(
    connection: Connection, change: Change, sweep_id: int, request: StopRequest
) -> bool:
    """Note what a person asks of the sweep's orchestrator. False: the sweep has none."""
    is_owned = (
        sweep.c.id == sweep_id,
        sweep.c.owner_token.is_not(None),
        sweep.c.lease_until > now(),
    )
    asked = sa.update(sweep).where(*is_owned).values(stop_requested=request)
    return connection.execute(asked).rowcount == 1


def rename(
    connection: Connection,
    change: Change,
    sweep_id: int,
    name: str,
    token: str,
    holder_is_dead: Callable[[Holder], bool] | None,
) -> None:
    """Give a sweep another name. Raises UsageInvalid if another sweep has it, and SweepInUse."""
    before = _take(connection, sweep_id, token, holder_is_dead)
    if before.name == name:
        return
    if connection.scalar(sa.select(sweep.c.id).where(sweep.c.name == name)) is not None:
        raise UsageInvalid(
            f"a sweep named {name!r} exists already; take another name, or remove that one:"
            f" sweep rm {name}"
        )
    # Its name is the first key. With the new one, the same file goes on under the new name.
    old, new = (f'{{"name":{json.dumps(each)}' for each in (before.name, name))
    spec_json = before.spec_json
    if spec_json.startswith(old):
        spec_json = new + spec_json.removeprefix(old)
    _update(connection, sweep_id, name=name, spec_json=spec_json)


def remove(
    connection: Connection,
    change: Change,
    sweep_id: int,
    token: str,
    holder_is_dead: Callable[[Holder], bool] | None,
) -> None:
    """Delete a sweep with all that belongs to it. Raises SweepInUse."""
    found = connection.execute(sa.select(sweep.c.id).where(sweep.c.id == sweep_id)).fetchall()
    if not found and change.is_retry:
        # The answer to the first commit was lost.
        return
    _take(connection, sweep_id, token, holder_is_dead)
    connection.execute(sa.delete(sweep).where(sweep.c.id == sweep_id))


def _take(
    connection: Connection,
    sweep_id: int,
    token: str,
    holder_is_dead: Callable[[Holder], bool] | None,
) -> sa.Row[Any]:
    """Hold a sweep for this transaction, in which no orchestrator works on it; the row before."""
    before = connection.execute(sa.select(sweep).where(sweep.c.id == sweep_id)).one_or_none()
    epoch = lease.acquire_for_transaction(
        connection, sweep_id, token=token, holder_is_dead=holder_is_dead
    )
    assert before is not None, "it was acquired"
    state = SweepState(before.state)
    lease.release(
        connection, sweep_id, epoch, SweepState.STOPPED if state is SweepState.RUNNING else state
    )
    return before


def ensure_cell(connection: Connection, sweep_id: int, cell: Cell, epoch: int) -> int:
    """The id of the cell in the sweep, made if it is new."""
    lease.fence(connection, sweep_id, epoch)
    table = schema.cell
    insert_absent(connection, schema.model, records.model_columns(cell.model))
    identity = records.cell_identity(sweep_id, cell)
    insert_absent(connection, table, {**identity, "key": cell.key, "model_name": cell.model.name})
    return int(connection.execute(sa.select(table.c.id).filter_by(**identity)).scalar_one())


def _differs(connection: Connection, sweep_id: int, wanted: Mapping[str, Any]) -> bool:
    """Return whether a sweep was begun under other conditions.

    Raises SweepChanged if something was measured under them, also in cells that the spec no longer
    has, and also if the measurement does not count any more.
    """
    found = connection.execute(
        sa.select(sweep.c.name, sweep.c.conditions).where(sweep.c.id == sweep_id)
    ).one()
    if found.conditions == wanted:
        return False
    if _is_measured(connection, sweep_id):
        raise SweepChanged(_difference(found.name, found.conditions, wanted))
    return True


def _difference(name: str, was: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The message of SweepChanged, with each condition that differs."""
    lines = [f"  {key}: {told}" for key, told in _changes(was, wanted).items()]
    return "\n".join(
        [
            f"sweep {name!r} was measured under other conditions:",
            *lines,
            "To continue this sweep, set these keys of its file back to what they were. To measure"
            " with the changed ones, begin another sweep: sweep run FILE name=ANOTHER-NAME",
        ]
    )


def _changes(was: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"was {was.get(key, 'absent')!r}, is {wanted.get(key, 'absent')!r}"
        for key in sorted(was.keys() | wanted.keys())
        if was.get(key, _ABSENT) != wanted.get(key, _ABSENT)
    }


_ABSENT = object()


def _has_launched(connection: Connection, sweep_id: int, epoch: int) -> bool:
    """Return whether the owner of an epoch has begun an attempt of a sweep."""
    begun = sa.select(attempt.c.id).join(trial, trial.c.id == attempt.c.trial_id)
    mine = begun.where(trial.c.sweep_id == sweep_id, attempt.c.epoch == epoch)
    return connection.scalar(mine.limit(1)) is not None


def _has_trials(connection: Connection, sweep_id: int) -> bool:
    trials = sa.select(trial.c.id).where(trial.c.sweep_id == sweep_id)
    return connection.scalar(trials.limit(1)) is not None


def _is_measured(connection: Connection, sweep_id: int) -> bool:
    measured = sa.select(attempt.c.id).join(trial, trial.c.id == attempt.c.trial_id)
    of_sweep = (trial.c.sweep_id == sweep_id, attempt.c.state == AttemptState.MEASURED)
    return connection.scalar(measured.where(*of_sweep).limit(1)) is not None


def _update(connection: Connection, sweep_id: int, **values: Any) -> None:
    connection.execute(sa.update(sweep).where(sweep.c.id == sweep_id).values(**values))

"""The statements that write profiles. A profile changes no trial, attempt or measurement."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.read import records
from db.types import now
from db.write import lease
from db.write.writes import ProfileEnd
from orchestrator.core.trial.rank_profile import RankProfile

profile, profile_rank, profile_part = (
    schema.profile,
    schema.profile_rank,
    schema.profile_part,
)

HIDDEN = "overlapped_"


def begin(connection: Connection, change: Change, trial_id: int, epoch: int | None) -> int:
    """Insert a profile of a trial that is about to start, and return its number.

    `epoch` is that of the sweep's owner; None: a person asks.
    """
    trial = schema.trial
    sweep_id = connection.execute(
        # The lock on the trial's row keeps two profiles from taking one number.
        sa.select(trial.c.sweep_id).where(trial.c.id == trial_id).with_for_update()
    ).scalar_one()
    if epoch is not None:
        lease.fence(connection, sweep_id, epoch)
    earlier = profile.c.trial_id == trial_id
    connection.execute(
        sa.update(profile).where(earlier, profile.c.state == "running").values(state="lost")
    )
    last = connection.execute(sa.select(sa.func.max(profile.c.number)).where(earlier)).scalar()
    number = (last or 0) + 1
    connection.execute(
        sa.insert(profile).values(
            trial_id=trial_id, number=number, epoch=epoch, state="running", started_at=now()
        )
    )
    return number


def end(connection: Connection, change: Change, ended: ProfileEnd) -> None:
    """Record how a profile ended."""
    mine = (profile.c.trial_id == ended.trial_id, profile.c.number == ended.number)
    row_id = connection.execute(sa.select(profile.c.id).where(*mine)).scalar_one()
    failure = ended.failure
    connection.execute(
        sa.update(profile)
        .where(profile.c.id == row_id)
        .values(
            state="failed" if failure is not None else "done",
            ended_at=now(),
            nodes=list(ended.nodes),
            gpu_seconds=ended.gpu_seconds,
            advice=list(ended.advice),
            memory=_memory(ended.ranks.get(0)),
            failure_kind=failure.kind if failure is not None else None,
            failure_message=records.storable(failure.message) if failure is not None else None,
        )
    )
    if change.is_retry:
        for table in (profile_part, profile_rank):
            connection.execute(sa.delete(table).where(table.c.profile_id == row_id))
    if not ended.ranks:
        return
    connection.execute(
        sa.insert(profile_rank),
        [_rank_row(row_id, rank, found) for rank, found in ended.ranks.items()],
    )
    connection.execute(
        sa.insert(profile_part),
        [row for rank, found in ended.ranks.items() for row in _part_rows(row_id, rank, found)],
    )


def _memory(found: RankProfile | None) -> list[records.Columns] | None:
    if found is None or not found.memory:
        return None
    return [moment.model_dump(mode="json") for moment in found.memory]


def _rank_row(profile_id: int, rank: int, found: RankProfile) -> records.Columns:
    names = (
        "is_slowest",
        "num_steps",
        "window_nanoseconds",
        "plain_step_seconds",
        "host_nanoseconds",
        "num_kernels",
        "median_kernel_nanoseconds",
        "is_on_device",
        "attention",
        "is_compiled",
    )
    return {
        "profile_id": profile_id,
        "rank": rank,
        **{name: getattr(found, name) for name in names},
        "unknown": {records.storable(name): spent for name, spent in found.unknown.items()},
        "trace_path": None if found.trace_path is None else records.storable(found.trace_path),
    }


def _part_rows(profile_id: int, rank: int, found: RankProfile) -> Sequence[records.Columns]:
    def row(part: str, nanoseconds: int, *, is_hidden: bool) -> records.Columns:
        return {
            "profile_id": profile_id,
            "rank": rank,
            "part": part,
            "is_hidden": is_hidden,
            "nanoseconds": nanoseconds,
        }

    return [
        *(row(part.value, spent, is_hidden=False) for part, spent in found.parts.items()),
        *(row(HIDDEN + a.value, spent, is_hidden=True) for a, spent in found.overlapped.items()),
    ]

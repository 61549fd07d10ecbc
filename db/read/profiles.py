"""The statements that read profiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.read.rows import ProfileRow
from orchestrator.core.trial.failure_kinds import FailureKind
from orchestrator.core.trial.rank_profile import MemoryMoment, RankProfile

profile, profile_rank, profile_part = (
    schema.profile,
    schema.profile_rank,
    schema.profile_part,
)


def profiles_of(connection: Connection, trial_id: int) -> tuple[ProfileRow, ...]:
    """Return the profiles of a trial, oldest first."""
    return _profiles(connection, profile.c.trial_id == trial_id).get(trial_id, ())


def profiles_by_trial(
    connection: Connection, sweep_id: int
) -> Mapping[int, tuple[ProfileRow, ...]]:
    """Return the profiles of each profiled trial of a sweep, oldest first."""
    trial = schema.trial
    of_sweep = sa.select(trial.c.id).where(trial.c.sweep_id == sweep_id)
    return _profiles(connection, profile.c.trial_id.in_(of_sweep))


def _profiles(
    connection: Connection, condition: sa.ColumnElement[bool]
) -> Mapping[int, tuple[ProfileRow, ...]]:
    statement = sa.select(profile).where(condition).order_by(profile.c.trial_id, profile.c.number)
    rows = connection.execute(statement).mappings().all()
    if not rows:
        return {}
    of_profile = sa.select(profile.c.id).where(condition)
    parts: defaultdict[tuple[int, int], dict[bool, dict[str, int]]] = defaultdict(
        lambda: {False: {}, True: {}}
    )
    for one in connection.execute(
        sa.select(profile_part).where(profile_part.c.profile_id.in_(of_profile))
    ):
        name = one.part.removeprefix("overlapped_") if one.is_hidden else one.part
        parts[one.profile_id, one.rank][one.is_hidden][name] = one.nanoseconds
    ranks: defaultdict[int, dict[int, RankProfile]] = defaultdict(dict)
    for found in connection.execute(
        sa.select(profile_rank)
        .where(profile_rank.c.profile_id.in_(of_profile))
        .order_by(profile_rank.c.rank)
    ).mappings():
        own = parts[found["profile_id"], found["rank"]]
        columns = {k: v for k, v in found.items() if k not in ("profile_id", "rank")}
        ranks[found["profile_id"]][found["rank"]] = RankProfile.model_validate(
            {**columns, "parts": own[False], "overlapped": own[True]}
        )
    by_trial: defaultdict[int, list[ProfileRow]] = defaultdict(list)
    for row in rows:
        by_trial[row["trial_id"]].append(_profile_row(row, ranks[row["id"]]))
    return {trial_id: tuple(some) for trial_id, some in by_trial.items()}


def profiled_trials(connection: Connection, sweep_id: int) -> frozenset[int]:
    """Return the trials of a sweep that have a profile that ended by itself, well or not."""
    trial = schema.trial
    statement = (
        sa.select(profile.c.trial_id)
        .join(trial, trial.c.id == profile.c.trial_id)
        .where(
            trial.c.sweep_id == sweep_id,
            profile.c.state.in_(("done", "failed")),
            profile.c.failure_kind.is_distinct_from(FailureKind.CANCELLED),
        )
    )
    return frozenset(connection.execute(statement).scalars())


def _profile_row(row: sa.RowMapping, ranks: dict[int, RankProfile]) -> ProfileRow:
    return records.build(
        ProfileRow,
        row,
        nodes=tuple(row["nodes"] or ()),
        advice=tuple(row["advice"] or ()),
        memory=tuple(MemoryMoment.model_validate(one) for one in row["memory"] or ()),
        failure_kind=None if row["failure_kind"] is None else FailureKind(row["failure_kind"]),
        ranks=ranks,
    )

"""The statements that read about nodes: checks, measurements, failures, benches and links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import log
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read import records
from db.read.rows import BenchRow, LinkRow, NodeCheckRow
from db.types import BenchReason
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_run import NodeRun
from orchestrator.core.physics.link_sample import Collective, LinkSample, Span
from orchestrator.core.trial.failure_kinds import SUSPECT_KINDS, FailureKind

node_check, node_bench, link = schema.node_check, schema.node_bench, schema.link
attempt, trial, cell, measurement = schema.attempt, schema.trial, schema.cell, schema.measurement

# The newest links are read; one run has a few hundred.
MAX_LINKS = 20_000
# Look for the wanted runs of a sweep among this many times as many of the store's newest attempts:
# if the sweep runs alone they are there, since most attempts are measured.
AMONG = 2
_RUNS = (
    sa.select(
        trial.c.sweep_id,
        attempt.c.trial_id,
        attempt.c.nodes,
        trial.c.cell_id,
        trial.c.predicted_tokens_per_second_per_gpu,
        measurement.c.step_seconds_median,
        cell.c.num_gpus,
        cell.c.sequence_length,
        cell.c.global_batch_size,
    )
    .join_from(attempt, measurement, measurement.c.attempt_id == attempt.c.id)
    .join(trial, trial.c.id == attempt.c.trial_id)
    .join(cell, cell.c.id == trial.c.cell_id)
    .where(
        attempt.c.pooled,
        attempt.c.nodes.is_not(None),
        sa.not_(measurement.c.thrashing),
        measurement.c.implausible.is_(None),
        measurement.c.step_seconds_bound.is_(None),
    )
    .order_by(attempt.c.id.desc())
)
MACHINE_KINDS = sorted(kind.value for kind in SUSPECT_KINDS - {FailureKind.ORCHESTRATOR_LOST})


def newest_checks(connection: Connection, sweep_id: int) -> dict[str, NodeCheckRow]:
    """The last check of each node of a sweep."""
    last = (
        sa.select(sa.func.max(node_check.c.id))
        .where(node_check.c.sweep_id == sweep_id)
        .group_by(node_check.c.node)
    )
    rows = connection.execute(
        sa.select(node_check).where(node_check.c.id.in_(last)).order_by(node_check.c.node)
    )
    return {row["node"]: _check_row(row) for row in rows.mappings()}


def _check_row(row: sa.RowMapping) -> NodeCheckRow:
    checks = (Check(**{**one, "status": Status(one["status"])}) for one in row["checks"] or ())
    return records.build(NodeCheckRow, row, checks=tuple(checks))


def runs(connection: Connection, sweep_id: int, newest: int) -> list[NodeRun]:
    """The measurements of a sweep that count, oldest first, with their nodes and predictions.

    A long sweep that is running has them among the store's newest attempts. Looking there takes
    the same time for any number of attempts.
    """
    is_long = (
        sa.select(trial.c.id).where(trial.c.sweep_id == sweep_id).limit(1).offset(AMONG * newest)
    )
    found = (
        _runs_among_newest(connection, sweep_id, newest)
        if connection.execute(is_long).first() is not None
        else []
    )
    if len(found) < newest:
        found = connection.execute(
            _RUNS.where(trial.c.sweep_id == sweep_id).limit(newest)
        ).fetchall()
    return [_run(row) for row in reversed(found)]


def _runs_among_newest(
    connection: Connection, sweep_id: int, newest: int
) -> Sequence[sa.Row[*tuple[Any, ...]]]:
    last = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(attempt.c.id), 0))
    ).scalar_one()
    # The sweep is selected here: in the statement it makes SQLite read all of the sweep's trials.
    with connection.execute(_RUNS.where(attempt.c.id > last - AMONG * newest)) as rows:
        return list(islice((row for row in rows if row.sweep_id == sweep_id), newest))


def _run(row: sa.Row[*tuple[Any, ...]]) -> NodeRun:
    rate = row.predicted_tokens_per_second_per_gpu
    tokens = row.global_batch_size * row.sequence_length
    return NodeRun(
        nodes=tuple(row.nodes),
        cell=row.cell_id,
        trial=row.trial_id,
        log_seconds=log(row.step_seconds_median),
        log_predicted=log(tokens / (rate * row.num_gpus)) if rate else None,
    )


def faults(connection: Connection, sweep_id: int) -> dict[str, int]:
    """The number of attempts that the machine may have failed, by node of the first bad rank."""
    statement = (
        sa.select(attempt.c.failure_node, sa.func.count().label("num"))
        .join(trial, trial.c.id == attempt.c.trial_id)
        .where(
            trial.c.sweep_id == sweep_id,
            attempt.c.failure_node.is_not(None),
            attempt.c.failure_kind.in_(MACHINE_KINDS),
        )
        .group_by(attempt.c.failure_node)
    )
    return {row.failure_node: int(row.num) for row in connection.execute(statement)}


def benches(connection: Connection, sweep_id: int) -> list[BenchRow]:
    """The benches of a sweep, the oldest first, ended ones included."""
    rows = connection.execute(
        sa.select(node_bench).where(node_bench.c.sweep_id == sweep_id).order_by(node_bench.c.id)
    )
    return [
        records.build(BenchRow, row, reason=BenchReason(row["reason"])) for row in rows.mappings()
    ]


def links(connection: Connection, run_token: str | None) -> list[LinkRow]:
    statement = sa.select(link).order_by(link.c.id.desc()).limit(MAX_LINKS)
    if run_token is not None:
        statement = statement.where(link.c.run_token == run_token)
    rows = connection.execute(statement).mappings().fetchall()
    return [_link_row(row) for row in reversed(rows)]


def _link_row(row: sa.RowMapping) -> LinkRow:
    span = records.build(Span, row)
    sample = records.build(LinkSample, row, collective=Collective(row["collective"]), span=span)
    return records.build(LinkRow, row, sample=sample, nodes=tuple(row["nodes"] or ()))

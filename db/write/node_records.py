"""The statements about nodes: what they said of themselves, what was measured on them, and which of them are benched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from math import log
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import queries, records
from db.read.rows import BenchRow, NodeCheckRow
from db.types import BenchReason, now
from db.write import event_log, invalidation, lease
from db.write.changes import insert_absent
from orchestrator.core.machines.check import Check, Status
from orchestrator.core.machines.node_health import NodeFacts, unfit
from orchestrator.core.machines.node_score import NodeRun
from orchestrator.core.trial.failure_kinds import SUSPECT_KINDS, FailureKind
from orchestrator.core.trial.lifecycle import TrialState

node_check, node_bench, attempt, trial, cell = (
    schema.node_check,
    schema.node_bench,
    schema.attempt,
    schema.trial,
    schema.cell,
)
measurement, event = schema.measurement, schema.event

# Of a sweep that runs alone, so many of the store's newest attempts, over what is asked for, hold enough: most are measured.
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
    .where(attempt.c.pooled, attempt.c.nodes.is_not(None), sa.not_(measurement.c.thrashing))
    .order_by(attempt.c.id.desc())
)
MACHINE_KINDS = sorted(kind.value for kind in SUSPECT_KINDS - {FailureKind.ORCHESTRATOR_LOST})


# -- what nodes said of themselves -------------------------------------------------------------------------------------------------


def record_checks(
    connection: Connection,
    sweep_id: int | None,
    epoch: int | None,
    facts: Mapping[str, NodeFacts],
    checks: Mapping[str, Sequence[Check]],
) -> None:
    """One row per node that has checks; one that did not answer has no facts."""
    if sweep_id is not None:
        assert epoch is not None, "only who holds a sweep looks at its nodes"
        lease.fence(connection, sweep_id, epoch)
    for node, some in checks.items():
        found = facts.get(node)
        values = {
            "sweep_id": sweep_id,
            "epoch": epoch,
            "node": node,
            "is_fit": unfit(some) is None,
            "failed": records.storable(unfit(some) or "") or None,
            "checks": [asdict(check) for check in some],
            **(_facts_columns(found) if found is not None else {}),
        }
        connection.execute(sa.insert(node_check).values(at=now(), **values))


def _facts_columns(facts: NodeFacts) -> records.Columns:
    rates = [gpu.matmul_flops for gpu in facts.gpus] if facts.gpus else [facts.cpu_matmul_flops]
    return {
        "host": facts.host,
        "boot_id": facts.boot_id,
        "kernel": facts.kernel,
        "python": facts.python,
        "torch": facts.packages.get("torch"),
        "cuda": facts.cuda,
        "nccl": facts.nccl,
        "driver": facts.driver,
        "device_name": facts.gpus[0].name if facts.gpus else facts.cpu_name,
        "num_gpus": len(facts.gpus),
        "num_cores": facts.num_cores,
        "matmul_flops": min((rate for rate in rates if rate is not None), default=None),
        "free_disk_bytes": facts.free_disk_bytes,
        "clock_offset_seconds": facts.clock_offset_seconds,
        "facts": {
            **asdict(facts),
            "xids": None
            if facts.xids is None
            else {str(key): count for key, count in facts.xids.items()},
        },
    }


def newest_checks(connection: Connection, sweep_id: int) -> dict[str, NodeCheckRow]:
    """The last look at each node that a sweep had."""
    last = (
        sa.select(sa.func.max(node_check.c.id))
        .where(node_check.c.sweep_id == sweep_id)
        .group_by(node_check.c.node)
    )
    rows = connection.execute(
        sa.select(node_check).where(node_check.c.id.in_(last)).order_by(node_check.c.node)
    )
    return {
        row.node: NodeCheckRow(
            node=row.node,
            at=row.at,
            is_fit=row.is_fit,
            failed=row.failed,
            host=row.host,
            checks=tuple(
                Check(**{**check, "status": Status(check["status"])}) for check in row.checks or ()
            ),
        )
        for row in rows
    }


# -- what was measured on them -----------------------------------------------------------------------------------------------------


def runs(connection: Connection, sweep_id: int, newest: int) -> list[NodeRun]:
    """The measurements of a sweep that count, oldest first, each with the nodes of its gang and what the search had predicted.

    Of a long sweep that runs now they are among the store's newest attempts: to find them there takes as long however many it has.
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
    # The sweep is told apart here: asked for in the statement, SQLite would begin with all of its trials.
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
    """How many attempts failed by the machine's fault, by the node of the first bad rank."""
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


def remeasure(
    connection: Connection,
    change: Change,
    sweep_id: int,
    epoch: int,
    nodes: Collection[str],
    *,
    except_trials: Collection[int],
) -> set[int]:
    """Let trials wait again whose measurements were taken, also in part, on these nodes. Returns the cells that they are of.

    Those that are under way again are left for later: their attempt is the owner's.
    """
    lease.fence(connection, sweep_id, epoch)
    if event_log.is_done(connection, change):
        mine = (
            sa.select(trial.c.cell_id)
            .join(event, event.c.trial_id == trial.c.id)
            .where(event.c.change_id == change.id)
        )
        return set(connection.execute(mine).scalars())
    statement = (
        sa.select(trial.c.id, trial.c.cell_id, attempt.c.nodes)
        .join(attempt, attempt.c.trial_id == trial.c.id)
        .where(
            trial.c.sweep_id == sweep_id,
            trial.c.state == TrialState.MEASURED,
            attempt.c.pooled,
            attempt.c.nodes.is_not(None),
        )
    )
    bad = set(nodes)
    found = {
        row.id: row
        for row in connection.execute(statement)
        if bad & set(row.nodes) and row.id not in except_trials
    }
    by_nodes: dict[tuple[str, ...], list[int]] = {}
    for trial_id, row in found.items():
        by_nodes.setdefault(tuple(sorted(bad & set(row.nodes))), []).append(trial_id)
    for on, ids in by_nodes.items():
        for some in portions(ids):
            invalidation.invalidate_some(
                connection, change, sweep_id, some, {"benched": list(on)}, epoch
            )
    return {row.cell_id for row in found.values()}


# -- the bench ---------------------------------------------------------------------------------------------------------------------


def benches(connection: Connection, sweep_id: int) -> list[BenchRow]:
    """The benches of a sweep, the oldest first, those that have ended included."""
    rows = connection.execute(
        sa.select(node_bench).where(node_bench.c.sweep_id == sweep_id).order_by(node_bench.c.id)
    )
    return [
        BenchRow(
            node=row.node,
            since=row.since,
            until=row.until,
            reason=BenchReason(row.reason),
            is_remeasured=row.is_remeasured,
            evidence=row.evidence,
        )
        for row in rows
    ]


def bench(
    connection: Connection,
    change: Change,
    sweep_id: int,
    node: str,
    *,
    reason: BenchReason,
    is_remeasured: bool,
    evidence: Mapping[str, Any] | None,
    epoch: int | None,
) -> bool:
    """Place nothing on a node from now on; False: it is benched already. Without an epoch it is a person who asks, whoever holds the sweep."""
    said_with = _epoch(connection, sweep_id, epoch)
    values = {
        "sweep_id": sweep_id,
        "node": node,
        "reason": reason,
        "is_remeasured": is_remeasured,
        "evidence": evidence,
    }
    if not insert_absent(connection, node_bench, {**values, "since": now()}):
        return event_log.is_done(connection, change)
    detail = {"node": node, "reason": reason.value, **(evidence or {})}
    event_log.append(
        connection, change, [event_log.node_entry(sweep_id, event_log.BENCHED, said_with, detail)]
    )
    return True


def unbench(connection: Connection, change: Change, sweep_id: int, node: str) -> bool:
    """A person says that a node may be used again; False: it was not benched."""
    said_with = _epoch(connection, sweep_id, None)
    still = (
        node_bench.c.sweep_id == sweep_id,
        node_bench.c.node == node,
        node_bench.c.until.is_(None),
    )
    if connection.execute(sa.update(node_bench).where(*still).values(until=now())).rowcount == 0:
        return event_log.is_done(connection, change)
    event_log.append(
        connection,
        change,
        [event_log.node_entry(sweep_id, event_log.UNBENCHED, said_with, {"node": node})],
    )
    return True


def _epoch(connection: Connection, sweep_id: int, epoch: int | None) -> int:
    """The epoch to log with: the owner's, once it is proven, or for a person whichever there is now."""
    if epoch is not None:
        lease.fence(connection, sweep_id, epoch)
        return epoch
    return queries.owner_epoch(connection, sweep_id)

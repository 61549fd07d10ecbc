"""The statements that write about nodes: checks, benches, trials to remeasure, and links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.connection.engine import Change
from db.connection.portions import portions
from db.read import records, sweeps
from db.types import BenchReason, now
from db.write import event_log, invalidation, lease
from db.write.inserts import insert_absent
from orchestrator.core.machines.check import Check
from orchestrator.core.machines.node_health import NodeFacts, unfit
from orchestrator.core.physics.link_sample import LinkSample
from orchestrator.core.trial.fingerprint import Stack
from orchestrator.core.trial.lifecycle import LogEvent, TrialState

node_check, node_bench = schema.node_check, schema.node_bench
attempt, trial, event = schema.attempt, schema.trial, schema.event


def record_checks(
    connection: Connection,
    sweep_id: int | None,
    epoch: int | None,
    facts: Mapping[str, NodeFacts],
    checks: Mapping[str, Sequence[Check]],
) -> None:
    """Insert a row for each node that has checks. A node that did not answer has no facts."""
    if sweep_id is not None:
        assert epoch is not None, "only the owner of a sweep checks its nodes"
        lease.fence(connection, sweep_id, epoch)
    for node, some in checks.items():
        found = facts.get(node)
        values = {
            **(_facts_columns(found) if found is not None else {}),
            "sweep_id": sweep_id,
            "epoch": epoch,
            "node": node,
            "is_fit": unfit(some) is None,
            "failed": records.storable(unfit(some) or "") or None,
            "checks": [asdict(check) for check in some],
        }
        connection.execute(sa.insert(node_check).values(at=now(), **values))


def _facts_columns(facts: NodeFacts) -> records.Columns:
    rates = [gpu.matmul_flops for gpu in facts.gpus] if facts.gpus else [facts.cpu_matmul_flops]
    values = asdict(facts)
    if facts.xids is not None:
        values["xids"] = {str(key): count for key, count in facts.xids.items()}
    return {
        **{name: values[name] for name in values.keys() & node_check.c.keys()},
        "torch": facts.packages.get("torch"),
        "device_name": facts.gpus[0].name if facts.gpus else facts.cpu_name,
        "num_gpus": len(facts.gpus),
        "matmul_flops": min((rate for rate in rates if rate is not None), default=None),
        "facts": values,
    }


def remeasure(
    connection: Connection,
    change: Change,
    sweep_id: int,
    epoch: int,
    nodes: Collection[str],
    *,
    except_trials: Collection[int],
) -> set[int]:
    """Let trials wait again that were measured, also in part, on these nodes; return their cells.

    Trials with an attempt under way are left for later.
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
    """Bench a node: nothing is placed on it. False: it is benched already.

    Without an epoch a person asks, and any orchestrator may own the sweep.
    """
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
        connection, change, [event_log.node_entry(sweep_id, LogEvent.BENCHED, said_with, detail)]
    )
    return True


def unbench(connection: Connection, change: Change, sweep_id: int, node: str) -> bool:
    """Use a node again, as a person asks. False: it was not benched."""
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
        [event_log.node_entry(sweep_id, LogEvent.UNBENCHED, said_with, {"node": node})],
    )
    return True


def _epoch(connection: Connection, sweep_id: int, epoch: int | None) -> int:
    """The epoch to log: the owner's, once it is proven; for a person the present one."""
    if epoch is not None:
        lease.fence(connection, sweep_id, epoch)
        return epoch
    return sweeps.owner_epoch(connection, sweep_id)


def record_links(
    connection: Connection,
    run_token: str,
    samples: Sequence[tuple[LinkSample, int]],
    *,
    backend: str,
    stack: Stack,
    nodes: Sequence[str],
) -> None:
    rows = [
        {
            "run_token": run_token,
            "backend": backend,
            "collective": sample.collective,
            "message_bytes": sample.message_bytes,
            "num_calls": num_calls,
            "seconds": sample.seconds,
            "algorithm_bytes_per_second": sample.algorithm_bytes_per_second,
            "bus_bytes_per_second": sample.bus_bytes_per_second,
            "nodes": list(nodes),
            **asdict(sample.span),
            **{name: getattr(stack, name) for name in ("device_name", "torch", "nccl")},
        }
        for sample, num_calls in samples
    ]
    if rows:
        connection.execute(sa.insert(schema.link).values(at=now()), rows)

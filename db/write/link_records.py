"""The statements about links: what collectives took over them, as `sweep netbench` measured."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from db import schema
from db.read.rows import LinkRow
from db.types import now
from orchestrator.core.physics.links import Collective, LinkSample, Span
from orchestrator.core.trial.fingerprint import Stack

link = schema.link

MAX_ROWS = 20_000  # the newest: a run has some hundred


def record(
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
            "device_name": stack.device_name,
            "backend": backend,
            "collective": sample.collective,
            "num_ranks": sample.span.num_ranks,
            "num_nodes": sample.span.num_nodes,
            "message_bytes": sample.message_bytes,
            "num_calls": num_calls,
            "seconds": sample.seconds,
            "algorithm_bytes_per_second": sample.algorithm_bytes_per_second,
            "bus_bytes_per_second": sample.bus_bytes_per_second,
            "nodes": list(nodes),
            "torch": stack.torch,
            "nccl": stack.nccl,
        }
        for sample, num_calls in samples
    ]
    if rows:
        connection.execute(sa.insert(link).values(at=now()), rows)


def links(connection: Connection, run_token: str | None) -> list[LinkRow]:
    statement = sa.select(link).order_by(link.c.id.desc()).limit(MAX_ROWS)
    if run_token is not None:
        statement = statement.where(link.c.run_token == run_token)
    return [
        LinkRow(
            run_token=row.run_token,
            at=row.at,
            device_name=row.device_name,
            backend=row.backend,
            sample=LinkSample(
                collective=Collective(row.collective),
                span=Span(num_ranks=row.num_ranks, num_nodes=row.num_nodes),
                message_bytes=row.message_bytes,
                seconds=row.seconds,
            ),
            num_calls=row.num_calls,
            nodes=tuple(row.nodes or ()),
            torch=row.torch,
            nccl=row.nccl,
        )
        for row in reversed(connection.execute(statement).fetchall())
    ]

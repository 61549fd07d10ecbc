"""Declares columns, and those that several tables have.

The comment of a column is its meaning in docs/sql.md, in `sweep sql --schema` and in PostgreSQL.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ForeignKey, MetaData
from sqlalchemy.types import TypeEngine

from db.types import Id

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# A column has the same meaning in every table.
_SHARED = {
    "at": "when it happened",
    "created_at": "when the row was made",
    "cuda": "version of CUDA",
    "device_name": "the device's name, as its driver gives it",
    "digest": "identity by content: 16 hex digits",
    "driver": "version of the GPU driver",
    "ended_at": "end of the attempt, profile or session; NULL: it runs, or its orchestrator died. "
    "After a death: the last sign of life",
    "epoch": "epoch of the orchestrator that wrote it: grows with each new owner of the sweep; of "
    "a profile NULL: by `sweep profile`",
    "failure_kind": "what went wrong: [kinds](troubleshooting.md#kinds-of-failure)",
    "failure_message": "one line for a person",
    "fingerprint_digest": "what it was measured with; of a cell: its newest measurement's",
    "gpu_seconds": "reserved GPUs x seconds, from placement to clean-up; in `v_trial` of the last "
    "attempt",
    "host": "host of the orchestrator; in `node_check` of the node",
    "name": "name of the sweep; of a model: the first name seen",
    "nccl": "version of NCCL",
    "node": "name of the node in the scheduler",
    "nodes": "names of the nodes that it ran on",
    "num_gpus": "GPUs of the gang (cores on a machine without GPUs); of a session: of the cluster",
    "num_steps": "timed steps; of a profile the profiled ones",
    "number": "number of the attempt or profile among those of its trial, from 1",
    "profile_id": "number of the row in `profile`",
    "python": "version of Python",
    "rank": "rank in the gang",
    "run_token": "random, one per sweep or `sweep netbench`: keeps the run folders of sweeps "
    "with one name in two stores apart",
    "started_at": "start of the attempt or profile; of a session: when it got the sweep",
    "state": "of a trial: see [states](architecture.md#the-life-of-a-trial); of a sweep: waiting, "
    "running, stopped, finished; of an attempt: running, measured, out_of_memory, failed, "
    "requeued, lost; of a profile: running, done, failed, lost",
    "torch": "version of torch",
    "trial_id": "number of the trial: what `sweep show` takes",
}
_Type = TypeEngine[Any] | type[TypeEngine[Any]]


def required(name: str, type_: _Type, means: str = "", *rest: Any, **options: Any) -> Column[Any]:
    """A column that is never NULL. Its meaning may be left out if several tables have it."""
    return Column(name, type_, *rest, nullable=False, comment=means or _SHARED[name], **options)


def optional(name: str, type_: _Type, means: str = "", *rest: Any) -> Column[Any]:
    """A column in which NULL means unknown, unless its meaning says otherwise."""
    return Column(name, type_, *rest, comment=means or _SHARED[name])


def row_id() -> Column[Any]:
    return Column("id", Id, primary_key=True, comment="number of the row")


def sweep_id(*, nullable: bool = False) -> Column[Any]:
    return Column(
        "sweep_id",
        Id,
        ForeignKey("sweep.id", ondelete="CASCADE"),
        nullable=nullable,
        comment="number of the sweep",
    )

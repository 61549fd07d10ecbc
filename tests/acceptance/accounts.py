"""The GPU time that a store says a sweep has reserved, for tests that compare it to the clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.core.trial.reserved_time import ReservedGpuSeconds
from tests.acceptance.command import Command

# Slots of every gang of the sweep: one lease from the first trial to the end.
GANG = 2
# From the row of the first attempt to Ray's reservation: its back-off takes a second, and this
# machine may be busy.
RESERVE_SECONDS = 2.0


@dataclass(frozen=True)
class Session:
    """One call, by the database's clock."""

    started_at: datetime
    first_attempt_at: datetime
    last_attempt_ended_at: datetime
    ended_at: datetime
    num_gpus: int
    capacity: float
    reserved: float  # GPU-seconds of its attempts

    def most_reserved(self, until: datetime) -> float:
        """GPU-seconds if the gang was leased from the row of the first attempt on."""
        return GANG * (until - self.first_attempt_at).total_seconds()

    def least_reserved(self, until: datetime, *, apart: float = 0.0) -> float:
        """GPU-seconds of a gang leased soon after the row of the first attempt.

        `apart`: seconds that need not be counted.
        """
        return GANG * max(
            (until - self.first_attempt_at).total_seconds() - RESERVE_SECONDS - apart, 0.0
        )


def sessions(command: Command) -> list[Session]:
    rows = command.sql(
        "SELECT session.started_at, min(attempt.started_at), max(attempt.ended_at),"
        " session.ended_at, session.num_gpus, session.capacity_gpu_seconds,"
        " sum(attempt.gpu_seconds) FROM session JOIN attempt ON attempt.epoch = session.epoch"
        " GROUP BY session.id ORDER BY session.id",
    )
    return [
        Session(
            *(_utc(moment) for moment in row[:4]),
            num_gpus=row[4],
            capacity=row[5],
            reserved=row[6] or 0.0,
        )
        for row in rows
    ]


def status(command: Command) -> Any:
    return command.here.json("status", "t")["sweeps"][0]


def reserved(command: Command) -> ReservedGpuSeconds:
    return ReservedGpuSeconds(**status(command)["gpu_seconds_by_part"])


def _utc(moment: str | datetime) -> datetime:
    found = datetime.fromisoformat(str(moment))
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

"""Tables of profiles: what a few steps of a trial's layout under a profiler showed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Integer,
    Table,
    Text,
    UniqueConstraint,
)

from db.tables.columns import metadata, optional, required, row_id
from db.types import Id, Json, UtcTime


def _rank_of_a_profile() -> list[Column[Any]]:
    """The columns that name one rank of a profile."""
    profile_id = ForeignKey("profile.id", ondelete="CASCADE")
    return [
        required("profile_id", Id, "", profile_id, primary_key=True, autoincrement=False),
        required("rank", Integer, "", primary_key=True, autoincrement=False),
    ]


profile = Table(
    "profile",
    metadata,
    row_id(),
    required("trial_id", Id, "", ForeignKey("trial.id", ondelete="CASCADE")),
    required("number", Integer),
    optional("epoch", BigInteger),
    required("state", Text),
    required("started_at", UtcTime),
    optional("ended_at", UtcTime),
    optional("nodes", Json),
    optional("gpu_seconds", Double),
    optional("advice", Json, "what to change, as JSON: at most three sentences"),
    optional(
        "memory",
        Json,
        "the memory of the first four steps of rank 0 by kind, as JSON: step, part of the step, "
        "bytes of each kind; NULL: not asked for",
    ),
    optional("failure_kind", Text),
    optional("failure_message", Text),
    UniqueConstraint("trial_id", "number"),
)

profile_rank = Table(
    "profile_rank",
    metadata,
    *_rank_of_a_profile(),
    required("is_slowest", Boolean, "it communicated least, so the others waited for it"),
    required("num_steps", Integer),
    required("window_nanoseconds", BigInteger, "time of all of them; the parts add up to it"),
    optional("plain_step_seconds", Double, "a step of the same process without the profiler"),
    optional(
        "host_nanoseconds",
        BigInteger,
        "time of all profiled steps in which the host did not wait for the device; NULL on a CPU",
    ),
    required("num_kernels", BigInteger, "kernels in all profiled steps; on a CPU operations"),
    optional("median_kernel_nanoseconds", BigInteger, "time of the kernel in the middle"),
    required(
        "is_on_device", Boolean, "whether kernels ran on a device; false: operations on a CPU"
    ),
    optional(
        "attention",
        Text,
        "`fused`, `math` (torch's fallback) or `eager` (products and a softmax of the program's "
        "own); NULL: no operation shows it",
    ),
    required("is_compiled", Boolean, "whether kernels or regions of torch.compile ran"),
    optional("unknown", Json, "kernels that no table knows, as JSON: name to nanoseconds"),
    optional("trace_path", Text, "the trace, on the node that ran the rank; NULL: not kept"),
)

profile_part = Table(
    "profile_part",
    metadata,
    *_rank_of_a_profile(),
    required(
        "part",
        Text,
        "what the time went into: [parts](profile.md#the-parts-of-a-step)",
        primary_key=True,
    ),
    required(
        "is_hidden",
        Boolean,
        "communication while kernels ran: it took no time of its own. All other parts add up to "
        "the step",
    ),
    required("nanoseconds", BigInteger, "time of all profiled steps"),
)

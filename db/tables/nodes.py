"""Tables of what is known of nodes, and of the links between ranks."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Double, Index, Integer, Table, Text, text

from db.tables.columns import metadata, optional, required, row_id, sweep_id
from db.types import Json, UtcTime

node_check = Table(
    "node_check",
    metadata,
    row_id(),
    sweep_id(nullable=True),
    optional("epoch", BigInteger),
    required("at", UtcTime),
    required("node", Text),
    required("is_fit", Boolean, "whether no check failed"),
    optional("failed", Text, "the checks that failed; NULL: none"),
    optional("host", Text),
    optional(
        "boot_id",
        Text,
        "the kernel's id of this boot; two nodes with the same are simulated on one machine",
    ),
    optional("kernel", Text, "version of the kernel"),
    optional("python", Text),
    optional("torch", Text),
    optional("cuda", Text),
    optional("nccl", Text),
    optional("driver", Text),
    optional("device_name", Text),
    optional("num_gpus", Integer),
    optional("num_cores", Integer, "cores of the node that processes may use"),
    optional(
        "matmul_flops", Double, "FLOP/s of the node's slowest device, sustained over two seconds"
    ),
    optional("free_disk_bytes", BigInteger, "free bytes where run folders lie"),
    optional("clock_offset_seconds", Double, "how far the node's clock is ahead of the head's"),
    optional("checks", Json, "each check: name, status, what was found, advice"),
    optional("facts", Json, "all that the node reported"),
    Index("ix_node_check_sweep_id_node", "sweep_id", "node"),
)

node_bench = Table(
    "node_bench",
    metadata,
    row_id(),
    sweep_id(),
    required("node", Text),
    required("since", UtcTime, "from then on nothing is placed on the node"),
    optional("until", UtcTime, "when the node was used again; NULL: it is benched"),
    required("reason", Text, "`slow`, `faults`, `asked`"),
    required("is_remeasured", Boolean, "whether measurements taken there no longer count"),
    optional("evidence", Json, "why, in numbers"),
    # A node is benched once, by the sweep or by a person.
    Index(
        "uq_node_bench_open",
        "sweep_id",
        "node",
        unique=True,
        sqlite_where=text("until IS NULL"),
        postgresql_where=text("until IS NULL"),
    ),
)

link = Table(
    "link",
    metadata,
    row_id(),
    required("run_token", Text),
    required("at", UtcTime),
    optional("device_name", Text),
    required("backend", Text, "the library that carried it: `nccl`, `gloo`"),
    required("collective", Text, "`all_reduce`, `all_gather`, `reduce_scatter`, `send_recv`"),
    required("num_ranks", Integer, "ranks that took part"),
    required("num_nodes", Integer, "nodes that took part"),
    required("message_bytes", BigInteger, "bytes that one call reduces, gathers or sends"),
    required("num_calls", Integer, "calls that the time is taken from"),
    required("seconds", Double, "time of one call: the median, of the slowest rank"),
    required("algorithm_bytes_per_second", Double, "message bytes over seconds"),
    required(
        "bus_bytes_per_second",
        Double,
        "algorithm bandwidth times the collective's factor, so that different numbers of "
        "ranks compare",
    ),
    optional("nodes", Json),
    optional("torch", Text),
    optional("nccl", Text),
    Index("ix_link_device_name", "device_name"),
)

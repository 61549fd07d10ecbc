"""Tables of sweeps: their owner, the conditions, models and cells, and each call of `sweep run`."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from db.tables.columns import metadata, optional, required, row_id, sweep_id
from db.types import Json, UtcTime

sweep = Table(
    "sweep",
    metadata,
    row_id(),
    required("name", Text, unique=True),
    required("run_token", Text),
    required("spec_json", Text, "the sweep file of the last run, checked, as JSON"),
    required("conditions", Json, "settings whose change makes numbers incomparable"),
    required("state", Text),
    required("created_at", UtcTime),
    optional("owner_host", Text, "host of the orchestrator; NULL: none owns the sweep"),
    optional("owner_pid", BigInteger, "its process id"),
    optional("owner_namespace", Text, "scope of `owner_pid`: machine boot and pid namespace"),
    optional("owner_token", Text, "one per opened store"),
    optional("owner_since", UtcTime, "when it took the sweep"),
    required(
        "owner_epoch",
        BigInteger,
        "the fencing token: grows with each owner",
        server_default=text("0"),
    ),
    required("lease_until", UtcTime, "end of the owner's lease, unless it is renewed"),
    optional("stop_requested", Text, "drain or cancel, asked for by `sweep cancel`"),
)

model = Table(
    "model",
    metadata,
    required("digest", Text, primary_key=True),
    required("name", Text),
    required("num_layers", Integer, "transformer layers"),
    required("hidden_size", Integer, "width of the model"),
    required("num_attention_heads", Integer, "query heads"),
    required("num_key_value_heads", Integer, "key and value heads"),
    required("ffn_hidden_size", Integer, "width of the feed-forward"),
    required("vocab_size", Integer, "token ids"),
    required("tied_embeddings", Boolean, "whether the output head is the input embedding"),
    required("num_parameters", BigInteger, "weights of the model"),
)

fingerprint = Table(
    "fingerprint",
    metadata,
    required("digest", Text, primary_key=True),
    required("orchestrator_version", Text, "version of this program"),
    optional("git_sha", Text, "commit of the measured code; NULL: not a git checkout"),
    optional(
        "dirty_diff_digest",
        Text,
        "digest of the uncommitted changes and of the named files that git does not track; "
        "without a checkout [of a program's "
        "files](measuring.md#what-a-number-was-measured-with); `unknown`: git gave no "
        "answer; NULL: none",
    ),
    optional("python", Text),
    optional("torch", Text),
    optional("cuda", Text),
    optional("nccl", Text),
    optional("driver", Text),
    optional("device_name", Text),
    optional(
        "settings",
        Json,
        "settings of the ranks' environment that make numbers incomparable, as JSON: name "
        "to value; NULL: none",
    ),
    optional(
        "packages",
        Json,
        "packages of the Python that ran the user's program, as JSON: name to version; NULL: not "
        "known, or a workload of this program",
    ),
    required("first_seen_at", UtcTime, "when this fingerprint first measured something"),
)

session = Table(
    "session",
    metadata,
    row_id(),
    sweep_id(),
    required("epoch", BigInteger),
    required("host", Text),
    required("pid", BigInteger, "its process id"),
    required("started_at", UtcTime),
    required("seen_at", UtcTime, "when it last renewed its lease"),
    optional("ended_at", UtcTime),
    required("num_gpus", Integer),
    optional(
        "price_per_gpu_hour",
        Double,
        "US dollars, by the sweep file or the device's list price; NULL: not known",
    ),
    required(
        "reserved_gpu_seconds",
        Double,
        "the sum of these; in `session` what its gangs reserved until `seen_at`",
        server_default=text("0"),
    ),
    required(
        "idle_gpu_seconds",
        Double,
        "leased without an attempt on them; NULL: not known by cell",
        server_default=text("0"),
    ),
    optional(
        "capacity_gpu_seconds",
        Double,
        "all slots of the cluster while the orchestrator worked; NULL: not known by cell, "
        "or for a replay through Ray",
    ),
    optional(
        "stop_reasons",
        Json,
        "why its cells stopped, each reason once; NULL: it continues, or was killed",
    ),
    UniqueConstraint("sweep_id", "epoch"),
)

cell = Table(
    "cell",
    metadata,
    row_id(),
    sweep_id(),
    required("key", Text, "the cell's readable name"),
    required(
        "model_digest",
        Text,
        "identity of the model: another definition has another",
        ForeignKey("model.digest"),
    ),
    required("model_name", Text, "the model's name in the sweep"),
    required("num_gpus", Integer),
    required("sequence_length", Integer, "tokens of a sequence"),
    required("global_batch_size", Integer, "sequences of an optimizer step"),
    optional("fingerprint_digest", Text, "", ForeignKey("fingerprint.digest")),
    optional(
        "stop_reason",
        Text,
        "why the cell's search ended, in the newest call that ended by itself; NULL: none has",
    ),
    optional(
        "num_untried",
        Integer,
        "layouts of the cell that were neither launched nor ruled out when that call ended",
    ),
    UniqueConstraint(
        "sweep_id", "model_digest", "num_gpus", "sequence_length", "global_batch_size"
    ),
)

"""The schema of the store: its version, its tables and its views.

Every layout field and headline number is a column of its own; JSON holds only evidence. Unknown is
NULL. Times are in UTC, by the database's clock.
"""

from __future__ import annotations

from db.tables.columns import metadata
from db.tables.nodes import link, node_bench, node_check
from db.tables.profiles import profile, profile_part, profile_rank
from db.tables.sweeps import cell, fingerprint, model, session, sweep
from db.tables.trials import attempt, event, measurement, trial

SCHEMA_VERSION = "0015"  # the newest migration in migrations/versions
# The oldest that can be upgraded; older ones were never released.
FIRST_VERSION = "0015"

# In the order of their creation.
VIEWS = (
    "v_trial",
    "v_best",
    "v_oom",
    "v_scaling",
    "v_failure",
    "v_event",
    "v_gpu_seconds",
    "v_run",
    "v_profile",
    "v_cell",
)

__all__ = [
    "FIRST_VERSION",
    "SCHEMA_VERSION",
    "VIEWS",
    "attempt",
    "cell",
    "event",
    "fingerprint",
    "link",
    "measurement",
    "metadata",
    "model",
    "node_bench",
    "node_check",
    "profile",
    "profile_part",
    "profile_rank",
    "session",
    "sweep",
    "trial",
]

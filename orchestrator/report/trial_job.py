"""A trial as a job for a training framework: its cell and layout, and the GPUs of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.frameworks.job import Job

if TYPE_CHECKING:
    from db.read.rows import TrialDetail

# A node is assumed to have as many GPUs if no attempt of the trial shows how many it has.
USUAL_GPUS_PER_NODE = 8


def job_of(detail: TrialDetail) -> Job:
    """Return the job, with the nodes of the last attempt that had some."""
    num_gpus = detail.cell.cell.num_gpus
    num_nodes = next((len(it.nodes) for it in reversed(detail.attempts) if it.nodes), None)
    gpus_per_node = num_gpus // num_nodes if num_nodes else min(num_gpus, USUAL_GPUS_PER_NODE)
    if num_gpus % gpus_per_node:
        gpus_per_node = num_gpus
    return Job(cell=detail.cell.cell, layout=detail.trial.layout, gpus_per_node=gpus_per_node)

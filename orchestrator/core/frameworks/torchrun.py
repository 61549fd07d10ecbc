"""A program of one's own under torchrun: the layout in SWEEP_ variables, as workload command sets.

torchrun itself knows processes only, so the program does the rest.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import Expression, Rule, named
from orchestrator.core.frameworks.job import Job
from orchestrator.core.problem.layout import NAMED_AXES


def _axis(name: str) -> Rule:
    def rule(job: Job) -> Expression:
        return named({f"SWEEP_{name.upper()}": str(getattr(job.layout, name))})

    return rule


def _sequence_length(job: Job) -> Expression:
    return named({"SWEEP_SEQUENCE_LENGTH": str(job.cell.sequence_length)})


def _global_batch(job: Job) -> Expression:
    return named({"SWEEP_GLOBAL_BATCH_SIZE": str(job.cell.global_batch_size)})


def _processes(job: Job) -> Expression:
    return Expression(
        settings={"nnodes": job.num_nodes, "nproc-per-node": job.gpus_per_node},
        program="on node N add --node-rank=N --master-addr=HOST, of node 0, before train.py"
        if job.num_nodes > 1
        else None,
    )


RULES = {name: _axis(name) for name in NAMED_AXES} | {
    "sequence_length": _sequence_length,
    "global_batch_size": _global_batch,
    "processes": _processes,
}

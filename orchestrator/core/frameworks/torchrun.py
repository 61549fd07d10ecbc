"""A program of one's own under torchrun: the layout in SWEEP_ variables, as workload command sets.

torchrun itself knows processes only, so the program does the rest.
"""

from __future__ import annotations

from orchestrator.core.frameworks.expression import JOB_NUMBERS, Expression, Rule, named
from orchestrator.core.frameworks.job import Job


def _variable(number: str) -> Rule:
    def rule(job: Job) -> Expression:
        return named({f"SWEEP_{number.upper()}": str(job.number(number))})

    return rule


def _processes(job: Job) -> Expression:
    return Expression(
        settings={"nnodes": job.num_nodes, "nproc-per-node": job.gpus_per_node},
        program="on node N add --node-rank=N --master-addr=HOST, of node 0, before train.py"
        if job.num_nodes > 1
        else None,
    )


RULES = {name: _variable(name) for name in JOB_NUMBERS} | {"processes": _processes}

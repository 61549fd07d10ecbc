"""The table of what a framework calls each number of a layout."""

from __future__ import annotations

import itertools

from docs.markdown import markdown_table
from orchestrator.core.frameworks.expression import JOB_NUMBERS
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import TABLES, Framework, translate
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule


def framework_table(framework: Framework) -> str:
    """What a framework calls each number of a layout, and what it lacks."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {
        name: ({}, {}) for name in JOB_NUMBERS
    }
    for job in _jobs():
        translation = translate(job, framework)
        for name, rule in TABLES[framework].rules.items():
            words, lacks = found[name]
            words |= dict.fromkeys(f"`{it.rstrip(':')}`" for it in rule(job).settings)
            words |= dict.fromkeys(["your program"] if name in translation.program else [])
            lacks |= dict.fromkeys(
                [translation.impossible[name]] if name in translation.impossible else []
            )
    rows = [
        (
            f"`{name}`",
            ", ".join(words) or ("default only" if lacks else "follows"),
            "; ".join(lacks) or "-",
        )
        for name, (words, lacks) in found.items()
    ]
    return markdown_table("number | written as | not possible", rows)


def _jobs() -> list[Job]:
    """Layouts that differ in every axis, so that a table of rules shows all it can say."""
    model = PRESETS["llama-3.1-8b"]
    cell = Cell(model=model, num_gpus=16, sequence_length=4096, global_batch_size=64)
    recomputes = ("none", "full", "full:8", "selective_ops", "selective_attention")
    pipelines = [(1, "1f1b"), *((2, name) for name in ("1f1b", "gpipe", "interleaved:4"))]
    pipelines.append((2, "interleaved:5"))  # which does not divide the layers
    return [
        Job(
            cell=cell,
            layout=Layout(
                data_parallel_size=16 // (tp * pp * cp),
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                pipeline_schedule=PipelineSchedule.parse(schedule),
                context_parallel_size=cp,
                grad_accum_steps=4 * tp * pp * cp,
                recompute=Recompute.parse(recompute),
                zero_stage=zero,
                precision=precision,
            ),
            gpus_per_node=8,
        )
        for tp, (pp, schedule), cp, recompute, zero, precision in itertools.product(
            (1, 2), pipelines, (1, 2), recomputes, range(4), Precision
        )
    ]

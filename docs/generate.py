"""Writes the parts of the documents that follow from the code or from committed results.

Each part is between `<!-- generated: NAME -->` and `<!-- end -->`. `python -m docs.generate` writes
them; a test fails if they differ.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from db import migrate, schema
from db.sql import own_queries, readonly
from db.sql.named_queries import SWEEP, named_queries
from db.store import Store
from db.types import Json
from docs.figures import (
    band_rows,
    drift_rows,
    measured_rows,
    score_rows,
    scoreboard_rows,
    summary_rows,
)
from orchestrator.core.frameworks.expression import JOB_NUMBERS
from orchestrator.core.frameworks.job import Job
from orchestrator.core.frameworks.translation import TABLES, Framework, translate
from orchestrator.core.physics.step_time_constants import PRIORS
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import DEVICES, GIB
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.problem.pipeline_schedule import PipelineSchedule
from orchestrator.core.sweepfile.axes_section import Axes
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.measurement_section import Limits, Measuring
from orchestrator.core.sweepfile.metrics_section import MetricsSection
from orchestrator.core.sweepfile.mirror_section import MirrorSection
from orchestrator.core.sweepfile.model_section import ModelSizes
from orchestrator.core.sweepfile.notify_section import NotifyTarget
from orchestrator.core.sweepfile.search_section import Confirm, Plateau, Search
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.sweepfile.synthetic_options import (
    DRIFTS,
    FAULTS,
    SyntheticDrift,
    SyntheticFault,
)
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES
from orchestrator.core.sweepfile.trainer_section import (
    BytesPerParameter,
    TracedModeSection,
    TracedTerm,
    TrainerSection,
)
from orchestrator.core.sweepfile.workload_section import WORKLOADS, LlamaWorkload
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, POLICIES, Fault
from orchestrator.core.trial.lifecycle import mermaid
from orchestrator.core.trial.protocol import RankResult
from orchestrator.core.trial.trace_split import MEANS
from orchestrator.report.pictures.all_pictures import pictures
from orchestrator.sweep.cell_life import mermaid as cell_mermaid

DOCS = Path(__file__).parent
PROJECT = DOCS.parent
FOLDERS = (
    "layout_sweep",
    "orchestrator/cli",
    "orchestrator/cli/best",
    "orchestrator/cli/doctor",
    "orchestrator/cli/export",
    "orchestrator/cli/live",
    "orchestrator/cli/mirror",
    "orchestrator/cli/run",
    "orchestrator/cli/store",
    "orchestrator/cli/terminal",
    "orchestrator/cli/top",
    "orchestrator/cli/ui",
    "orchestrator/report",
    "orchestrator/report/pictures",
    "orchestrator/report/pages",
    "orchestrator/report/mirrors",
    "orchestrator/sweep",
    "orchestrator/search",
    "orchestrator/cluster",
    "orchestrator/cluster/ray",
    "orchestrator/node",
    "orchestrator/core",
    "orchestrator/core/problem",
    "orchestrator/core/physics",
    "orchestrator/core/trial",
    "orchestrator/core/frameworks",
    "orchestrator/core/machines",
    "orchestrator/core/sweepfile",
    "orchestrator/core/search",
    "orchestrator/core/pretend",
    "db",
    "db/tables",
    "db/read",
    "db/write",
    "db/sql",
    "db/connection",
    "workloads",
    "workloads/llama",
    "workloads/synthetic",
    "workloads/replay",
    "workloads/command",
    "workloads/netbench",
    "workloads/tools",
)
SECTIONS: Mapping[str, type[BaseModel]] = {
    "sweep": SweepSpec,
    "axes": Axes,
    "measurement": Measuring,
    "limits": Limits,
    "search": Search,
    "plateau": Plateau,
    "confirm": Confirm,
    "workload": LlamaWorkload,  # all workloads have these keys
    "notify": NotifyTarget,
    "mirror": MirrorSection,
    "trainer": TrainerSection,
    "bytes-per-parameter": BytesPerParameter,
    "activations": TracedModeSection,
    "bytes": TracedTerm,
    "fault": SyntheticFault,
    "drift": SyntheticDrift,
    "model": ModelSizes,
}
PROGRAM_OPTIONS: Mapping[str, Any] = {
    name: workload.model_fields["options"].annotation for name, workload in WORKLOADS.items()
}
PROVEN_LAYOUTS = PROJECT / "tests/workloads/llama/equivalence/results.json"
_BLOCK = re.compile(r"(<!-- generated: ([a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    for document in documents():
        text = document.read_text()
        new = generated(text)
        if new != text:
            document.write_text(new)
            print(f"wrote {document}")  # noqa: T201
    return 0


def documents() -> list[Path]:
    """Every document of the project."""
    return sorted(
        [
            *DOCS.rglob("*.md"),
            *(PROJECT / "benchmarks").rglob("*.md"),
            *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ]
    )


def generated(text: str) -> str:
    """Return the document with its generated parts as they follow from today's code.

    Raises KeyError for an unknown part.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}{_part(match[2])}\n{match[3]}", text)


def _part(name: str) -> str:
    kind, _, which = name.partition(" ")
    if kind == "keys":
        return key_table(SECTIONS[which])
    if kind == "framework":
        return framework_table(Framework(which))
    if kind == "options":
        return key_table(PROGRAM_OPTIONS[which]) if which else option_list()
    parts: Mapping[str, Callable[[], str]] = {
        "capabilities": capability_table,
        "faults": lambda: _words("fault", FAULTS),
        "drift": lambda: _table(
            "drift | winner named | wrong, of sweeps | repeats | by plain medians: winner named"
            " | wrong, of sweeps | repeats",
            drift_rows(),
        ),
        "bands": lambda: _table(
            "tables | calibration | step time: within (below / above)"
            " | memory: within (below / above) | fits",
            band_rows(),
        ),
        "proven-layouts": proven_layout_table,
        "drifts": lambda: _words("kind", DRIFTS),
        "placeholders": lambda: _words("name", TEMPLATE_NAMES),
        "printed": lambda: key_table(MetricsSection),
        "result": lambda: _words(
            "field",
            {
                name: _means(field)
                for name, field in RankResult.model_fields.items()
                # A program's rank adds these.
                if name not in ("seen", "step_seconds_bound", "profile")
            },
        ),
        "profile-parts": lambda: _words("part", MEANS),
        "summary": lambda: _table("what | measured | file", summary_rows()),
        "measured": lambda: _table(
            "what | result | file in `benchmarks/results/`", measured_rows()
        ),
        "scores": lambda: _table(
            "case | trials, median | nine in ten | found within 400"
            " | healthy sweeps in which a node was called slow",
            score_rows(),
        ),
        "scoreboard": lambda: _table(
            "figure | result | file in `benchmarks/results/`", scoreboard_rows()
        ),
        "modules": module_tables,
        "states": lambda: f"```mermaid\n{mermaid()}\n```",
        "cell-states": lambda: f"```mermaid\n{cell_mermaid()}\n```",
        "pictures": lambda: _table(
            "name | picture | its question",
            ([f"`{one.name}`", one.title, one.question] for one in pictures([])),
        ),
        "failures": failure_table,
        "models": model_table,
        "devices": device_table,
        "views": view_list,
        "queries": query_table,
        "tables": table_list,
        "columns": column_table,
        "constants": constant_table,
    }
    return parts[name]()


def constant_table() -> str:
    """The constants of step time, each with its prior and its meaning."""
    source = ast.parse((PROJECT / "orchestrator/core/physics/step_time_constants.py").read_text())
    body = next(
        node
        for node in source.body
        if isinstance(node, ast.ClassDef) and node.name == "StepTimeConstants"
    ).body
    means = {
        field.target.id: about.value.value
        for field, about in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(about, ast.Expr) and isinstance(about.value, ast.Constant)
    }
    rows = [
        (f"`{name}`", f"{prior.median:.3g}", f"x/ {math.exp(prior.log_sd):.2f}", means[name])
        for name, prior in PRIORS.items()
    ]
    return _table("constant | prior |  | meaning", rows)


def key_table(model: type[BaseModel]) -> str:
    """The keys of a section or of a workload's options, as their fields describe them."""
    rows = [
        (
            f"`{name}`",
            _takes(field),
            "required" if field.is_required() else _default(field.default),
            _means(field),
        )
        for name, field in model.model_fields.items()
    ]
    return _table("key | takes | default | meaning", rows)


def option_list() -> str:
    """The options of every workload, by name."""
    rows = [
        (f"`{name}`", ", ".join(f"`{key}`" for key in options.model_fields))
        for name, options in PROGRAM_OPTIONS.items()
    ]
    return _table("`name` | keys of `options`", rows)


def capability_table() -> str:
    """The layouts that workload llama supports."""
    able = CAPABILITIES["llama"]
    sizes = {
        name: getattr(able, f"max_{name}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    }
    rows = [
        ("`data_parallel_size`", "any"),
        *(
            (f"`{name}`", "any" if most is None else f"at most {most}" if most > 1 else "1")
            for name, most in sizes.items()
        ),
        ("`pipeline_schedule`", ", ".join(sorted(able.pipeline_schedules))),
        ("`zero_stage`", ", ".join(map(str, sorted(able.zero_stages)))),
        ("`precision`", ", ".join(sorted(able.precisions))),
    ]
    return _table("axis | values", rows)


def proven_layout_table() -> str:
    """The combinations whose training was compared with one process, and the differences."""
    kept = json.loads(PROVEN_LAYOUTS.read_text())
    rows = [
        (
            str(row["ranks"]),
            f"`{row['layout']}`",
            *(f"{row[name]:.1e}" for name in ("loss", "gradient_norm", "weights")),
        )
        for row in kept["combinations"]
    ]
    table = _table("ranks | layout | loss | gradient norm | weights", rows)
    return (
        f"{len(rows)} combinations took {kept['seconds']} s on two cores that other programs used,"
        f" too, and {kept['cpu_seconds']} s of one core.\n\n{table}"
    )


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
    return _table("number | written as | not possible", rows)


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


def module_tables() -> str:
    """Every module with the first sentence of its docstring."""
    lines = []
    for folder in FOLDERS:
        rows = []
        for file in sorted((PROJECT / folder).glob("*.py")):
            about = ast.get_docstring(ast.parse(file.read_text()))
            if about:
                sentence = re.split(r"(?<=[.])\s", " ".join(about.split()), maxsplit=1)[0]
                package = folder.rpartition("/")[2]
                rows.append((f"`{package if file.stem == '__init__' else file.name}`", sentence))
        lines += [f"**`{folder}/`**", "", _table("module | what it is", rows), ""]
    return "\n".join(lines).rstrip()


def failure_table() -> str:
    whose = {
        Fault.LAYOUT: "the layout's",
        Fault.CODE: "the code's",
        Fault.MACHINE: "the machine's",
        Fault.NOBODY: "none: it was stopped on request",
    }
    rows = [
        (
            f"`{kind}`",
            policy.means,
            whose[policy.fault],
            str(policy.max_retries) if policy.fault is not Fault.NOBODY else "next run",
            "waits"
            if policy.fault is Fault.NOBODY
            else "out_of_memory"
            if kind in OUT_OF_MEMORY_KINDS
            else "failed",
            policy.fix,
        )
        for kind, policy in POLICIES.items()
    ]
    return _table("kind | what happened | whose fault | retries | then | what to do", rows)


def model_table() -> str:
    rows = []
    for name, shape in PRESETS.items():
        heads = f"{shape.num_attention_heads} / {shape.num_key_value_heads}"
        sizes = (shape.num_layers, shape.hidden_size, heads, shape.ffn_hidden_size)
        tied = "yes" if shape.tied_embeddings else "no"
        rows.append((f"`{name}`", *sizes, shape.vocab_size, tied, f"{shape.num_parameters:,}"))
    return _table(
        "preset | layers | hidden | heads / kv | ffn | vocabulary | tied | parameters", rows
    )


def device_table() -> str:
    rows = []
    for name, device in DEVICES.items():
        peaks = [
            _tera(device.peak_flops.get(precision))
            for precision in (Precision.BF16, Precision.FP32, Precision.FP8)
        ]
        memory = (f"{device.memory_bytes / GIB:.1f}", f"{device.memory_bandwidth / 1e12:.2f}")
        links = (
            f"{device.intra_node_bandwidth / 1e9:.0f}",
            f"{device.inter_node_bandwidth / 1e9:.0f}",
        )
        price = f"{device.price_per_hour:.2f}" if device.price_per_hour is not None else "-"
        rows.append((f"`{name}`", *peaks, *memory, *links, price))
    titles = (
        "device | bf16 TFLOP/s | fp32 (TF32) | fp8 | GiB | memory TB/s | node GB/s"
        " | network GB/s | $/hour"
    )
    return _table(titles, rows)


def query_table() -> str:
    """Each query with a name: its question, its parameters, and its columns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        Store.open(url).close()
        for query in named_queries().values():
            values = {**query.values(()), SWEEP: "none"}
            columns = readonly.own_query(url, query.sql, parameters=values).columns
            parameters = [f"`{each.name}=`: {each.means}" for each in query.parameters]
            rows.append(
                (
                    f"`@{query.name}`",
                    "<br>".join([query.question, *parameters]),
                    ", ".join(f"`{column}`" for column in columns),
                )
            )
    return _table("query | question and parameters | columns", rows)


def view_list() -> str:
    """Each view with the first sentence of its SQL file, and its columns."""
    lines = []
    for view, columns in view_columns().items():
        source = (PROJECT / "db" / "views" / f"{view}.sql").read_text()
        about = source.splitlines()[0].removeprefix("-- ")
        lines += [f"**`{view}`**: {about}", "", ", ".join(f"`{column}`" for column in columns), ""]
    return "\n".join(lines).rstrip()


def table_list() -> str:
    lines = []
    for table in schema.metadata.sorted_tables:
        columns = ", ".join(
            f"`{column.name}`{' (JSON)' if column.type is Json else ''}" for column in table.columns
        )
        lines.append(f"- **`{table.name}`**: {columns}")
    return "\n".join(lines)


def column_table() -> str:
    """Every column of tables and views with its meaning."""
    places: dict[str, None] = {}
    for table in schema.metadata.tables.values():
        places |= dict.fromkeys(column.name for column in table.columns)
    for columns in view_columns().values():
        places |= dict.fromkeys(columns)
    means = migrate.meanings()
    return _table("column | meaning", [(f"`{name}`", means[name]) for name in sorted(places)])


def view_columns() -> dict[str, tuple[str, ...]]:
    """The columns of each view, as a new store has them."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sweep.sqlite"
        Store.open(url).close()
        return own_queries.view_columns(url)


def _words(title: str, words: Mapping[str, str]) -> str:
    return _table(f"{title} | meaning", [(f"`{name}`", means) for name, means in words.items()])


def _means(field: FieldInfo) -> str:
    """Return the description of a field. Raises ValueError if there is none."""
    if not field.description:
        raise ValueError(f"a field without a description: {field!r}")
    return field.description


def _takes(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    assert isinstance(extra, Mapping), f"a key without the values that it takes: {field!r}"
    return str(extra["takes"])


def _default(value: Any) -> str:
    """Return a default as the sweep file would have it."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see there"
    if isinstance(value, (tuple, list)):
        return ", ".join(_default(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "none" if not value else str(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:g}"


def _table(titles: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; `titles` are separated by " | "."""
    columns = titles.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell_text, line))} |" for line in lines)


def _cell_text(cell: object) -> str:
    """One line, without the bar that ends a cell."""
    return re.sub(r"\s*\n\s*", " ", str(cell)).replace("|", "&#124;")


if __name__ == "__main__":
    raise SystemExit(main())

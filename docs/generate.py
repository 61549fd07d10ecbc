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
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.figures import (
    band_rows,
    drift_rows,
    measured_rows,
    score_rows,
    summary_rows,
)
from docs.framework_table import framework_table
from docs.key_tables import PROGRAM_OPTIONS, SECTIONS, key_table, meaning_of, option_list
from docs.kill_figures import scoreboard_rows
from docs.markdown import markdown_table, words_table
from docs.module_tables import module_tables
from docs.store_tables import column_table, query_table, table_list, view_list
from orchestrator.core.frameworks.translation import Framework
from orchestrator.core.physics.step_time_constants import PRIORS
from orchestrator.core.problem.hardware import DEVICES, GIB
from orchestrator.core.problem.layout import Precision
from orchestrator.core.problem.model_shape import PRESETS
from orchestrator.core.sweepfile.capabilities import CAPABILITIES
from orchestrator.core.sweepfile.metrics_section import MetricsSection
from orchestrator.core.sweepfile.synthetic_options import (
    DRIFTS,
    FAULTS,
)
from orchestrator.core.sweepfile.template import TEMPLATE_NAMES
from orchestrator.core.trial.failure_kinds import OUT_OF_MEMORY_KINDS, POLICIES, Fault
from orchestrator.core.trial.lifecycle import mermaid
from orchestrator.core.trial.protocol import RankResult
from orchestrator.core.trial.trace_split import MEANS
from orchestrator.report.pictures.all_pictures import pictures
from orchestrator.sweep.cell_life import mermaid as cell_mermaid

DOCS = Path(__file__).parent
PROJECT = DOCS.parent
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
        "faults": lambda: words_table("fault", FAULTS),
        "drift": lambda: markdown_table(
            "drift | winner named | wrong, of sweeps | repeats | by plain medians: winner named"
            " | wrong, of sweeps | repeats",
            drift_rows(),
        ),
        "bands": lambda: markdown_table(
            "tables | calibration | step time: within (below / above)"
            " | memory: within (below / above) | fits",
            band_rows(),
        ),
        "proven-layouts": proven_layout_table,
        "drifts": lambda: words_table("kind", DRIFTS),
        "placeholders": lambda: words_table("name", TEMPLATE_NAMES),
        "printed": lambda: key_table(MetricsSection),
        "result": lambda: words_table(
            "field",
            {
                name: meaning_of(field)
                for name, field in RankResult.model_fields.items()
                # A program's rank adds these.
                if name not in ("seen", "step_seconds_bound", "profile")
            },
        ),
        "profile-parts": lambda: words_table("part", MEANS),
        "summary": lambda: markdown_table("what | measured | file", summary_rows()),
        "measured": lambda: markdown_table(
            "what | result | file in `benchmarks/results/`", measured_rows()
        ),
        "scores": lambda: markdown_table(
            "case | trials, median | nine in ten | found within 400"
            " | healthy sweeps in which a node was called slow",
            score_rows(),
        ),
        "scoreboard": lambda: markdown_table(
            "figure | result | file in `benchmarks/results/`", scoreboard_rows()
        ),
        "modules": module_tables,
        "states": lambda: f"```mermaid\n{mermaid()}\n```",
        "cell-states": lambda: f"```mermaid\n{cell_mermaid()}\n```",
        "pictures": lambda: markdown_table(
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
    return markdown_table("constant | prior |  | meaning", rows)


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
    return markdown_table("axis | values", rows)


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
    table = markdown_table("ranks | layout | loss | gradient norm | weights", rows)
    return (
        f"{len(rows)} combinations took {kept['seconds']} s on two cores that other programs used,"
        f" too, and {kept['cpu_seconds']} s of one core.\n\n{table}"
    )


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
    return markdown_table("kind | what happened | whose fault | retries | then | what to do", rows)


def model_table() -> str:
    rows = []
    for name, shape in PRESETS.items():
        heads = f"{shape.num_attention_heads} / {shape.num_key_value_heads}"
        sizes = (shape.num_layers, shape.hidden_size, heads, shape.ffn_hidden_size)
        tied = "yes" if shape.tied_embeddings else "no"
        rows.append((f"`{name}`", *sizes, shape.vocab_size, tied, f"{shape.num_parameters:,}"))
    return markdown_table(
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
    return markdown_table(titles, rows)


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:g}"


if __name__ == "__main__":
    raise SystemExit(main())

"""The sweep file that measures one trial's layout again, and the commands about the trial."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.template import fill_known, text_of

if TYPE_CHECKING:
    from db.read.rows import TrialDetail

# Of a sweep file: they say which cells and layouts there are, or follow from those.
_REPLACED = ("name", "model", "gpus", "sequence_length", "global_batch_tokens", "constraints")
# The longest name of a sweep that a file may have.
MOST_CHARACTERS = 63


def sweep_file(spec_json: str, detail: TrialDetail) -> str | None:
    """Return the YAML of a sweep with this layout alone; None: the store has no sweep file."""
    spec: dict[str, Any] = json.loads(spec_json)
    if "axes" not in spec:
        return None
    cell, layout = detail.cell.cell, detail.trial.layout
    ending = f"-trial-{detail.trial.id}"
    own = {
        "name": f"{detail.sweep_name[: MOST_CHARACTERS - len(ending)]}{ending}",
        "model": asdict(cell.model),
        "gpus": cell.num_gpus,
        "sequence_length": cell.sequence_length,
        "global_batch_size": cell.global_batch_size,
        "precision": layout.precision.value,
        "axes": _axes(layout, spec["axes"]),
    }
    kept = {
        name: value
        for name, value in spec.items()
        if name not in (*_REPLACED, *own) and value is not None
    }
    # Only this layout, however often: what the search may try and spend does not matter.
    kept["search"] = {"max_trials": 1}
    return yaml.safe_dump(own | kept, sort_keys=False, allow_unicode=True, width=100)


def _axes(layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    axes: dict[str, Any] = {}
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name in given and field.name != "options":
            axes[field.name] = value if isinstance(value, int) else str(value)
    if layout.options:
        axes["options"] = {name: [value] for name, value in layout.options}
    return axes


def program_command(spec_json: str, detail: TrialDetail) -> str | None:
    """Return the user's own command of workload command; None for other workloads.

    Names that only a rank knows, such as {master_addr}, stay in braces.
    """
    workload = json.loads(spec_json).get("workload") or {}
    argv = (
        (workload.get("options") or {}).get("argv") if workload.get("name") == "command" else None
    )
    if not argv:
        return None
    layout, cell = detail.trial.layout, detail.cell.cell
    values = {
        field.name: text_of(value)
        for field in fields(Layout)
        if isinstance(value := getattr(layout, field.name), str | int)
    }
    values |= {name: text_of(value) for name, value in layout.options}
    values |= {
        "recompute": str(layout.recompute),
        "world_size": str(layout.world_size),
        "global_batch_size": str(cell.global_batch_size),
        "sequence_length": str(cell.sequence_length),
    }
    filled = [fill_known(text, values) or text for text in argv]
    return shlex.join(filled)


def commands(detail: TrialDetail) -> list[tuple[str, str]]:
    """Return commands about a trial, each with what it is for."""
    trial = detail.trial
    found = [
        ("measure it again", f"sweep run trial-{trial.id}.yaml"),
        ("write it for your framework", f"sweep export config --trial {trial.id} --to FRAMEWORK"),
        ("all that the store knows", f"sweep show {trial.id}"),
    ]
    if trial.num_attempts:
        found.append(("what a rank printed", f"sweep logs {trial.id} --rank 0"))
        found.append(("what its steps are spent on", f"sweep profile {trial.id} --memory"))
    return found

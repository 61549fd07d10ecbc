"""The sweep file that measures one trial's layout again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import ValidationError

from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.command_script import command_script
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.report.trial_job import job_of

if TYPE_CHECKING:
    from db.read.rows import TrialDetail

# The keys of a sweep file that say which cells and layouts there are, or follow from those.
_OWN = ("name", "model", "gpus", "sequence_length", "global_batch_size", "precision", "axes")
# Somebody else may run the file, and should not send the sweep's messages.
_DROPPED = ("global_batch_tokens", "constraints", "search", "notify", "mirror")
# The longest name of a sweep that a file may have.
MOST_CHARACTERS = 63


@dataclass(frozen=True, kw_only=True)
class TrialFiles:
    """Writes the sweep files of the trials of one sweep."""

    # Keys of the axes that the sweep's file has; None: the store has no file.
    axes: Sequence[str] | None
    # The YAML that all trials share.
    shared: str
    workload: str
    # The options of workload command; None: another workload, or they cannot be read.
    program: CommandOptions | None

    @classmethod
    def of(cls, spec_json: str) -> Self:
        """Read the sweep's file as the store has it."""
        spec: dict[str, Any] = json.loads(spec_json)
        kept = {
            name: value
            for name, value in spec.items()
            if name not in (*_OWN, *_DROPPED) and value is not None
        }
        # Only one layout: what the search may try does not matter.
        shared = yaml.safe_dump(
            {**kept, "search": {"max_trials": 1}}, sort_keys=False, allow_unicode=True, width=100
        )
        axes = spec.get("axes")
        return cls(
            axes=None if axes is None else tuple(axes),
            shared=shared,
            workload=(spec.get("workload") or {}).get("name", ""),
            program=_program(spec_json) if axes is not None else None,
        )

    def sweep_file(self, detail: TrialDetail) -> str | None:
        """Return the YAML of a sweep with this layout alone; None: the store has no sweep file."""
        if self.axes is None:
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
        }
        return "\n".join(
            [*_lines(own), "axes:", *_lines(self._axes(layout), indent="  "), self.shared]
        )

    def _axes(self, layout: Layout) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        for field in fields(Layout):
            value = getattr(layout, field.name)
            if field.name in (self.axes or ()) and field.name != "options":
                axes[field.name] = value if isinstance(value, int) else str(value)
        if layout.options:
            axes["options"] = {name: [value] for name, value in layout.options}
        return axes

    def program_script(self, detail: TrialDetail) -> str | None:
        """Return the user's own program with this layout, as a script for a shell.

        None: the workload is one of ours.
        """
        return None if self.program is None else command_script(self.program, job_of(detail)).text


def _program(spec_json: str) -> CommandOptions | None:
    try:
        options = SweepSpec.model_validate_json(spec_json).workload.options
    except ValidationError:
        return None  # written by another version
    return options if isinstance(options, CommandOptions) else None


def _lines(values: Mapping[str, Any], *, indent: str = "") -> list[str]:
    """A key a line; values are JSON, which is YAML."""
    return [
        f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()
    ]

"""The commands that only read a sweep file: validate, and schema for editors."""

from __future__ import annotations

import json

from orchestrator.cli.options import File, Json, Overrides
from orchestrator.cli.run import checks as run_checks
from orchestrator.cli.sweep_file import limit_warnings, load, planning
from orchestrator.cli.terminal.output import note, write, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.quantities import counted


def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """List every mistake of a sweep file, with its line.

    Examples:
      sweep validate sweeps/8b.yaml search.max_trials=10
    """
    spec = load(file, overrides)
    cells = spec.cells()
    has_numbers = bool(spec.measurement.limits.numbers) and spec.workload.name != "replay"
    warnings = limit_warnings(planning(spec, None)) if has_numbers else []
    try:
        run_checks.check_program(spec)
    except UsageInvalid as exc:
        # The file may be for another machine.
        warnings.append(f"`sweep run` would refuse it on this machine: {exc}")
    if as_json:
        record = {
            "name": spec.name,
            "valid": True,
            "num_cells": len(cells),
            "warnings": warnings,
            "remarks": list(spec.remarks()),
            "spec": spec.model_dump(mode="json"),
        }
        write_json("validate", record)
        return
    write(f"{file}: valid; sweep {spec.name}, {counted(len(cells), 'cell')}")
    for warning in warnings:
        note(f"warning: {warning}")
    for remark in spec.remarks():
        note(remark)


def schema() -> None:
    """Print the JSON schema of a sweep file, for editors.

    Examples:
      sweep schema > sweep.schema.json
    """
    from orchestrator.core.sweepfile.spec_yaml import to_json_schema

    write(json.dumps(to_json_schema(), indent=2))

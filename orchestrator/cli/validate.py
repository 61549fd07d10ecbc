"""The commands that only read a sweep file: validate, and schema for editors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.cli.options import File, Json, Overrides
from orchestrator.cli.run import checks as run_checks
from orchestrator.cli.sweep_file import limit_warnings, load, planning, replayed_table
from orchestrator.cli.terminal.output import note, write, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from orchestrator.core.sweepfile.spec import SweepSpec


def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """List every mistake of a sweep file, with its line.

    Examples:
      sweep validate sweeps/8b.yaml search.max_trials=10
    """
    spec = load(file, overrides)
    cells = spec.cells()
    has_numbers = bool(spec.measurement.limits.numbers) and spec.workload.name != "replay"
    warnings = limit_warnings(planning(spec, None)) if has_numbers else []
    warnings += _warnings_of_a_run(spec)
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


def _warnings_of_a_run(spec: SweepSpec) -> list[str]:
    """Return why `sweep run` would refuse a file without mistakes, or would warn of it."""
    from orchestrator.core.search.space import CellSpaces, SpaceTooLarge  # numpy

    found: list[str] = []
    try:
        table = replayed_table(spec)
        among = table.layouts if table is not None else lambda _: None
        spaces = CellSpaces(spec, among)
        run_checks.check_some_layout_is_legal(spec, spaces)
        if table is None:
            found += filter(None, [run_checks.values_not_passed(spec, spaces)])
    except (SpaceTooLarge, UsageInvalid) as exc:
        found.append(f"`sweep run` would refuse it: {exc}")
    try:
        run_checks.check_program(spec)
    except UsageInvalid as exc:
        # The file may be for another machine.
        found.append(f"`sweep run` would refuse it on this machine: {exc}")
    return found


def schema() -> None:
    """Print the JSON schema of a sweep file, for editors.

    Examples:
      sweep schema > sweep.schema.json
    """
    from orchestrator.core.sweepfile.spec_yaml import to_json_schema

    write(json.dumps(to_json_schema(), indent=2))

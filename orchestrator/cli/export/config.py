"""Writes a layout as the configuration of a training framework, for `sweep export config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from orchestrator.cli.export.output_file import write_text
from orchestrator.cli.terminal.output import note, write_json
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.frameworks.framework import Framework
from orchestrator.core.frameworks.text import remarks, text_of
from orchestrator.core.frameworks.translation import (
    TABLES,
    Form,
    arguments,
    translate,
)
from orchestrator.core.sweepfile.command_options import CommandOptions
from orchestrator.core.sweepfile.command_script import command_script
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.report.ranking import rank_cell
from orchestrator.report.remarks import why_no_best
from orchestrator.report.trial_job import job_of

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store_reads import StoreReads


def export_config(
    store: StoreReads,
    sweep: SweepRow | None,
    to: Framework,
    *,
    trial_id: int | None,
    is_partial: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Write the winner of a sweep, or one trial, as a framework's file or arguments.

    Raises UsageInvalid if the framework cannot express the layout, unless `is_partial`.
    """
    detail = store.trial(trial_id if trial_id is not None else _winner(store, sweep))
    if sweep is not None and detail.sweep_name != sweep.name:
        raise UsageInvalid(
            f"trial {detail.trial.id} belongs to sweep {detail.sweep_name}, not to {sweep.name};"
            " leave out one of them"
        )
    job = job_of(detail)
    translation = translate(job, to)
    if translation.impossible and not is_partial:
        reasons = "; ".join(f"{name}: {why}" for name, why in translation.impossible.items())
        raise UsageInvalid(
            f"{to} cannot express {detail.trial.layout.short}: {reasons}. --partial writes the rest"
        )
    text, use, said = text_of(translation), TABLES[to].use, remarks(translation)
    command = _command_of(store, detail.sweep_name) if to is Framework.TORCHRUN else None
    if command is not None:
        script = command_script(command, job)
        text, use, said = script.text, "sh FILE [more arguments]", list(script.remarks)
    if not as_json:
        write_text(text, output)
        title = f"trial {detail.trial.id} ({detail.trial.layout.short}) for {to}"
        note(title if output is None else f"{title} written to {output}")
        note(f"use: {use.replace('FILE', output or 'FILE')}")
        for remark in said:
            note(remark)
        return
    if output is not None:
        write_text(text, output)
    form = TABLES[to].form
    is_file = form in (Form.JSON, Form.YAML)
    write_json(
        "export",
        {
            "target": "config",
            "framework": to,
            "sweep": detail.sweep_name,
            "trial_id": detail.trial.id,
            "layout": detail.trial.layout.key,
            "num_nodes": job.num_nodes,
            "gpus_per_node": job.gpus_per_node,
            "settings": translation.nested() if is_file else translation.settings,
            "arguments": None if is_file or command else arguments(translation.settings, form),
            "text": text,
            "program": translation.program,
            "remarks": said,
            "impossible": translation.impossible,
            "output": output,
        },
    )


def _command_of(store: StoreReads, sweep: str) -> CommandOptions | None:
    """The options of the sweep's program; None if it is one of our workloads, or not readable."""
    try:
        spec = SweepSpec.model_validate_json(store.sweep_named(sweep).spec_json)
    except ValidationError:
        # Written by another version; the layout alone can be exported.
        return None
    options = spec.workload.options
    return options if isinstance(options, CommandOptions) else None


def _winner(store: StoreReads, sweep: SweepRow | None) -> int:
    """The fastest layout of the sweep's only cell with a measured one."""
    from orchestrator.core.trial.winner import CONSIDERED  # numpy

    if sweep is None:
        raise UsageInvalid("--all has no winner: name a sweep, or a trial with --trial")
    cells = {cell.id: cell.cell.key for cell in store.cells(sweep.id)}
    rankings = {
        cell_id: rank_cell(store, sweep.id, cell_id, found)
        for cell_id, found in store.best(sweep.id, CONSIDERED).items()
        if found
    }
    best = {cells[cell_id]: found.leading[0].id for cell_id, found in rankings.items()}
    if not best:
        reasons = sorted({why_no_best(status) for status in store.status(sweep.id)})
        raise UsageInvalid(
            f"sweep {sweep.name} has no winner: {'; '.join(reasons) or 'it has no cells yet'}."
            " Name a trial with --trial"
        )
    if len(best) > 1:
        fastest = ", ".join(f"--trial {trial_id} ({cell})" for cell, trial_id in best.items())
        raise UsageInvalid(
            f"sweep {sweep.name} has {len(best)} cells; choose the fastest layout of one: {fastest}"
        )
    (found,) = rankings.values()
    note(found.text)
    return found.leading[0].id

"""`sweep doctor --workload`: runs one short attempt here, and goes through the program's contract.

It needs no store and no Ray, and leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from orchestrator import __version__
from orchestrator.cli.run import checks as run_checks
from orchestrator.cli.sweep_file import load, planning
from orchestrator.cli.terminal.output import note, plain, write, write_json, write_line
from orchestrator.core.errors import UsageInvalid
from orchestrator.core.machines.check import Check, Status, fail, ok
from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from orchestrator.core.machines.program_contract import ContractRun
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.layout import Layout
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.core.trial.launch_order import LaunchOrder
    from orchestrator.core.trial.protocol import Device, MeasurementPlan
    from orchestrator.node.watched_run import WatchedRun

WARMUP_STEPS, MAX_STEPS = 2, 8
LOG_LINES_SHOWN = 20
_STYLES = {Status.OK: "", Status.WARN: "yellow", Status.FAIL: "red"}


@dataclass(frozen=True, kw_only=True)
class _SmallestLayout:
    """The layout of the attempt, and what varies in the sweep."""

    cell: Cell
    layout: Layout
    varying: Mapping[str, Sequence[str]]


def check_workload(file: Path, overrides: list[str] | None, *, as_json: bool) -> None:
    """Show each point of the contract. Ends with exit code 1 if one failed."""
    spec = load(file, overrides)
    if spec.workload.name == "replay":
        raise UsageInvalid("workload replay starts no program: there is nothing to check")
    try:
        run_checks.check_program(spec)
    except UsageInvalid as exc:
        _show([fail("program", str(exc))], None, [], as_json=as_json)
        raise typer.Exit(1) from None
    device, devices = _devices(spec)
    smallest = _smallest_layout(spec, num_slots=len(devices) if devices else os.cpu_count() or 1)
    checks = [ok("program", _program(spec)), _layout_check(spec, smallest)]
    if not as_json:
        note(f"Running some steps of {smallest.cell.key}, {smallest.layout.short} ...")
    run = _run(spec, smallest, device, devices[: smallest.cell.num_gpus])
    from orchestrator.core.machines.program_contract import judge_contract

    checks += judge_contract(run)
    log = run.failure.log_tail.rstrip().splitlines() if run.failure is not None else []
    _show(checks, smallest, log[-LOG_LINES_SHOWN:], as_json=as_json)
    if any(check.status is Status.FAIL for check in checks):
        raise typer.Exit(1)


def _show(
    checks: Sequence[Check], smallest: _SmallestLayout | None, log: Sequence[str], *, as_json: bool
) -> None:
    num_failed = sum(check.status is Status.FAIL for check in checks)
    num_warnings = sum(check.status is Status.WARN for check in checks)
    if as_json:
        fields = {
            "ok": not num_failed,
            "cell": smallest.cell.key if smallest is not None else None,
            "layout": smallest.layout.key if smallest is not None else None,
            "checks": [asdict(check) for check in checks],
            "log": list(log),
        }
        write_json("doctor", fields)
        return
    for check in checks:
        style = _STYLES[check.status]
        write_line(f"{check.status:<4}  {check.name:<12} {check.found}", style=style)
        if check.advice:
            write_line(f"{'':<19}{check.advice}")
    if log:
        write_line("      last lines of the log:", style="dim")
        for line in log:
            write(f"        {plain(line)}")
    points = counted(len(checks), "point")
    write_line(f"{points}: {num_warnings} with a warning, {num_failed} failed", style="bold")


def _devices(spec: SweepSpec) -> tuple[Device, list[str]]:
    """The kind of device that the attempt uses, and the GPUs here. Raises UsageInvalid."""
    from orchestrator.core.trial.protocol import Device
    from orchestrator.node.gpu_monitor import gpu_facts

    if spec.device == "cpu":
        return Device.CPU, []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [gpu.index for gpu in gpu_facts(None)]
    if visible is not None:
        found = [one for one in visible.split(",") if one.strip()] if found else []
    if found:
        return Device.CUDA, found
    if spec.device == "auto":
        return Device.CPU, []
    raise UsageInvalid(
        f"the file asks for device {spec.device}, and the check runs on this machine, which has no"
        " GPU: run it on a node that has some, or add device=cpu"
    )


def _smallest_layout(spec: SweepSpec, *, num_slots: int) -> _SmallestLayout:
    """The smallest legal layout of the first cell that this machine can hold.

    Raises UsageInvalid if there is none.
    """
    import numpy as np

    from orchestrator.core.sweepfile.passed_values import varying_values

    known = planning(spec, None)
    small = [cell for cell in spec.cells() if cell.num_gpus <= num_slots]
    if not small:
        least = min(spec.gpus)
        raise UsageInvalid(
            f"gpus: {least} at least, and the check runs on this machine alone, which has"
            f" {num_slots}: add gpus={num_slots}"
        )
    for cell in sorted(small, key=lambda cell: cell.num_gpus):
        candidates = known.plan(cell).candidates
        if not len(candidates):
            continue
        table, memory = candidates.table, candidates.memory_bytes
        fitting = candidates.order[candidates.fits[candidates.order]]
        rows = fitting if len(fitting) else candidates.order
        row = int(rows[int(np.argmin(memory[rows]))])
        varying = varying_values([table], spec.sequence_length)
        return _SmallestLayout(cell=cell, layout=table.layout(row), varying=varying)
    raise UsageInvalid("no layout is legal in any cell that fits this machine; see `sweep plan`")


def _program(spec: SweepSpec) -> str:
    from orchestrator.core.sweepfile.command_options import CommandOptions

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return f"workload {spec.workload.name}"
    from orchestrator.core.sweepfile.program_files import script_of

    where = options.cwd if options.cwd is not None else "the run directory"
    first, script = options.argv[0], script_of(options.argv)
    shown = [first] if script is None else [first, script]
    if script is not None and options.argv[1] != script:
        shown.insert(1, "...")
    if options.argv[-1] != shown[-1]:
        shown.append("...")
    return f"{' '.join(shown)} in {where}: found"


def _layout_check(spec: SweepSpec, smallest: _SmallestLayout) -> Check:
    from orchestrator.core.machines.program_contract import layout_check
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.sweepfile.passed_values import names_passed

    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return ok("layout", "passed by this program's own protocol")
    script = run_checks.text_of_script(options) or ""
    return layout_check(smallest.varying, names_passed(options, spec.axes.options, script))


def _run(
    spec: SweepSpec, smallest: _SmallestLayout, device: Device, devices: Sequence[str]
) -> ContractRun:
    from orchestrator.cluster.contract import Finished
    from orchestrator.core.machines.program_contract import (
        ContractRun,
        StepTimes,
        steps_for_pace,
    )
    from orchestrator.core.sweepfile.workload_section import steps_per_line
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.node.gpu_monitor import device_name
    from orchestrator.sweep.measured_peaks import MeasuredPeaks
    from orchestrator.sweep.verdict import judge_attempt

    every = steps_per_line(spec.workload)
    plan = _short_plan(spec, device, max_steps=MAX_STEPS * every)
    order = _order(spec, smallest, device, devices, plan)
    seen = _watched(order)
    cell, report = smallest.cell, seen.report
    end = Finished(
        trial_id=1,
        reports=[report],
        failure=report.failure,
        gpu_seconds=seen.seconds * cell.num_gpus,
    )
    name = device_name()
    verdict = judge_attempt(
        end,
        cell=cell,
        layout=smallest.layout,
        plan=plan,
        peaks=MeasuredPeaks((), device_name=name),
        code=Fingerprint(orchestrator_version=__version__),
        device_name=name,
    )
    run = ContractRun(
        world_size=cell.num_gpus,
        layout=smallest.layout,
        device=device,
        report=report,
        outcome=verdict.outcome,
        seconds=seen.seconds,
        steps=StepTimes(
            num_steps=[step.num_steps for step in seen.steps],
            at_seconds=[step.at_seconds for step in seen.steps],
        ),
        num_steps_asked=plan.warmup_steps + plan.max_steps,
        steps_per_line=every,
        ranks=seen.ranks,
        connected_ranks=seen.connected_ranks,
        pattern=_pattern(spec),
    )
    if (num := steps_for_pace(run)) is None:
        return run
    # With as many least as most steps, the attempt is not ended before the last one.
    longer = plan.model_copy(update={"min_steps": num, "max_steps": num})
    again = _watched(_order(spec, smallest, device, devices, longer)).report
    found = [one.result for one in again.ranks if one.result is not None]
    return replace(run, longer=found[0] if again.failure is None and found else None)


def _short_plan(spec: SweepSpec, device: Device, *, max_steps: int) -> MeasurementPlan:
    """Return the file's plan with few steps, which show what the doctor judges."""
    short = {
        "warmup_seconds": 0.0,
        "min_seconds": 0.0,
        "warmup_steps": WARMUP_STEPS,
        "min_steps": 2,
        "max_steps": max_steps,
        "counts_lines": True,
    }
    return spec.measurement.plan(device).model_copy(update=short)


def _pattern(spec: SweepSpec) -> str | None:
    from orchestrator.core.sweepfile.command_options import CommandOptions

    options = spec.workload.options
    if not isinstance(options, CommandOptions) or options.metrics is None:
        return None
    return options.metrics.log


def _watched(order: LaunchOrder) -> WatchedRun:
    """Run an attempt in a folder that is removed afterwards."""
    from orchestrator.node.watched_run import run_watched

    with tempfile.TemporaryDirectory(prefix="sweep-doctor-") as folder:
        return run_watched(order, root=Path(folder))


def _order(
    spec: SweepSpec,
    smallest: _SmallestLayout,
    device: Device,
    devices: Sequence[str],
    plan: MeasurementPlan,
) -> LaunchOrder:
    """The order that a sweep would give for this layout, on this machine alone."""
    from orchestrator.core.sweepfile.workload_section import is_one_process_per_node, options_of
    from orchestrator.core.trial.launch_order import LaunchOrder
    from orchestrator.core.trial.limits import resolve_limits
    from orchestrator.core.trial.protocol import Device, TrialRequest
    from orchestrator.node.processes import global_identity

    cell, workload = smallest.cell, spec.workload
    limits = resolve_limits(
        spec.measurement.limits.asked, plan=plan, num_ranks=cell.num_gpus, predicted=None
    )
    request = TrialRequest(
        sweep=spec.name,
        trial_id=1,
        attempt=1,
        workload=workload.name,
        options=options_of(workload, smallest.layout),
        model=cell.model,
        sequence_length=cell.sequence_length,
        layout=smallest.layout,
        device=device,
        measurement=plan,
        limits=limits,
        seed=spec.search.seed,
        one_rank_per_node=is_one_process_per_node(workload),
    )
    threads = {"OMP_NUM_THREADS": "1"} if device is Device.CPU else {}
    return LaunchOrder(
        request=request,
        program=f"workloads.{workload.name}",
        local_world_size=cell.num_gpus,
        devices=devices,
        orchestrator=global_identity(),
        environment=threads | run_checks.rank_environment(spec),
        secrets=run_checks.rank_secrets(spec),
    )

"""The commands that begin with a sweep file: validate, run, schema. `plan` and `explain` have modules of their own.

Here the parts are wired together. Imports are inside the commands, so that `sweep --help` loads none of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from orchestrator import __version__
from orchestrator.cli import home
from orchestrator.cli.console_log import Redactor
from orchestrator.cli.output import DbOption, JsonOption, examples, note, write_error, write_json
from orchestrator.cli.run_checks import (
    check_home,
    check_some_layout_is_legal,
    check_that_ray_keeps_it,
    check_this_machine,
    rank_environment,
    rank_secrets,
)
from orchestrator.cli.signals import Signals
from orchestrator.cli.sweep_file import (
    File,
    Overrides,
    limit_warnings,
    load,
    planned_hardware,
    planning,
    replayed_table,
)

if TYPE_CHECKING:
    from db.store import Store
    from orchestrator.cli.progress import Progress
    from orchestrator.cluster.contract import Scheduler, Slots
    from orchestrator.cluster.simulated import SimulatedScheduler
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.problem.hardware import Hardware
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.sweep.progress import SweepResult

EXIT_SOME_FAILED = 3
EXIT_NOTHING_FEASIBLE = 4
PATIENCE_SECONDS = 300.0  # that a database may stay away from a sweep under way: its trials go on meanwhile, and nothing is lost


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(epilog=examples("sweep validate sweeps/8b.yaml search.max_trials=10"))(validate)
    app.command(
        epilog=examples(
            "sweep run sweeps/quickstart.yaml",
            "sweep run sweeps/quickstart.yaml search.max_trials=10",
            "sweep run sweeps/8b.yaml --ray-address auto",
        )
    )(run)
    app.command(epilog=examples("sweep schema > sweep.schema.json"))(schema)


def validate(file: File, overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Say every mistake of a sweep file, with its line."""
    spec = load(file, overrides)
    cells = spec.cells()
    has_numbers = bool(spec.measurement.limits.numbers) and spec.workload.name != "replay"
    warnings = limit_warnings(planning(spec, None)) if has_numbers else []
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
    else:
        _print(f"{file}: valid; sweep {spec.name}, {len(cells)} cell(s)")
        for warning in warnings:
            note(f"warning: {warning}")
        for remark in spec.remarks():
            note(remark)


def schema() -> None:
    """Print the JSON schema of a sweep file, for editors."""
    from orchestrator.core.sweepfile.spec_yaml import to_json_schema

    _print(json.dumps(to_json_schema(), indent=2))


def run(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    db: DbOption = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="ADDRESS",
            help="auto or HOST:PORT of a Ray cluster. Default: a local Ray.",
            envvar="RAY_ADDRESS",
        ),
    ] = None,
    wait_for_nodes: Annotated[
        str | None,
        typer.Option(
            "--wait-for-nodes",
            metavar="DURATION",
            help="How long a cluster may take to become large enough for the largest gang: 15min. Default: refused at once.",
        ),
    ] = None,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Take the sweep from an orchestrator that still holds it."),
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="On a cluster that is not there and a clock that is not real; as sweep NAME-simulated.",
        ),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, help="Of the simulated cluster. Default: for one gang of the largest."
        ),
    ] = None,
    node_loss_hours: Annotated[
        float | None,
        typer.Option(
            "--node-loss-hours",
            min=0.01,
            help="How long a simulated node runs, in the mean, until it is lost.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with exit code 3 when trials failed.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure layouts, or go on measuring.

    Until the budget is spent or all are known. The same command goes on where it was stopped.
    """
    spec = load(file, overrides)
    if isinstance(context.obj, Redactor):
        context.obj.learn(rank_secrets(spec))
    simulator = None
    if simulate:
        from orchestrator.cluster.simulated import SimulatedScheduler, simulated

        acted = simulated(spec)
        if spec.device != acted.device:
            note(
                f"A simulation needs a device with a data sheet: it acts on {acted.device}, and its speeds say nothing of the file's device ({spec.device})"
            )
        spec = acted
        simulator = SimulatedScheduler(spec, num_nodes=nodes, node_loss_hours=node_loss_hours)
    elif nodes is not None or node_loss_hours is not None:
        from orchestrator.core.errors import UsageInvalid

        raise UsageInvalid(
            "--nodes and --node-loss-hours are of a simulated cluster: add --simulate"
        )
    run_spec(
        spec,
        db=db,
        ray_address=ray_address,
        patience_seconds=_patience_seconds(wait_for_nodes, spec, ray_address)
        if wait_for_nodes is not None
        else None,
        takeover=takeover,
        strict=strict,
        quiet=quiet,
        as_json=as_json,
        simulator=simulator,
    )


def run_spec(
    spec: SweepSpec,
    *,
    db: str | None,
    ray_address: str | None,
    takeover: bool,
    strict: bool,
    quiet: bool,
    as_json: bool,
    patience_seconds: float | None = None,
    simulator: SimulatedScheduler | None = None,
) -> NoReturn:
    """Work on a sweep, show its best, and end with the exit code that tells how it went."""
    from orchestrator.core.sweepfile.budget import budget_of, price_of

    for remark in spec.remarks():
        note(remark)
    table = replayed_table(spec)
    environment, secrets = rank_environment(spec), rank_secrets(spec)
    check_some_layout_is_legal(spec, table)
    check_that_ray_keeps_it(db)
    check_home()
    if ray_address is None and table is None and simulator is None:
        budget_of(
            spec, price_of(spec, planned_hardware(spec))
        )  # of a cluster, its devices tell the price
        check_this_machine(spec)
    from db.store import Store
    from orchestrator.cli import results as look
    from orchestrator.cli.progress import Progress
    from orchestrator.report.quantities import counted
    from orchestrator.sweep.finished import finished_before

    this_host = socket.gethostname() if ray_address is None else None
    with (
        Store.open(db, patience_seconds=PATIENCE_SECONDS) as store,
        Progress(objective=spec.objective, quiet=quiet) as progress,
        Signals(progress.note) as signals,
    ):
        num_sweeps = len(store.sweeps())
        at = (
            f"store at {store.url}: {counted(num_sweeps, 'sweep')}"
            if num_sweeps
            else f"new store at {store.url}"
        )
        # A table answers at once, and may have changed.
        code = partial(_code_of, spec, table)
        result = (
            finished_before(
                spec, store, code=code, program_version=__version__, this_host=this_host
            )
            if table is None
            else None
        )
        if result is None:
            open_scheduler: Callable[[], Scheduler] = partial(
                _open_scheduler,
                spec,
                store,
                progress,
                signals,
                ray_address,
                environment,
                secrets,
                table,
            )
            if simulator is not None:
                open_scheduler = partial(_open_simulator, simulator, spec, progress)

            def begin() -> Scheduler:
                # Only now: a call that does not get the sweep says that, and nothing else.
                progress.say(at)
                return open_scheduler()

            if patience_seconds is not None and ray_address is not None:
                _await_nodes(spec, ray_address, patience_seconds, progress, signals)
            clock = simulator.clock if simulator is not None else time.monotonic
            result = _measure(
                spec,
                store,
                progress,
                signals,
                begin,
                table,
                clock=clock,
                takeover=takeover,
                as_json=as_json,
            )
        else:
            progress.say(at)
        where = store.url
    if as_json:
        look.best(spec.name, db=db, as_json=True)
    else:
        _say_how_it_ended(spec, result, where)
        look.best(spec.name, db=db, top=3)
    raise typer.Exit(_exit_code(result, signals, strict=strict))


def _patience_seconds(text: str, spec: SweepSpec, ray_address: str | None) -> float:
    """Check at once what can only wait in vain."""
    from pydantic import TypeAdapter, ValidationError

    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.sweepfile.spec_values import Duration

    if ray_address is None:
        raise UsageInvalid("--wait-for-nodes is for a cluster: add --ray-address")
    if not isinstance(spec.gpus_per_node, int):
        raise UsageInvalid(
            "--wait-for-nodes needs gpus_per_node in the sweep file: nodes that are not there yet do not tell their size"
        )
    try:
        return float(TypeAdapter(Duration).validate_python(text))
    except ValidationError as exc:
        raise UsageInvalid(
            f"--wait-for-nodes: {exc.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def _await_nodes(
    spec: SweepSpec, ray_address: str, patience_seconds: float, progress: Progress, signals: Signals
) -> None:
    from orchestrator.cluster.ray.cluster import await_nodes  # ray takes seconds to import
    from orchestrator.core.machines.packing import Shape
    from orchestrator.core.trial.protocol import Device

    def gave_up() -> bool:
        signals.install()  # Ray has put a handler of its own in place
        return signals.received is not None

    assert isinstance(spec.gpus_per_node, int)
    largest = Shape.of(max(spec.gpus), gpus_per_node=spec.gpus_per_node)
    progress.say(
        f"Waiting for {largest.num_nodes} node(s) with {largest.slots_per_node} slots each, {patience_seconds:.0f} s at most ..."
    )
    device = Device.CPU if spec.device == "cpu" else Device.CUDA
    if not await_nodes(
        ray_address, largest, device, patience_seconds=patience_seconds, give_up=gave_up
    ):
        raise typer.Exit(128 + (signals.received or signal.SIGINT))


def _measure(
    spec: SweepSpec,
    store: Store,
    progress: Progress,
    signals: Signals,
    open_scheduler: Callable[[], Scheduler],
    table: ReplayTable | None,
    *,
    clock: Callable[[], float],
    takeover: bool,
    as_json: bool,
) -> SweepResult:
    from orchestrator.core.errors import ClusterUnavailable, StoreUnavailable

    # Optuna takes 0.5 s to import: only if there is something to do.
    from orchestrator.sweep.run import run_sweep

    def opened() -> Scheduler:
        scheduler = open_scheduler()
        signals.defer()
        return scheduler

    try:
        # Ray prints to stdout that a node is dead, whatever it is asked; only the answer belongs there.
        with redirect_stdout(sys.stderr):
            return run_sweep(
                spec,
                store=store,
                open_scheduler=opened,
                code=_code_of(spec, table),
                hardware=lambda slots: _hardware(spec, slots),
                clock=clock,
                stop=signals.asked,
                observe=progress.show,
                takeover=takeover,
                among=lambda cell: table.layouts(cell) if table is not None else None,
                run_root=home.run_root,
            )
    except (ClusterUnavailable, StoreUnavailable) as exc:
        if signals.received is None:
            raise
        # The signal went to the whole process group or job, so Ray ended with us: that is a stop, not a failure.
        note(f"Stopped by signal {signals.received}: {exc}")
        if as_json:
            write_error("interrupted", str(exc), 128 + signals.received)
        raise typer.Exit(128 + signals.received) from None


def _open_simulator(
    simulator: SimulatedScheduler, spec: SweepSpec, progress: Progress
) -> Scheduler:
    sizes = simulator.slots.by_size
    progress.say(
        f"Simulated, on a clock of its own: {len(sizes)} node(s) of {sizes[0]} {spec.device}. Nothing is measured"
    )
    return simulator


def _open_scheduler(
    spec: SweepSpec,
    store: Store,
    progress: Progress,
    signals: Signals,
    ray_address: str | None,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    table: ReplayTable | None,
) -> Scheduler:
    from orchestrator.core.trial.protocol import Device

    if table is not None:
        from orchestrator.cluster.replayed import (
            RayReplayScheduler,
            ReplayScheduler,
            goes_through_ray,
        )

        if not goes_through_ray(spec):
            return ReplayScheduler(spec, table)
    if ray_address is None:
        # Ray's own switch for "this machine only", read when it is imported: its servers bind loopback instead of every interface.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from orchestrator.cluster.ray.scheduler import (
        RayScheduler,
    )  # ray takes seconds to import: only once the sweep is ours

    progress.say(
        f"Joining the Ray cluster at {ray_address} ..."
        if ray_address is not None
        else "Starting a local Ray ..."
    )
    scheduler = RayScheduler(
        address=ray_address,
        device=Device.CPU
        if table is not None or spec.device == "cpu"
        else None
        if spec.device == "auto"
        else Device.CUDA,
        root=home.run_root(store.sweep_named(spec.name).run_folder),
        gpus_per_node=spec.gpus_per_node
        if isinstance(spec.gpus_per_node, int) and table is None
        else None,
        rank_environment=environment,
        rank_secrets=secrets,
    )
    signals.install()  # after Ray, which installs a handler of its own
    return scheduler if table is None else RayReplayScheduler(spec, table, scheduler)


def _code_of(spec: SweepSpec, table: ReplayTable | None) -> Fingerprint:
    """Which code is measured: somebody's program, a table's runs, or this package's."""
    from orchestrator.core.sweepfile.command_options import CommandOptions
    from orchestrator.core.trial.fingerprint import Fingerprint
    from orchestrator.sweep.provenance import code_fingerprint, program_fingerprint

    if table is not None:
        return Fingerprint(orchestrator_version=__version__, dirty_diff_digest=table.digest)
    options = spec.workload.options
    if not isinstance(options, CommandOptions):
        return code_fingerprint(Path(__file__).parent)
    cwd = Path(options.cwd) if options.cwd is not None else None
    return program_fingerprint(
        [*options.argv, *options.env.values()], cwd=cwd, skip=[home.sweep_home()]
    )


def _hardware(spec: SweepSpec, slots: Slots) -> Hardware | None:
    from orchestrator.core.problem.hardware import DEVICES, from_driver_name
    from orchestrator.core.trial.protocol import Device

    if slots.device is Device.CPU:
        return None
    if spec.device in DEVICES:
        return DEVICES[spec.device]
    # Ray's name of a device is often short of what tells its kinds apart; this machine's driver knows its own.
    known = from_driver_name(slots.device_name) if slots.device_name else None
    return known or planned_hardware(spec)


def _say_how_it_ended(spec: SweepSpec, result: SweepResult, where: str) -> None:
    from orchestrator.core.sweepfile.sections import Strategy
    from orchestrator.core.trial.lifecycle import TrialState
    from orchestrator.report.quantities import counted
    from orchestrator.sweep.progress import BUDGETS, StopReason

    count = result.counts.get
    parts = [
        f"{count(state, 0)} {state.replace('_', ' ')}" for state in TrialState if count(state, 0)
    ]
    parts += [f"{result.untried} never tried"] if result.untried else []
    if result.interrupted:
        note(f"Stopped on request. The same command goes on: {', '.join(parts)}.")
    else:
        reasons = sorted({str(reason) for reason in result.stopped.values()})
        note(
            f"Sweep {spec.name} ended ({'; '.join(reasons)}): {', '.join(parts)}. Results: {where}"
        )
    if spec.search.strategy is Strategy.EXHAUSTIVE and (num := count(TrialState.PRUNED, 0)):
        note(
            f"{num} of the layouts were not launched: others ran out of memory, and these need at least as much"
            f" (search.dominance is {spec.dominance}; search.dominance=off launches them too)"
        )
    if result.code_has_changed:
        note(
            "The code has changed since these numbers were taken, and nothing was measured again. To have them measured again:"
            f" sweep invalidate --sweep {spec.name} --where \"state = 'measured'\" --yes"
        )
    if result.num_fingerprints > 1:
        note(
            "Its numbers were taken on more than one software stack or device; `sweep best` shows them apart. To have the older ones measured again:"
            f" sweep invalidate --sweep {spec.name} --where 'not is_current_fingerprint' --yes"
        )
    for cell, evidence in result.nothing_fits.items():
        note(
            f"Nothing fits in {cell.key}: {evidence}. More GPUs, a higher ZeRO stage, or full recomputation may; `sweep plan` shows what would."
        )
    stuck = [cell for cell, reason in result.stopped.items() if reason is StopReason.FAULTS]
    for cell in stuck:
        note(
            f"{cell.key} was stopped: its attempts failed again and again. `sweep trials {spec.name}` says how; the same"
            " command tries it again."
        )
    for cell in (
        cell
        for cell in result.nothing_feasible
        if cell not in result.nothing_fits and cell not in stuck
    ):
        if result.stopped[cell] in BUDGETS and not result.launched.get(cell, 0):
            note(
                f"Nothing was measured for {cell.key}: {result.stopped[cell]} before its first trial. A larger budget goes on with it."
            )
        elif result.stopped[cell] in BUDGETS:
            tried = counted(result.launched[cell], "trial")
            note(
                f"Nothing was measured for {cell.key}: {result.stopped[cell]} after {tried}; see `sweep trials {spec.name}`."
            )
        else:
            note(
                f"Nothing could be measured for {cell.key}: see `sweep trials {spec.name}`, and `sweep plan` for what is not legal and why."
            )
    for cell in result.unconfirmed:
        note(
            f"The best of {cell.key} was measured once: {result.stopped[cell]}, and nothing was left to confirm it."
        )


def _exit_code(result: SweepResult, signals: Signals, *, strict: bool) -> int:
    from orchestrator.core.errors import ClusterUnavailable
    from orchestrator.core.trial.lifecycle import TrialState
    from orchestrator.sweep.progress import StopReason

    if result.interrupted:
        return 128 + (signals.received or signal.SIGINT)
    if StopReason.NODES in result.stopped.values():
        return ClusterUnavailable.exit_code  # the same command goes on when there are enough again
    if result.nothing_feasible:
        return EXIT_NOTHING_FEASIBLE
    return EXIT_SOME_FAILED if strict and result.counts.get(TrialState.FAILED, 0) else 0


def _print(text: str) -> None:
    print(text)  # noqa: T201

"""One run of a sweep: connects spec, store, search, scheduler, progress and signals.

The functions import what they need, so that a call that is refused loads little of it.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import typer

from orchestrator import __version__
from orchestrator.cli.best import command as best
from orchestrator.cli.mirror.worker import MirrorWorker
from orchestrator.cli.ray_start import start_ray_scheduler
from orchestrator.cli.run import checks as run_checks
from orchestrator.cli.run.code_fingerprint import code_of, edits_of
from orchestrator.cli.run.ending import exit_code, print_ending
from orchestrator.cli.store import home
from orchestrator.cli.sweep_file import planned_hardware, replayed_table
from orchestrator.cli.terminal.console_log import Redactor
from orchestrator.cli.terminal.output import Format, note, write_error
from orchestrator.cli.terminal.signals import Signals
from orchestrator.core.trial.merit import Merit
from orchestrator.report.quantities import counted
from orchestrator.report.software_change import other_cells_than, software_changes

if TYPE_CHECKING:
    from db.store import Store
    from orchestrator.cli.run.notifier import Notifier
    from orchestrator.cli.run.progress import Progress
    from orchestrator.cluster.contract import Scheduler, Slots
    from orchestrator.cluster.simulated import SimulatedScheduler
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.problem.hardware import Hardware
    from orchestrator.core.search.space import CellSpaces
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.sweep.progress import Snapshot, SweepResult

# How long the database may not answer during a sweep: running trials continue meanwhile.
STORE_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `run` and `replay` on the command line."""

    db: str | None
    takeover: bool
    quiet: bool
    as_json: bool
    strict: bool = False
    ray_address: str | None = None
    # Removes secrets from messages to others; None: it knows only those of `notify`.
    redact: Callable[[str], str] | None = None
    # For a cluster that is still too small.
    wait_seconds: float | None = None
    simulator: SimulatedScheduler | None = None
    # The sweep whose measurements are taken over.
    reused: str | None = None


def run_spec(spec: SweepSpec, options: RunOptions) -> NoReturn:
    """Run a sweep, print its best layouts, and end with the exit code for how it went."""
    from orchestrator.core.search.space import CellSpaces
    from orchestrator.core.sweepfile.budget import budget_of, price_of

    for remark in spec.remarks():
        note(remark)
    table = replayed_table(spec)
    environment, secrets = run_checks.rank_environment(spec), run_checks.rank_secrets(spec)
    spaces = CellSpaces(spec, lambda cell: table.layouts(cell) if table is not None else None)
    if options.ray_address is None and table is None and options.simulator is None:
        # On a cluster, the price follows from its devices.
        budget_of(spec, price_of(spec, planned_hardware(spec)))
        run_checks.check_this_machine(spec)
        run_checks.check_program(spec)
    run_checks.check_some_layout_is_legal(spec, spaces)
    not_passed = None
    if table is None and options.simulator is None:
        not_passed = run_checks.values_not_passed(spec, spaces)
        if not_passed is not None:
            note(f"warning: {not_passed}")
    run_checks.check_that_ray_keeps_it(options.db)
    run_checks.check_home()
    from db.store import Store
    from orchestrator.cli.run.notifier import notifier_of, secrets_of  # http.client, ssl
    from orchestrator.cli.run.progress import Progress

    redact = options.redact or Redactor([], values=secrets_of(spec))
    with (
        Store.open(options.db, patience_seconds=STORE_PATIENCE_SECONDS) as store,
        Progress(objective=spec.ranked_by, quiet=options.quiet) as progress,
        Signals(progress.note) as signals,
        notifier_of(spec, redact) as notifier,
        # A simulation measures nothing.
        MirrorWorker(
            spec.mirror if options.simulator is None else None, spec.name, options.db, note
        ),
    ):
        call = _SweepRun(
            spec=spec,
            options=options,
            table=table,
            spaces=spaces,
            not_passed=not_passed,
            environment=environment,
            secrets=secrets,
            store=store,
            progress=progress,
            signals=signals,
            notifier=notifier,
        )
        result = call.result()
        where = store.url
        cells = [cell.key for cell in spec.cells()]
        if not other_cells_than(cells, store, result.sweep_id):
            cells = []
        changes = software_changes(
            store,
            result.sweep_id,
            spec.name,
            across_cells=True,
            cells=cells,
            code=partial(code_of, spec, table),
        )
    # A sweep with objectives besides speed ends with its front.
    pareto = spec.merits != (Merit.SPEED,)
    if options.as_json:
        best.show_best(spec.name, pareto=pareto, format=Format.JSON, db=options.db)
    else:
        print_ending(
            spec,
            result,
            where,
            signals.received,
            strict=options.strict,
            changes=changes,
            cells=cells,
        )
        best.show_best(
            spec.name, top=3, pareto=pareto, format=Format.TABLE, db=options.db, stands_alone=False
        )
    raise typer.Exit(exit_code(result, signals.received, strict=options.strict))


@dataclass(frozen=True, kw_only=True)
class _SweepRun:
    """One call of `sweep run` whose store is open."""

    spec: SweepSpec
    options: RunOptions
    table: ReplayTable | None
    spaces: CellSpaces
    # What varies and may not reach the program, with the fix.
    not_passed: str | None
    environment: dict[str, str]  # of ranks, without secrets
    secrets: dict[str, str]
    store: Store
    progress: Progress
    signals: Signals
    notifier: Notifier

    def result(self) -> SweepResult:
        """Run the sweep, unless an earlier call has finished it."""
        from orchestrator.sweep.finished import finished_before

        num_sweeps = len(self.store.sweeps())
        at = f"store at {self.store.url}: no sweep yet"
        if num_sweeps:
            at = f"store at {self.store.url}: {counted(num_sweeps, 'sweep')}"
        ray_address = self.options.ray_address
        # A replayed table answers at once, and may have changed.
        if self.options.reused is not None:
            # Before a cluster is asked for.
            self.store.sweep_named(self.options.reused)
        if self.table is None and self.options.reused is None:
            finished = finished_before(
                self.spec,
                self.store,
                code=partial(code_of, self.spec, None),
                program_version=__version__,
                this_host=socket.gethostname() if ray_address is None else None,
            )
            if finished is not None:
                self.progress.say(at)
                return finished
        if self.options.wait_seconds is not None and ray_address is not None:
            self._wait_for_nodes(ray_address, self.options.wait_seconds)

        def open_scheduler() -> Scheduler:
            # Only now: a call that does not get the sweep prints that error and nothing else.
            self.progress.say(at)
            self._say_new_cells()
            scheduler = self._open_scheduler()
            self.signals.defer()
            return scheduler

        return self._measure(open_scheduler)

    def _say_new_cells(self) -> None:
        """Say which cells a changed global batch adds to the sweep."""
        from orchestrator.core.problem.cell import other_batches

        name = self.spec.name
        stored = [row.cell for row in self.store.cells(self.store.sweep_named(name).id)]
        for new, old in other_batches(self.spec.cells(), stored):
            self.progress.say(
                f"{new.key} is a new cell of sweep {name}. It has another global batch than"
                f" {old.key}, so layouts of the two cells are not compared with each other"
            )

    def _wait_for_nodes(self, ray_address: str, seconds: float) -> None:
        from orchestrator.cluster.ray.cluster import await_nodes  # ray takes seconds to import
        from orchestrator.core.machines.packing import Shape
        from orchestrator.core.trial.protocol import Device

        def gave_up() -> bool:
            # Ray has put a handler of its own in place.
            self.signals.install()
            return self.signals.received is not None

        spec = self.spec
        assert isinstance(spec.gpus_per_node, int)
        largest = Shape.of(max(spec.gpus), gpus_per_node=spec.gpus_per_node)
        nodes = counted(largest.num_nodes, "node")
        slots = counted(largest.slots_per_node, "slot")
        self.progress.say(f"Waiting up to {seconds:.0f} s for {nodes} with {slots} each ...")
        device = Device.CPU if spec.device == "cpu" else Device.CUDA
        if not await_nodes(ray_address, largest, device, patience_seconds=seconds, give_up=gave_up):
            raise typer.Exit(128 + (self.signals.received or signal.SIGINT))

    def _measure(self, open_scheduler: Callable[[], Scheduler]) -> SweepResult:
        from orchestrator.core.errors import ClusterUnavailable, StoreUnavailable, SweepError
        from orchestrator.sweep.notices import Notices
        from orchestrator.sweep.run import run_sweep  # optuna takes 0.5 s to import

        spec, table, simulator = self.spec, self.table, self.options.simulator
        notices = Notices(spec.name, spec.ranked_by, is_simulated=simulator is not None)

        def observe(snapshot: Snapshot) -> None:
            self.progress.show(snapshot)
            for notice in notices.of_snapshot(snapshot):
                self.notifier.send(notice)

        # What was imported stays, and a search of it for garbage takes a twentieth of a second.
        gc.freeze()
        try:
            # Ray prints to stdout that a node is dead; stdout is for the answer.
            with redirect_stdout(sys.stderr):
                result = run_sweep(
                    spec,
                    store=self.store,
                    open_scheduler=open_scheduler,
                    # Before the code is read, so that no edit is missed.
                    edited=edits_of(spec) if simulator is None and table is None else None,
                    code=code_of(spec, table),
                    hardware=lambda slots: _hardware(spec, slots),
                    clock=simulator.clock if simulator is not None else time.monotonic,
                    stop=self.signals.asked,
                    observe=observe,
                    takeover=self.options.takeover,
                    spaces=self.spaces,
                    run_root=home.run_root,
                    reused=self.options.reused,
                    not_passed=self.not_passed,
                )
        except SweepError as exc:
            self.notifier.send(notices.of_error(exc), is_last=True)
            number = self.signals.received
            if number is None or not isinstance(exc, (ClusterUnavailable, StoreUnavailable)):
                raise
            # The signal reached the whole process group, and so ended Ray with us: a stop, no
            # failure.
            note(f"Stopped by signal {number}: {exc}")
            if self.options.as_json:
                write_error("interrupted", str(exc), 128 + number)
            raise typer.Exit(128 + number) from None
        self.notifier.send(notices.of_result(result), is_last=True)
        return result

    def _open_scheduler(self) -> Scheduler:
        spec, table, simulator = self.spec, self.table, self.options.simulator
        if simulator is not None:
            sizes = simulator.slots.by_size
            nodes = f"{counted(len(sizes), 'node')} of {sizes[0]} {spec.device}"
            self.progress.say(f"Simulated, on a clock of its own: {nodes}. Nothing is measured")
            return simulator
        if table is not None:
            from orchestrator.cluster.replayed import (
                RayReplayScheduler,
                ReplayScheduler,
                goes_through_ray,
            )

            if not goes_through_ray(spec):
                return ReplayScheduler(spec, table)
        scheduler = start_ray_scheduler(
            self.options.ray_address,
            root=home.run_root(self.store.sweep_named(spec.name).run_folder),
            device=spec.device if table is None else "cpu",
            gpus_per_node=spec.gpus_per_node if table is None else None,
            rank_environment=self.environment,
            rank_secrets=self.secrets,
            say=self.progress.say,
        )
        # After Ray, which installs a handler of its own.
        self.signals.install()
        return scheduler if table is None else RayReplayScheduler(spec, table, scheduler)


def _hardware(spec: SweepSpec, slots: Slots) -> Hardware | None:
    from orchestrator.core.problem.hardware import DEVICES, from_driver_name
    from orchestrator.core.trial.protocol import Device

    if slots.device is Device.CPU:
        return None
    if spec.device in DEVICES:
        return DEVICES[spec.device]
    # Ray's name of a device often does not tell its variants apart; this machine's driver does.
    known = from_driver_name(slots.device_name) if slots.device_name else None
    return known or planned_hardware(spec)

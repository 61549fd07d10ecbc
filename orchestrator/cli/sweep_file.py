"""The start of every command about a sweep file: read it, find its device and prior knowledge.

Starts and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.terminal import surroundings
from orchestrator.report.quantities import counted, duration

if TYPE_CHECKING:
    from db.read.rows import SweepRow
    from db.store_reads import StoreReads
    from orchestrator.core.physics.calibration import Calibration
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.hardware import Hardware
    from orchestrator.core.problem.layout import Options
    from orchestrator.core.search.calculator import Calculator
    from orchestrator.core.search.planner import CellPlan
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.sweep.prior_knowledge import PriorKnowledge

# Servers with the devices of `core/problem/hardware.py` have as many: for plans without a cluster.
GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Planning:
    """A sweep file with what is known of its device, and what other trials tell about it."""

    spec: SweepSpec
    # As the file or this machine's driver names it; None for cores, or an unknown device.
    hardware: Hardware | None
    gpus_per_node: int
    knowledge: PriorKnowledge
    # How this machine's driver calls its GPUs; None: there are none, or the file names the device.
    device_name: str | None
    table: ReplayTable | None = None  # the table that a replay searches

    def calibration(self, cell: Cell, options: Options = ()) -> Calibration:
        """The constants that predict the layouts of a cell with these options."""
        from orchestrator.core.search.planner import adapted, trainer_of

        device = self.knowledge.device
        own = trainer_of(self.spec, device=device)
        wanted = trainer_of(self.spec, options, device=device)
        return adapted(self.knowledge.calibration(cell), own, wanted)

    def plan(self, cell: Cell) -> CellPlan:
        from orchestrator.core.search.planner import plan_cell

        return plan_cell(
            self.spec,
            cell,
            hardware=self.knowledge.hardware,
            gpus_per_node=self.gpus_per_node,
            device=self.knowledge.device,
            calibration=self.calibration(cell),
            among=self.table.layouts(cell) if self.table is not None else None,
        )

    def calculator(self, cell: Cell) -> Calculator:
        """The calculator of a cell, which predicts also what the file's axes do not name."""
        from orchestrator.core.search.calculator import Calculator

        return Calculator(
            spec=self.spec,
            planned=self.plan(cell),
            # A fit of the model's memory, made once for each choice of options.
            calibration=cache(partial(self.calibration, cell)),
            hardware=self.knowledge.hardware,
            gpus_per_node=self.gpus_per_node,
        )

    @property
    def on_cores(self) -> bool:
        """True if the sweep runs on processor cores."""
        from orchestrator.core.trial.protocol import Device

        return self.knowledge.device is Device.CPU

    @property
    def device(self) -> str:
        """The device by its data sheet, or as its driver calls it; `cpu` for unmeasured cores."""
        hardware = self.knowledge.hardware
        return hardware.name if hardware is not None else self.device_name or "cpu"

    @property
    def why_no_times(self) -> str:
        """Why the speed of the device is unknown, and how to make it known."""
        why, it, it_is = "the device is unknown", "it", "it is"
        if self.on_cores:
            why, it, it_is = "cores have no data sheet", "them", "they are"
        fix = "its first trials tell"
        if self.spec.workload.name == "command":
            fix = (
                'have the program write peak_flops, peak_flops_source (beginning with "measured: ")'
                " and stack with device_name in its result"
            )
        if self.spec.device != "cpu":
            name_it = "for GPUs of another machine name them" if self.on_cores else "name it"
            fix = f"{name_it} in the sweep file (device: h100-sxm) or {fix}"
        if self.knowledge.num_unplaced:
            ran = counted(self.knowledge.num_unplaced, "trial")
            return (
                f"{why}; {ran} of this workload ran on {it}, and none says how fast {it_is}: {fix}"
            )
        return f"{why}, and nothing of this workload was measured on {it} yet: {fix}"

    @property
    def based_on(self) -> str:
        """Describe what the predictions are based on."""
        from orchestrator.sweep.prior_knowledge import sweeps_of

        if self.knowledge.hardware is None:
            return f"uncalibrated, no times predicted: {self.why_no_times}"
        rows = self.knowledge.rows
        if not rows:
            return (
                "uncalibrated: data sheets and usual constants only, so bands are wide until"
                " something is measured"
            )
        sweeps = [f"{name} ({count})" for name, count in sweeps_of(rows).items()]
        names = ", ".join(sweeps[:4]) + (", ..." if len(sweeps) > 4 else "")
        return f"calibrated by {len(rows):,} trials of {names}"


def planning(spec: SweepSpec, store: StoreReads | None) -> Planning:
    """Collect what is known of a sweep's device, and the prior knowledge in the store."""
    from orchestrator.core.trial.protocol import Device
    from orchestrator.node.gpu_monitor import device_name
    from orchestrator.sweep import prior_knowledge

    hardware = planned_hardware(spec)
    per_node = assumed_gpus_per_node(spec)
    name = device_name() if spec.device == "auto" else None
    on_cores = spec.device == "cpu" or (spec.device == "auto" and name is None)
    return Planning(
        spec=spec,
        hardware=hardware,
        gpus_per_node=per_node,
        knowledge=prior_knowledge.read_prior_knowledge(
            store,
            spec,
            hardware,
            device=Device.CPU if on_cores else Device.CUDA,
            device_name=name,
            gpus_per_node=per_node,
        ),
        device_name=name,
        table=replayed_table(spec),
    )


def assumed_gpus_per_node(spec: SweepSpec) -> int:
    """The size of a node as the file says, else a usual one."""
    from orchestrator.core.problem.hardware import DEVICES
    from orchestrator.node.gpu_monitor import device_name

    if isinstance(spec.gpus_per_node, int):
        return spec.gpus_per_node
    has_gpus = spec.device != "cpu" and (spec.device in DEVICES or device_name() is not None)
    return GPUS_PER_NODE if has_gpus else os.cpu_count() or 1


def replayed_table(spec: SweepSpec) -> ReplayTable | None:
    """The table of a sweep of workload replay; None for any other workload.

    Raises UsageInvalid if sweep and table do not match.
    """
    if spec.workload.name != "replay":
        return None
    from orchestrator.cluster.replayed import table_of

    return table_of(spec)


def limit_warnings(known: Planning) -> list[str]:
    """A line for each cell and numeric time limit that a predicted step comes near."""
    from orchestrator.core.trial.protocol import LimitName

    of_steps = {LimitName.FIRST_STEP, LimitName.STEADY, LimitName.TOTAL}
    if known.table is not None or of_steps.isdisjoint(known.spec.measurement.limits.numbers):
        return []
    return [
        line for cell in known.spec.cells() for line in cell_limit_warnings(known, known.plan(cell))
    ]


def cell_limit_warnings(known: Planning, planned: CellPlan) -> list[str]:
    """The same for one cell: the best layout near a limit, how many there are, what to set."""
    from orchestrator.core.sweepfile.workload_section import compiles_layers
    from orchestrator.core.trial.limits import PredictedStep, longest_safe_step, resolve_limits
    from orchestrator.core.trial.protocol import Device, LimitName

    candidates, cell, measuring = planned.candidates, planned.space.cell, known.spec.measurement
    log_sd = candidates.step_log_sd() if known.table is None and measuring.limits.numbers else None
    if log_sd is None:
        return []
    fitting = candidates.order[candidates.fits[candidates.order]]
    # Limits follow its number of steps, which no device changes.
    plan = measuring.plan(Device.CUDA)
    lines = []
    for name, seconds in measuring.limits.numbers.items():
        safe = longest_safe_step(name, seconds, plan=plan, log_sd=log_sd)
        near = fitting[candidates.step_seconds[fitting] > safe] if safe is not None else fitting[:0]
        if not len(near):
            continue
        first = PredictedStep(seconds=float(candidates.step_seconds[near[0]]), log_sd=log_sd)
        slowest = PredictedStep(seconds=float(candidates.step_seconds[near].max()), log_sd=log_sd)
        layout = candidates.table.layout(int(near[0]))
        auto = resolve_limits(
            dict.fromkeys(LimitName),
            plan=plan,
            num_ranks=cell.num_gpus,
            predicted=slowest,
            compiles=compiles_layers(
                known.spec.workload, layout.options, on_gpu=not known.on_cores
            ),
        )
        others = ""
        if len(near) > 1:
            others = f" (and {len(near) - 1:,} more of {len(fitting):,} layouts that should fit)"
        lines.append(
            f"{cell.key}: measurement.limits.{name} is {duration(seconds)}, and a step of"
            f" {layout.short} is predicted to take {first.seconds:.3g} s"
            f" and may well take {first.longest_seconds:.3g} s{others}: they may end as hung."
            f" Write auto, or at least {getattr(auto, name):.0f} seconds"
        )
    return lines


@contextmanager
def store_if_any(db: str | None) -> Iterator[StoreReads | None]:
    """Open the store to get prior knowledge; None if there is none yet. Creates no file."""
    from db.connection import url

    resolved = url.resolve(db)
    file = Path(str(resolved.database))
    if resolved.drivername == "sqlite" and not file.is_file():
        yield None
        return
    from db.connection.sqlite_file import can_be_written
    from db.store_reads import StoreReads

    # An empty file or database gets its tables; a file that we may not write is only read.
    to_read = resolved.drivername == "sqlite" and not can_be_written(file)
    with StoreReads.open(db, to_read=to_read) as store:
        yield store


def load(file: Path, overrides: list[str] | None) -> SweepSpec:
    """Read a sweep file.

    Raises SpecInvalid with every mistake, and UsageInvalid if the file cannot be read.
    """
    from orchestrator.core.errors import SpecInvalid, UsageInvalid
    from orchestrator.core.sweepfile.spec_yaml import load
    from orchestrator.core.sweepfile.yaml_document import MAX_BYTES
    from orchestrator.node.text_file import TooLarge, read_text

    try:
        text = read_text(file, most_bytes=MAX_BYTES)
    except FileNotFoundError as exc:
        gone = None if file.is_absolute() else surroundings.explain(exc)
        raise gone or UsageInvalid(f"no sweep file {file}{_hint(file)}") from None
    except UnicodeDecodeError as exc:
        raise SpecInvalid(f"{file}: not UTF-8 text: {exc.reason} at byte {exc.start}") from None
    except TooLarge:
        raise SpecInvalid(
            f"{file}: larger than {MAX_BYTES >> 10} KiB, which no sweep file is"
        ) from None
    except OSError as exc:
        raise UsageInvalid(f"cannot read {file}: {exc.strerror}") from None
    if not text and file.is_fifo():
        raise UsageInvalid(
            f"{file} is a pipe that nobody writes to: name a file, or let a command write into the"
            " pipe, as in <(command)"
        )
    return load(text, source=str(file), overrides=overrides or ())


def stored_spec(row: SweepRow) -> SweepSpec:
    """The file of a sweep's last run, with the name that the sweep has now.

    Raises UsageInvalid if this version cannot read it.
    """
    from pydantic import ValidationError

    from orchestrator.core.errors import UsageInvalid
    from orchestrator.core.sweepfile.spec import SweepSpec

    try:
        return SweepSpec.model_validate_json(row.spec_json).model_copy(update={"name": row.name})
    except ValidationError as exc:
        raise UsageInvalid(
            f"sweep {row.name} was begun by another version of this program, and its stored sweep"
            f" file has {counted(exc.error_count(), 'mistake')} now: run `sweep run FILE` with its"
            " sweep file, which stores it anew, then give this command again"
        ) from None


def _hint(file: Path) -> str:
    """The sweep file that was probably meant, or those that there are."""
    folders = (file.parent, Path("sweeps"))
    files = sorted({str(path) for folder in folders for path in folder.glob("*.y*ml")})
    close = get_close_matches(str(file), files, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(files)}" if files else ""


def planned_hardware(spec: SweepSpec) -> Hardware | None:
    """The device that the file names, or this machine's; None if it has no data sheet here."""
    from orchestrator.core.problem.hardware import DEVICES, from_driver_name
    from orchestrator.node.gpu_monitor import device_name

    if spec.device == "auto":
        name = device_name()
        return from_driver_name(name) if name is not None else None
    return DEVICES.get(spec.device)

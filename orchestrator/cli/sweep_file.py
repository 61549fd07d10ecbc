"""What every command about a sweep file begins with: the file read, the device that it is planned for, what the store knows of it.

Starts and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.report.quantities import counted

if TYPE_CHECKING:
    from db.store import Store
    from orchestrator.core.physics.calibration import Calibration
    from orchestrator.core.pretend.replay import ReplayTable
    from orchestrator.core.problem.cell import Cell
    from orchestrator.core.problem.hardware import Hardware
    from orchestrator.core.problem.layout import Options
    from orchestrator.core.search.planner import CellPlan
    from orchestrator.core.sweepfile.spec import SweepSpec
    from orchestrator.sweep.prior_knowledge import PriorKnowledge

GPUS_PER_NODE = 8  # of the servers that the devices in core.hardware are sold in; for planning without a cluster

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The sweep file (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="In place of the file's own, e.g. search.max_trials=10 gpus=8",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Planning:
    """A sweep file with what is known of its device and of its relatives."""

    spec: SweepSpec
    hardware: (
        Hardware | None
    )  # as the file, or this machine's driver, names it; None: processor cores, or an unknown device
    gpus_per_node: int
    learned: PriorKnowledge
    table: ReplayTable | None = None  # that is replayed

    def calibration(self, cell: Cell, options: Options = ()) -> Calibration:
        """What predicts the layouts of a cell that have these options: its relatives' trials, and its own."""
        from orchestrator.core.search.planner import adapted, trainer_of

        return adapted(
            self.learned.calibration(cell), trainer_of(self.spec), trainer_of(self.spec, options)
        )

    def plan(self, cell: Cell) -> CellPlan:
        from orchestrator.core.search.planner import plan_cell

        return plan_cell(
            self.spec,
            cell,
            hardware=self.learned.hardware,
            gpus_per_node=self.gpus_per_node,
            calibration=self.calibration(cell),
            among=self.table.layouts(cell) if self.table is not None else None,
        )

    @property
    def why_no_times(self) -> str:
        """Why nothing is known of the device, and what would tell."""
        named = (
            [] if self.spec.device == "cpu" else ["name it in the sweep file (device: h100-sxm)"]
        )
        is_ours = self.spec.workload.name != "command"
        told = " or ".join(
            [
                *named,
                "its first trials tell"
                if is_ours
                else "have the program tell peak_flops in its result",
            ]
        )
        if self.learned.num_unplaced:
            ran = counted(self.learned.num_unplaced, "trial")
            return f"the device is unknown; {ran} of this workload ran on it, and none says how fast it is: {told}"
        return f"the device is unknown, and nothing of this workload was measured on it yet: {told}"

    @property
    def based_on(self) -> str:
        """What the predictions rest on, for people."""
        from orchestrator.sweep.prior_knowledge import sweeps_of

        if self.learned.hardware is None:
            return f"uncalibrated, no times predicted: {self.why_no_times}"
        if not self.learned.rows:
            return "uncalibrated: data sheets and usual constants only, so bands are wide until something is measured"
        found = sweeps_of(self.learned.rows)
        names = ", ".join(f"{name} ({count})" for name, count in list(found.items())[:4])
        return f"calibrated by {len(self.learned.rows):,} trials of {names}{', ...' if len(found) > 4 else ''}"


def planning(spec: SweepSpec, store: Store | None) -> Planning:
    """Find out what is known of a sweep's device and relatives."""
    from orchestrator.node.gpu_monitor import device_name
    from orchestrator.sweep.prior_knowledge import read_prior_knowledge

    hardware = planned_hardware(spec)
    has_gpus = spec.device != "cpu" and (hardware is not None or device_name() is not None)
    name = device_name() if spec.device == "auto" else None
    per_node = (
        spec.gpus_per_node
        if isinstance(spec.gpus_per_node, int)
        else GPUS_PER_NODE
        if has_gpus
        else os.cpu_count() or 1
    )
    known = read_prior_knowledge(store, spec, hardware, device_name=name, gpus_per_node=per_node)
    return Planning(
        spec=spec,
        hardware=hardware,
        gpus_per_node=per_node,
        learned=known,
        table=replayed_table(spec),
    )


def replayed_table(spec: SweepSpec) -> ReplayTable | None:
    """The table that a sweep of workload replay runs on; None for any other. Raises UsageInvalid where they do not go together."""
    if spec.workload.name != "replay":
        return None
    from orchestrator.cluster.replayed import table_of

    return table_of(spec)


def limit_warnings(known: Planning) -> list[str]:
    """Where a predicted step comes near a time limit that is a number: a line for each cell and limit."""
    from orchestrator.core.trial.protocol import LimitName

    of_steps = {LimitName.FIRST_STEP, LimitName.STEADY, LimitName.TOTAL}
    if known.table is not None or of_steps.isdisjoint(known.spec.measurement.limits.numbers):
        return []
    return [
        line for cell in known.spec.cells() for line in limit_warnings_of(known, known.plan(cell))
    ]


def limit_warnings_of(known: Planning, planned: CellPlan) -> list[str]:
    """The same of one cell: the best of the layouts that should fit and pass near a limit, how many they are, and what to set."""
    from orchestrator.core.trial.limits import PredictedStep, longest_safe_step, resolve_limits
    from orchestrator.core.trial.protocol import LimitName
    from orchestrator.report import quantities as show

    candidates, cell, measuring = planned.candidates, planned.space.cell, known.spec.measurement
    log_sd = candidates.step_log_sd() if known.table is None and measuring.limits.numbers else None
    if log_sd is None:
        return []
    fitting = candidates.order[candidates.fits[candidates.order]]
    lines = []
    for name, seconds in measuring.limits.numbers.items():
        safe = longest_safe_step(name, seconds, plan=measuring.plan, log_sd=log_sd)
        near = fitting[candidates.step_seconds[fitting] > safe] if safe is not None else fitting[:0]
        if not len(near):
            continue
        first = PredictedStep(seconds=float(candidates.step_seconds[near[0]]), log_sd=log_sd)
        slowest = PredictedStep(seconds=float(candidates.step_seconds[near].max()), log_sd=log_sd)
        auto = resolve_limits(
            dict.fromkeys(LimitName),
            plan=measuring.plan,
            num_ranks=cell.num_gpus,
            predicted=slowest,
        )
        others = (
            f" (and {len(near) - 1:,} more of {len(fitting):,} layouts that should fit)"
            if len(near) > 1
            else ""
        )
        lines.append(
            f"{cell.key}: measurement.limits.{name} is {show.duration(seconds)}, and a step of {candidates.table.layout(int(near[0])).short}"
            f" is predicted to take {first.seconds:.3g} s, {first.longest_seconds:.3g} s at most{others}: they may end as hung. Write auto,"
            f" or at least {getattr(auto, name):.0f}"
        )
    return lines


@contextmanager
def store_if_any(db: str | None) -> Iterator[Store | None]:
    """The store to learn from; None where there is none yet: looking makes no file."""
    from db.connection import url

    resolved = url.resolve(db)
    if resolved.drivername == "sqlite" and not Path(str(resolved.database)).is_file():
        yield None
        return
    from db.connection.sqlite_file import can_be_written
    from db.store import Store

    # An empty file or database gets its tables; what only others may write is read as it is.
    to_read = resolved.drivername == "sqlite" and not can_be_written(Path(str(resolved.database)))
    with Store.open(db, to_read=to_read) as store:
        yield store


def load(file: Path, overrides: list[str] | None) -> SweepSpec:
    """The sweep that a file means. Raises SpecInvalid with every mistake, UsageInvalid where there is no such file."""
    from orchestrator.core.errors import SpecInvalid, UsageInvalid
    from orchestrator.core.sweepfile.spec_yaml import load
    from orchestrator.core.sweepfile.yaml_document import MAX_BYTES
    from orchestrator.node.text_file import TooLarge, read_text

    try:
        text = read_text(file, most_bytes=MAX_BYTES)
    except FileNotFoundError:
        here = sorted(
            {
                str(path)
                for folder in (file.parent, Path("sweeps"))
                for path in folder.glob("*.y*ml")
            }
        )
        close = get_close_matches(str(file), here, n=1)
        hint = (
            f"; did you mean {close[0]}?"
            if close
            else f"; here are {', '.join(here)}"
            if here
            else ""
        )
        raise UsageInvalid(f"no sweep file {file}{hint}") from None
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
            f"{file} is a pipe that nobody writes to: name a file, or have the pipe written, as in <(command)"
        )
    return load(text, source=str(file), overrides=overrides or ())


def planned_hardware(spec: SweepSpec) -> Hardware | None:
    """The device that the file names, or this machine's; None where no data sheet is known of it."""
    from orchestrator.core.problem.hardware import DEVICES, from_driver_name
    from orchestrator.node.gpu_monitor import device_name

    if spec.device == "auto":
        name = device_name()
        return from_driver_name(name) if name is not None else None
    return DEVICES.get(spec.device)

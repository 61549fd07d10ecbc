"""How far a sweep is and how it ended, as values: what the loop says to whoever watches it, and what they ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from orchestrator.core.cell import Cell
from orchestrator.core.layout import Layout
from orchestrator.core.lifecycle import TrialState
from orchestrator.core.protocol import Phase


class Stop(IntEnum):
    """What somebody outside asks of the loop."""

    GO_ON = 0
    DRAIN = 1  # start nothing new, let what runs finish
    CANCEL = 2  # end what runs, now


class StopReason(StrEnum):
    EXHAUSTED = "every layout is known"
    TRIALS = "max_trials reached"
    GPU_HOURS = "max_gpu_hours reached"
    COST = "max_cost reached"
    WALL_TIME = "max_wall_time reached"
    PLATEAU = "plateau: no more gain"
    NODES = "the nodes that are left cannot hold its gangs"
    BOUND = "bound reached: no layout is expected to gain that much"
    NOTHING_FITS = "nothing fits"
    INTERRUPTED = "interrupted"
    BEFORE = "nothing was left to do"  # an earlier call had finished it


BUDGETS = frozenset({StopReason.GPU_HOURS, StopReason.COST, StopReason.WALL_TIME})


@dataclass(frozen=True, kw_only=True)
class Running:
    """One attempt under way, for whoever watches."""

    trial_id: int
    cell: Cell
    layout: Layout
    phase: Phase | None
    step: int
    since: float  # by the loop's clock


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How far a sweep is: what a progress display needs, and nothing else."""

    sweep: str
    counts: Mapping[TrialState, int]  # of this sweep in the store, all orchestrators
    untried: int
    launched_now: int  # trials finished by this call
    running: Sequence[Running]
    best: Mapping[Cell, tuple[Layout, float]]  # objective value
    gpu_seconds: float  # held by all calls, idle leases included
    seconds: float  # since this call began
    ended: Sequence[str]  # a line for each trial that ended since the last snapshot: what became of it


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """How a call of `run_sweep` ended."""

    sweep_id: int
    counts: Mapping[TrialState, int]
    stopped: Mapping[Cell, StopReason]
    interrupted: bool
    nothing_feasible: Sequence[Cell]  # cells of which nothing was measured, whether their trials ended so or a budget came before them
    nothing_fits: Mapping[Cell, str]  # of these, those of which nothing can: the evidence
    tied: Mapping[Cell, Sequence[Layout]]  # that share the first place of a cell, fastest first: one alone is the winner
    num_fingerprints: int  # distinct ones among what was measured
    launched: Mapping[Cell, int] = field(default_factory=dict)  # trials of each cell, by all calls
    unconfirmed: Sequence[Cell] = ()  # cells whose best was measured once, since a budget left nothing to repeat it
    code_has_changed: bool = False  # since what was measured, and nothing was measured again

    @property
    def finished(self) -> bool:
        """Nothing is left to do without a wider axis or budget."""
        return not self.interrupted and not {StopReason.WALL_TIME, StopReason.NODES} & set(self.stopped.values())

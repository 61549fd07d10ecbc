"""Section `measurement` of a sweep file: how steps are timed, with the limits of each phase."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from orchestrator.core.sweepfile.spec_values import (
    FLAG_TAKES,
    Duration,
    Flag,
    OrAuto,
    Section,
    key,
    whole,
)
from orchestrator.core.trial.protocol import Device, LimitName, MeasurementPlan

# A node reboots, or is replaced, within ten minutes. 64 nodes that wait so long cost 128 GPU-hours.
WAIT_FOR_NODES_SECONDS = 900.0
# What `auto` asks of a GPU, whose power and clock settle within seconds: of the warm-up, of the
# timed steps, and of those that confirm the best.
GPU_WARMUP_SECONDS, GPU_SECONDS, GPU_CONFIRMING_SECONDS = 2.0, 5.0, 10.0
_LIMIT = "`auto`, duration"


class Limits(Section):
    """Seconds that a rank may spend in each phase; see core/trial/limits.py for `auto`."""

    start: Annotated[
        OrAuto[Duration],
        key(_LIMIT, "From the start of the process to the workload's `main`. `auto`: 120 s"),
    ] = "auto"
    rendezvous: Annotated[
        OrAuto[Duration],
        key(_LIMIT, "Process group, model and optimizer. `auto`: 120 s + 0.5 s per rank"),
    ] = "auto"
    first_step: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The first optimizer step, with compilation."
            " `auto`: 300 s + 5 times the predicted step,"
            " and 300 s more if workload llama compiles its layers",
        ),
    ] = "auto"
    steady: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "Each later step. `auto`: the longest of 60 s, 5 times the predicted step,"
            " and 5 times the slowest step so far",
        ),
    ] = "auto"
    teardown: Annotated[
        OrAuto[Duration], key(_LIMIT, "After the result is written. `auto`: 20 s")
    ] = "auto"
    total: Annotated[
        OrAuto[Duration],
        key(
            _LIMIT,
            "The whole attempt. `auto`: 1800 s, or if that is longer, the other phases plus"
            " twice the time of `warmup_steps` + `max_steps` steps",
        ),
    ] = "auto"

    @property
    def asked(self) -> dict[LimitName, float | None]:
        """The seconds that the file gives; None for `auto`."""
        given = {name: getattr(self, name) for name in LimitName}
        return {name: None if value == "auto" else value for name, value in given.items()}

    @property
    def numbers(self) -> dict[LimitName, float]:
        """Only the limits that the file gives."""
        return {name: value for name, value in self.asked.items() if value is not None}


class Exclusive(StrEnum):
    NONE = "none"  # small gangs may share a node
    # Gangs on one node share the host's memory bandwidth, its cores and its network cards.
    NODE = "node"


class Profiled(StrEnum):
    NONE = "none"
    WINNERS = "winners"


class Measuring(Section):
    """How steps are timed: warm-up first, then steps until their median is known well enough."""

    OMITTED_DEFAULTS = frozenset(
        {"exclusive", "min_seconds", "preflight", "wait_for_nodes", "profile"}
    )

    # A layout fits if two steps do: the first one creates the optimizer states.
    warmup_steps: Annotated[
        int, whole(2, 1000), key("number, at least 2", "First steps, which are not timed")
    ] = 3
    min_steps: Annotated[
        int,
        whole(2, 1000),
        key("number, at least 2", "Fewest timed steps. A confidence interval needs 6"),
    ] = 5
    max_steps: Annotated[
        int,
        whole(2, 10_000),
        key(
            "number",
            "Most timed steps; more if they took less than `min_seconds`. A program of workload"
            " `command` runs no more than this",
        ),
    ] = 50
    min_seconds: Annotated[
        OrAuto[Annotated[float, Field(strict=True, ge=0, le=3600)]],
        key(
            "`auto`, a number",
            "Seconds that the timed steps take together, at least. If more than 0, the steps must"
            " also show no [trend](measuring.md#a-device-that-settles). `auto`: on GPUs 5, and 10"
            " for repeats that confirm the best; on CPUs 0",
        ),
    ] = "auto"
    precision: Annotated[
        float,
        Field(strict=True, gt=0, lt=1),
        key(
            "fraction",
            "Stop when half the width of the 99 % confidence interval of the median step time,"
            " divided by the median, is at most this. The 95 % interval, which is reported, is"
            " narrower. If even that is wider than this at the end, the number is marked with `?`",
        ),
    ] = 0.02
    limits: Annotated[Limits, key("section", "Time limits: [limits](#limits)")] = Limits()
    exclusive: Annotated[
        Exclusive,
        key(
            "`none`, `node`",
            "`node`: a gang shares its nodes with no other gang, for less noise. `none`: gangs"
            " smaller than a node may share one; column `shared_nodes` of an attempt shows it",
        ),
    ] = Exclusive.NONE
    preflight: Annotated[
        Flag,
        key(
            FLAG_TAKES,
            "Check each node before its first trial; skip unfit nodes: [nodes](nodes.md)",
        ),
    ] = True
    wait_for_nodes: Annotated[
        Duration,
        key(
            "duration",
            "If nodes are lost and the remaining ones are too few for a cell, how long that cell"
            " waits for nodes to come back or be replaced, counted from the last loss. Other"
            " cells continue. After that, the command ends with exit code 75. For nodes that are"
            " missing at the start, use `--wait-for-nodes`",
        ),
    ] = WAIT_FOR_NODES_SECONDS
    profile: Annotated[
        Profiled,
        key(
            "`none`, `winners`",
            "`winners`: when all cells have ended, profile the fastest layout of each once:"
            " [profile](profile.md). Its GPU time counts against the budgets",
        ),
    ] = Profiled.NONE

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}")
        return self

    def plan(self, device: Device, *, confirms: bool = False) -> MeasurementPlan:
        """Return the plan of one attempt; `confirms`: it repeats one of the fastest layouts."""
        return MeasurementPlan(
            warmup_steps=self.warmup_steps,
            min_steps=self.min_steps,
            max_steps=self.max_steps,
            relative_confidence=self.precision,
            warmup_seconds=GPU_WARMUP_SECONDS if self._asks_for_seconds(device) else 0.0,
            min_seconds=self._seconds(device, confirms=confirms),
        )

    def _asks_for_seconds(self, device: Device) -> bool:
        return device is Device.CUDA and self.min_seconds != 0

    def _seconds(self, device: Device, *, confirms: bool) -> float:
        if self.min_seconds != "auto":
            return self.min_seconds
        if device is Device.CPU:
            return 0.0
        return GPU_CONFIRMING_SECONDS if confirms else GPU_SECONDS

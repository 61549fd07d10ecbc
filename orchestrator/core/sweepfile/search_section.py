"""Section `search` of a sweep file: how the next layout is selected, and when to stop."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from orchestrator.core.problem.proofs import Dominance
from orchestrator.core.sweepfile.spec_values import Duration, Flag, OrAuto, Section, key, whole
from orchestrator.core.trial.protocol import Device

ANCHOR_EVERY = 8


class Strategy(StrEnum):
    AUTO = "auto"  # largest expected gain per GPU-second
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    TPE = "tpe"
    GP = "gp"

    @property
    def finds_fronts(self) -> bool:
        """True if it can search for several objectives; false: for the fastest layout only."""
        match self:
            case Strategy.AUTO | Strategy.EXHAUSTIVE | Strategy.RANDOM:
                return True
            case Strategy.TPE | Strategy.GP:
                return False


class Plateau(Section):
    """Stop a cell when its last `trials` finished trials improved its best by less than `gain`."""

    trials: Annotated[
        int, Field(strict=True, ge=1), key("number", "How many of the last finished trials count")
    ] = 20
    gain: Annotated[
        float,
        Field(strict=True, ge=0, lt=1),
        key("fraction", "The cell stops if they improved its best by less than this"),
    ] = 0.01


class Confirm(Section):
    """Repeat the fastest layouts of a cell after its search, to separate speed from luck."""

    contenders: Annotated[
        int,
        whole(1, 64),
        key(
            "number",
            "How many layouts that could be the fastest are repeated; each further round keeps"
            " half of them. On a machine whose speed drifts, all of them are, at most 16",
        ),
    ] = 3
    repeats: Annotated[
        int,
        whole(0, 32),
        key(
            "number",
            "Most repeats of each layout to confirm it, after its first run and not counted in"
            " `max_trials`. Anchors (`anchor_every`) and doubtful results are repeated whenever"
            " they are due, and three more rounds follow if the machine's speed has changed. 0:"
            " nothing is repeated, and layouts that one run cannot tell apart are tied",
        ),
    ] = 2


class Search(Section):
    """How the next layout is selected, and when to stop. Budgets include failed attempts."""

    OMITTED_DEFAULTS = frozenset({"max_cost", "anchor_every", "early_stop", "dominance"})

    strategy: Annotated[
        Strategy,
        key(
            "`auto`, `exhaustive`, `random`, `tpe`, `gp`",
            "`auto`: the layout with the largest expected gain per GPU-second, from physics and"
            " this cell's results: [search.md](search.md). `gp`: a Gaussian process for a cell's"
            " first 200 outcomes, then TPE; needs the extra `gp`",
        ),
    ] = Strategy.AUTO
    seed: Annotated[
        int,
        Field(strict=True, ge=0, lt=1 << 32),
        key("number", "Seed of the search, the weights and the tokens"),
    ] = 0
    max_trials: Annotated[
        int | None, Field(strict=True, ge=1), key("number", "Most trials launched per cell")
    ] = None
    max_gpu_hours: Annotated[
        float | None,
        Field(strict=True, gt=0),
        key(
            "number",
            "Most GPU-hours reserved by all calls together. Failed attempts and idle leases count",
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        Field(strict=True, gt=0),
        key(
            "number",
            "The same in US dollars, by `price_per_gpu_hour` or the [list price](#devices);"
            " an error if neither is known",
        ),
    ] = None
    max_wall_time: Annotated[
        Duration | None, key("duration", "One `sweep run` starts nothing after this time")
    ] = None
    max_parallel_trials: Annotated[
        OrAuto[Annotated[int, whole(1, 4096)]],
        key("`auto`, a number", "Most trials at once. `auto`: as many as fit; without GPUs, one"),
    ] = "auto"
    plateau: Annotated[
        Plateau | None, key("section", "Stop a cell that no longer improves: [plateau](#plateau)")
    ] = None
    bound: Annotated[
        float | None,
        Field(strict=True, gt=0, lt=1),
        key(
            "fraction",
            "Stop a cell when no untried layout is expected to beat its best by this much:"
            " [search.md](search.md). Only with strategy `auto`",
        ),
    ] = None
    confirm: Annotated[
        Confirm, key("section", "Repeat the fastest layouts after the search: [confirm](#confirm)")
    ] = Confirm()
    anchor_every: Annotated[
        int,
        whole(0, 10_000),
        key(
            "number",
            "Repeat one layout after this many measured trials of a cell, after pauses, and before"
            " confirmations, to detect [drift](search.md#a-machine-that-drifts). The default 8"
            " grows to 16, 32 and 64 while the machine's speed stays the same. 0: never. If"
            " `confirm.repeats` is 0, there are no anchors and no confirmations, but results that"
            " contradict their neighbours are still repeated",
        ),
    ] = ANCHOR_EVERY
    early_stop: Annotated[
        OrAuto[Flag],
        key(
            "`auto`, `true`, `false`",
            "End a trial after a few steps if even the fastest of them is 25 % slower than those of"
            " the best layout: its numbers are bounds, and"
            " [never win](measuring.md#trials-that-cannot-win). `auto`: on GPUs, unless `strategy`"
            " is `exhaustive`",
        ),
    ] = "auto"
    dominance: Annotated[
        OrAuto[Dominance],
        key(
            "`auto`, `trusted`, `confirmed`, `off`",
            "Which layouts an out-of-memory excludes:"
            " [search.md](search.md#what-an-out-of-memory-rules-out)",
        ),
    ] = "auto"

    def stops_early(self, device: Device) -> bool:
        """Return whether trials that cannot win are ended early."""
        if self.early_stop != "auto":
            return self.early_stop
        return device is Device.CUDA and self.strategy is not Strategy.EXHAUSTIVE

"""The calculator of a cell: memory and time of any layout, also beyond the axes' values.

What it says of a layout is what `sweep plan` says: the same rules, formulas and calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from orchestrator.core.physics.calibration import Calibration
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.hardware import Hardware
from orchestrator.core.problem.layout import (
    BATCH_AXES,
    NAMED_AXES,
    PARALLEL_AXES,
    Layout,
    Options,
    Precision,
    Recompute,
    RecomputeMode,
)
from orchestrator.core.search.axis_values import axis_values
from orchestrator.core.search.explanation import FOLLOWING, Explanation, explain
from orchestrator.core.search.layout_wish import (
    Fields,
    filled,
    first,
    option_text,
    parse_assignments,
)
from orchestrator.core.search.planner import CellPlan
from orchestrator.core.search.space import broken_rule
from orchestrator.core.sweepfile.spec import SweepSpec

# Axes of which `auto` names every value that can be legal.
_AUTO_AXES = (*PARALLEL_AXES, *BATCH_AXES, "zero_stage", "pipeline_schedule", "recompute")
_MODES = tuple(RecomputeMode)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisChoice:
    """The values that a person may choose for one axis, as texts, in their order."""

    name: str
    values: tuple[str, ...]
    # Those of the sweep file.
    in_file: frozenset[str]
    # True for an axis whose values are numbers.
    is_number: bool
    # True if its value follows from the other axes unless one is chosen.
    may_follow: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Calculator:
    """Predicts the layouts of one cell of a sweep file."""

    spec: SweepSpec
    planned: CellPlan
    # The constants that predict layouts with such options.
    calibration: Callable[[Options], Calibration]
    hardware: Hardware | None
    gpus_per_node: int

    @property
    def cell(self) -> Cell:
        """The cell whose layouts are predicted."""
        return self.planned.space.cell

    @cached_property
    def choices(self) -> tuple[AxisChoice, ...]:
        """The axes, each with the values of the file and all others that can be legal."""
        given = axis_values(self.spec, self.cell)
        every = given if self._is_replay else axis_values(_unrestricted(self.spec), self.cell)
        found = [
            _choice(name, [*getattr(every, name), *getattr(given, name)], getattr(given, name))
            for name in NAMED_AXES
        ]
        options = sorted(self.spec.axes.options.items())
        return (*found, *(_option_choice(name, values) for name, values in options))

    @property
    def start(self) -> Layout:
        """The layout that is predicted to be the best of the file's layouts."""
        return first(self.planned.candidates)

    def layout(self, assignments: Iterable[tuple[str, str]]) -> Layout:
        """Return the layout with the given values of axes, and those of `start` elsewhere.

        Replicas and accumulation follow from the other axes. Raises UsageInvalid for a field that
        there is not, and for a value that is none.
        """
        wish: Fields = parse_assignments(assignments, options=self.spec.axes.options)
        return filled(wish, self.start, self.cell)

    def following(self, layout: Layout) -> frozenset[str]:
        """Return the fields of a layout that follow from its other fields."""
        chosen = {name: value for name, value in texts_of(layout).items() if name not in FOLLOWING}
        again = self.layout(chosen.items())
        return frozenset(
            name for name in FOLLOWING if getattr(again, name) == getattr(layout, name)
        )

    def explain(self, layout: Layout) -> Explanation:
        """Return the predictions for a layout, or the rule that it breaks."""
        return explain(
            self.planned,
            layout,
            illegal=self._illegal(layout),
            calibration=self.calibration(layout.options),
            hardware=self.hardware,
            gpus_per_node=self.gpus_per_node,
        )

    @property
    def _is_replay(self) -> bool:
        """True if the layouts are those of a table."""
        return self.spec.workload.name == "replay"

    def _illegal(self, layout: Layout) -> str | None:
        if self._is_replay:
            return self.planned.space.reason(layout)
        return broken_rule(self.spec, self.cell, layout, gpus_per_node=self.gpus_per_node)


def texts_of(layout: Layout) -> dict[str, str]:
    """Return the value of each axis as a text that `Calculator.layout` reads."""
    named = {name: str(getattr(layout, name)) for name in NAMED_AXES}
    return named | {name: option_text(value) for name, value in layout.options}


def _unrestricted(spec: SweepSpec) -> SweepSpec:
    """Return the sweep file with all values of its axes but options."""
    axes = spec.axes.model_copy(update=dict.fromkeys(_AUTO_AXES, "auto"))
    return spec.model_copy(update={"axes": axes, "precision": tuple(Precision)})


def _choice(name: str, values: Iterable[Any], given: Iterable[Any]) -> AxisChoice:
    distinct = list(dict.fromkeys(values))
    is_number = not isinstance(distinct[0], (str, Recompute)) and name != "pipeline_schedule"
    if is_number:
        distinct.sort()
    elif name == "recompute":
        distinct.sort(key=_extent)
    return AxisChoice(
        name=name,
        values=tuple(map(str, distinct)),
        in_file=frozenset(map(str, given)),
        is_number=is_number,
        may_follow=name in FOLLOWING,
    )


def _extent(recompute: Recompute) -> tuple[int, str, float]:
    """Order modes by how much they recompute."""
    layers = inf if recompute.num_layers is None else recompute.num_layers
    return _MODES.index(recompute.mode), recompute.policy or "", layers


def _option_choice(name: str, values: Iterable[Any]) -> AxisChoice:
    texts = tuple(map(option_text, values))
    return AxisChoice(
        name=name, values=texts, in_file=frozenset(texts), is_number=False, may_follow=False
    )

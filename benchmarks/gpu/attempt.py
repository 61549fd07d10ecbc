"""One layout to run on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.problem.layout import Layout, Options, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS, ModelShape


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One layout to run on one GPU, or on one core in a rehearsal."""

    model: str | ModelShape
    sequence_length: int
    layout: Layout
    # Options of workload llama, in addition to the layout's.
    options: Mapping[str, Any]
    # Timed work: at least so many seconds (of a GPU) and steps.
    seconds: float = 3.0
    min_steps: int = 6
    run: int = 0  # numbers the repeats of one layout

    @property
    def shape(self) -> ModelShape:
        return PRESETS[self.model] if isinstance(self.model, str) else self.model

    @property
    def key(self) -> str:
        words = [f"{name}={self.options[name]}".lower() for name in sorted(self.options)]
        run = [f"run{self.run}"] if self.run else []
        cell = f"{self.shape.name}_s{self.sequence_length}"
        return " ".join([cell, self.layout.key, *words, *run])

    @property
    def kind(self) -> str:
        """A name that attempts share which take about as long: compiling takes most of the time."""
        options = {**self.options, **dict(self.layout.options)}
        return f"{self.shape.name} {self.seconds} {options.get('compile')}"


def layout(
    recompute: str = "none", *, mbs: int = 1, ga: int = 1, precision: str = "bf16", **options: Any
) -> Layout:
    """A layout on one device; `options` are the workload's that vary."""
    return Layout(
        micro_batch_size=mbs,
        grad_accum_steps=ga,
        recompute=Recompute.parse(recompute),
        precision=Precision(precision),
        options=_sorted(options),
    )


def _sorted(options: Mapping[str, Any]) -> Options:
    return tuple(sorted(options.items()))

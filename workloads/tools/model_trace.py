"""Finds what a step of a user's own model keeps in memory, by a trace of 2 and 3 layers with
tensors that have shapes but no memory.

Bytes are exact if memory is linear in layers and in tokens; a note says if it is not. A trace does
not see a GPU's allocator and streams.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from orchestrator.core.physics.traced_memory import NO_RECOMPUTE, TracedBytes, TracedMode
from workloads.tools.traced_run import (
    Build,
    MadeModel,
    ModelMaker,
    ModeRefused,
    TracedRun,
    TraceRefused,
)

RECOMPUTES = (NO_RECOMPUTE, "selective_attention", "selective_ops", "full")
# Sequences of a micro-batch, for the two points of a line: with so many, the gradients of weights
# no longer count in the peak.
FEW, MANY = 4, 8
TOLERANCE = 0.01  # of the check
NEGLIGIBLE_BYTES = 4096  # scalars


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    modes: dict[str, TracedMode]
    # By mode: predicted over traced peak, less 1, for another depth, batch and sequence length.
    check: dict[str, float]
    parameters_per_layer: int
    parameters_besides: int
    bytes_per_parameter: dict[str, float]
    cpu_seconds: dict[str, float]
    notes: tuple[str, ...]


def trace_model(
    build: Build,
    *,
    sequence_length: int,
    recomputes: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
) -> TracedModel:
    """Trace every requested recompute mode, or all that the function supports. Raises TraceRefused.

    Weights are made in or cast to `dtype`; with `autocast` they stay as they are, and products run
    in bf16.
    """
    asked = recomputes or (
        RECOMPUTES if "recompute" in inspect.signature(build).parameters else (NO_RECOMPUTE,)
    )
    if NO_RECOMPUTE not in asked:
        asked = (NO_RECOMPUTE, *asked)
    modes, check, seconds, notes = {}, {}, {}, []
    sizes: _Sizes | None = None
    for recompute in asked:
        start = time.process_time()
        maker = ModelMaker(
            build=build,
            recompute=recompute,
            dtype=dtype,
            autocast=autocast,
            sequence_length=sequence_length,
        )
        try:
            traced = _trace_mode(maker)
        except ModeRefused as exc:
            if recomputes is not None or recompute == NO_RECOMPUTE:
                raise TraceRefused(f"the function refuses recompute={recompute!r}: {exc}") from exc
            notes.append(f"{recompute}: not traced, the function refuses it: {exc}")
            continue
        seconds[recompute] = time.process_time() - start
        modes[recompute], check[recompute] = traced.mode, traced.check
        sizes = sizes or traced.sizes
        notes += [f"{recompute}: {note}" for note in traced.notes]
    # `none` is among them, or was refused
    assert sizes is not None
    return TracedModel(
        modes=modes,
        check=check,
        parameters_per_layer=sizes.per_layer,
        parameters_besides=sizes.besides,
        bytes_per_parameter=sizes.bytes_per_parameter(),
        cpu_seconds=seconds,
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    per_layer: int
    besides: int
    weight_bytes: float
    gradient_bytes: float
    trained_share: float

    def bytes_per_parameter(self) -> dict[str, float]:
        """Adam's moments, and fp32 copies of weights that have another dtype."""
        return {
            "parameters": round(self.weight_bytes, 3),
            "gradients": round(self.gradient_bytes, 3),
            "optimizer": round((8.0 if self.weight_bytes >= 4 else 12.0) * self.trained_share, 3),
        }


@dataclass(frozen=True, kw_only=True)
class _TracedOnce:
    mode: TracedMode
    check: float
    sizes: _Sizes
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _PeakMemory:
    """Bytes of a micro-batch: kept by a layer, and above all layers' at three moments."""

    kept: float
    backward: float
    head: float
    end: float


def _trace_mode(maker: ModelMaker) -> _TracedOnce:
    length, half = maker.sequence_length, maker.sequence_length // 2
    with maker.fakes(), maker.warnings_noted() as notes:
        two, three = maker.make(2), maker.make(3)
        runs = _ModelPair(two, three)
        one = runs.peaks(1, length)
        peaks = one, runs.peaks(FEW, length), runs.peaks(MANY, length), runs.peaks(MANY, half)

        def line(part: str) -> TracedBytes:
            return _line(*(getattr(peak, part) for peak in peaks), length=length)

        mode = TracedMode(
            kept=line("kept"), backward=line("backward"), head=line("head"), end=line("end")
        )
        five, three_again = maker.make(5).run(2, half), three.run(2, half)
    check = _check(mode, three_again, five, micro_batch_size=2, length=half)
    if abs(check) > TOLERANCE:
        notes.append(
            f"5 layers on 2 x {half} tokens are predicted {check:+.1%} off: layers differ, or "
            "memory is no straight line in tokens; let the number of layers count groups that are "
            "alike, and trace at the sequence length that you train with"
        )
    if mode.kept.per_token_and_position:
        notes.append(
            f"attention keeps {mode.kept.per_token_and_position:g} bytes per token and position, "
            "the square of the sequence length: flash attention keeps none; see that the model "
            "takes F.scaled_dot_product_attention without a mask, if yours does on the GPU"
        )
    if runs.left > TOLERANCE * one.kept:
        notes.append(
            f"{runs.left:,} bytes outlive the backward pass: reference cycles, or results that "
            "the model keeps"
        )
    return _TracedOnce(mode=mode, check=check, sizes=_sizes(two.module, three.module), notes=notes)


def _check(
    mode: TracedMode, three: TracedRun, five: TracedRun, *, micro_batch_size: int, length: int
) -> float:
    """The larger error for another depth, batch and length: of a layer's bytes, of the peak."""
    tokens = micro_batch_size * length
    kept = mode.kept.of(tokens=tokens, sequence_length=length)
    of_layers = kept / max((five.kept - three.kept) / 2, 1) - 1.0
    peak = mode.peak_bytes(num_layers=5, tokens=tokens, sequence_length=length)
    of_peak = peak / max(max(five.live), 1) - 1.0
    return max(of_layers, of_peak, key=abs)


def _line(one: float, few: float, many: float, shorter: float, *, length: int) -> TracedBytes:
    """A line in tokens whose slope grows with the sequence; exact for one sequence and many."""
    slope = max(0.0, (many - few) / ((MANY - FEW) * length))
    # At least: the peak of one sequence may be one that does not show with many.
    fixed = max(0.0, one - slope * length)
    slope_of_half = (shorter - (many - slope * MANY * length)) / (MANY * length // 2)
    per_position = max(0.0, slope - slope_of_half) / (length / 2)
    if per_position * length < 2e-3 * slope:  # rounding
        per_position = 0.0
    return TracedBytes(
        per_token=round(slope - per_position * length, 2),
        per_token_and_position=round(per_position, 4),
        fixed=round(fixed) if fixed > NEGLIGIBLE_BYTES else 0.0,
    )


class _ModelPair:
    """The same model with 2 and with 3 layers: they differ by the backward pass of one layer."""

    def __init__(self, two: MadeModel, three: MadeModel) -> None:
        self._two, self._three = two, three
        # By number of operations: the start and the number of those of the last layer.
        self._starts: dict[int, tuple[int, int]] = {}
        self.left = 0

    def peaks(self, micro_batch_size: int, sequence_length: int) -> _PeakMemory:
        three = self._three.run(micro_batch_size, sequence_length)
        self.left = max(self.left, three.left)
        if len(three.live) not in self._starts:
            two = self._two.run(micro_batch_size, sequence_length)
            self._starts[len(three.live)] = self._find(three, two)
        start, period = self._starts[len(three.live)]
        # One layer's backward pass lies between the two.
        kept = three.live[start + period - 1] - three.live[start + 2 * period - 1]
        below = 3 * kept
        return _PeakMemory(
            kept=kept,
            backward=max(three.live[start : start + period]) - below,
            head=max(three.live[:start], default=0) - below,
            end=max(three.live[start + 3 * period :], default=0),
        )

    @staticmethod
    def _find(three: TracedRun, two: TracedRun) -> tuple[int, int]:
        period = len(three.live) - len(two.live)
        # Head, layer, [layer,] first layer, embedding: counted from the end, they agree up to the
        # head, or up to a part of the additional layer.
        start = len(three.live) - three.same_at_the_end(two) - period
        if period <= 0:
            raise TraceRefused(
                "2 and 3 layers do the same operations: the function must build as many layers as "
                "its first argument says"
            )
        if start < 0:
            raise TraceRefused(
                "the third layer does other operations than the first two: let the number of "
                "layers count groups that are alike, as build(2) with 2 dense and 2 sparse layers"
            )
        return start, period


def _sizes(two: nn.Module, three: nn.Module) -> _Sizes:
    of_two, of_three = (sum(w.numel() for w in module.parameters()) for module in (two, three))
    weights = list(three.parameters())
    trained = [w for w in weights if w.requires_grad]
    return _Sizes(
        per_layer=of_three - of_two,
        besides=3 * of_two - 2 * of_three,
        weight_bytes=sum(w.numel() * w.element_size() for w in weights) / of_three,
        gradient_bytes=sum(w.numel() * w.element_size() for w in trained) / of_three,
        trained_share=sum(w.numel() for w in trained) / of_three,
    )

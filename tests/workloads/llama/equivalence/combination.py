"""A layout with options and a model, which has to train as one process does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest

SEQUENCE_LENGTH = 32
# So long that each micro-batch has several chunks of the loss.
CHUNKED_LENGTH = 128
GLOBAL_BATCH_SIZE = 8
NUM_STEPS = 3
SHAPE = ModelShape(
    name="small",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=4,
    ffn_hidden_size=48,
    vocab_size=64,
)
# A layer for each stage of 4 ranks, or of 2 with 2 stages each.
STAGED = replace(SHAPE, num_layers=4)
TIED = replace(SHAPE, name="tied", tied_embeddings=True)
# One layer more than an equal share of 2 or 4 stages.
UNEVEN = replace(SHAPE, name="uneven", num_layers=5)
DEEP = replace(SHAPE, name="deep", num_layers=8)
# Over 4 ranks, 6 rows are 2 + 2 + 2 + 0.
NARROW = replace(
    SHAPE,
    name="narrow",
    hidden_size=6,
    num_attention_heads=3,
    num_key_value_heads=3,
    ffn_hidden_size=10,
    vocab_size=9,
)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What the ranks of a gang train."""

    layout: Layout
    shape: ModelShape = SHAPE
    # As a sweep file gives them, sorted by name.
    options: tuple[tuple[str, Any], ...] = ()
    sequence_length: int = SEQUENCE_LENGTH

    @property
    def is_possible(self) -> bool:
        """True if the packages that it needs are installed."""
        return self.layout.precision is not Precision.FP8 or find_spec("torchao") is not None

    @property
    def name(self) -> str:
        words = [self.layout.short, *(f"{name}={value}" for name, value in self.options)]
        return " ".join([*words, *([self.shape.name] if self.shape not in (SHAPE, STAGED) else [])])

    @property
    def llama_options(self) -> LlamaOptions:
        return LlamaOptions.model_validate({"loss": "whole", **dict(self.options)})

    @property
    def reference(self) -> Combination:
        """The same training in one process: the whole batch at once, nothing recomputed."""
        layout = Layout(
            micro_batch_size=self.layout.global_batch_size, precision=self.layout.precision
        )
        kept = tuple(
            (name, value) for name, value in self.options if name in ("attention", "clip_gradients")
        )
        return replace(self, layout=layout, options=kept)

    def request(self) -> TrialRequest:
        return TrialRequest(
            sweep="equivalence",
            trial_id=1,
            attempt=1,
            workload="llama",
            model=self.shape,
            sequence_length=self.sequence_length,
            layout=self.layout,
            device=Device.CPU,
            measurement=MeasurementPlan(
                warmup_steps=2, min_steps=2, max_steps=2, relative_confidence=0.02
            ),
            limits=PhaseLimits(
                start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
            ),
            seed=11,
        )


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Relative distances from the reference: the largest of three steps, and of the weights."""

    loss: float
    gradient_norm: float
    weights: float

    def is_within(self, other: Distance) -> bool:
        return (
            self.loss <= other.loss
            and self.gradient_norm <= other.gradient_norm
            and self.weights <= other.weights
        )


TOLERANCES = {
    Precision.FP32: Distance(loss=5e-7, gradient_norm=2e-6, weights=1e-6),
    Precision.BF16: Distance(loss=1e-4, gradient_norm=3e-3, weights=2e-3),
    Precision.FP16: Distance(loss=5e-5, gradient_norm=5e-4, weights=5e-4),
    # A rank scales its parts of tensors by their own largest elements, so others are rounded up and
    # down: twice what fp8 itself moves the training of one process (9e-5, 3.2e-3 and 1.1e-3).
    Precision.FP8: Distance(loss=2e-4, gradient_norm=7e-3, weights=3e-3),
}

"""The section `trainer` of a sweep file: the memory of a program, known before its trials.

`sweep trace` writes its numbers for the user's own model. Only predictions use them: they are no
condition of a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.core.physics.traced_memory import (
    NO_RECOMPUTE,
    TracedBytes,
    TracedMemory,
    TracedMode,
)
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.problem.layout import Recompute
from orchestrator.core.sweepfile.spec_values import AlsoForm, Section, key
from orchestrator.core.sweepfile.suggestion import did_you_mean

MAX_MODES = 16
_MASTER_AND_MOMENTS = 12.0  # bytes per parameter of Adam
_BYTES = "number (per token), or [bytes](#bytes)"
Bytes = Annotated[float, Field(ge=0, le=1e15)]
_OrNumber = AlsoForm({"type": "number"})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TracedTerm(Section):
    """Bytes of one micro-batch; a number alone is per token."""

    # Below 0 if the square of the sequence length makes up for it.
    per_token: Annotated[
        float, Field(ge=-1e15, le=1e15), key("number", "Bytes per token of a micro-batch")
    ] = 0.0
    per_token_and_position: Annotated[
        Bytes,
        key(
            "number",
            "Bytes per token, times the sequence length: for attention that stores its scores",
        ),
    ] = 0.0
    fixed: Annotated[
        Bytes,
        key(
            "number",
            "Bytes that do not depend on the tokens: rounded copies of weights,"
            " a weight's gradient before it is added",
        ),
    ] = 0.0

    @property
    def value(self) -> TracedBytes:
        return TracedBytes(**self.model_dump())


Term = Annotated[
    TracedTerm,
    BeforeValidator(lambda value: {"per_token": value} if _is_number(value) else value),
    _OrNumber,
]


class TracedModeSection(Section):
    """The memory of one recompute mode: what a layer keeps, and what each peak adds."""

    kept: Annotated[Term, key(_BYTES, "What one layer keeps for its backward pass")]
    backward: Annotated[
        Term,
        key(_BYTES, "Added to `kept` of all layers at the peak of the last layer's backward pass"),
    ]
    head: Annotated[Term, key(_BYTES, "Added to `kept` of all layers at the peak of head and loss")]
    end: Annotated[
        Term,
        key(
            _BYTES,
            "What is left in addition to the states after the last backward pass:"
            " the embedding's gradient before it is added",
        ),
    ] = TracedTerm()

    @property
    def value(self) -> TracedMode:
        return TracedMode(
            kept=self.kept.value,
            backward=self.backward.value,
            head=self.head.value,
            end=self.end.value,
        )


class BytesPerParameter(Section):
    """Bytes per parameter in mixed precision, without sharding; a number alone is the sum."""

    parameters: Annotated[
        float,
        Field(gt=0, le=64),
        key("number", "2 in bf16; 4 if weights are fp32 and rounded at each use"),
    ] = 2.0
    gradients: Annotated[
        float,
        Field(ge=0, le=64),
        key("number", "2 in bf16, 4 in fp32, 6 if bf16 gradients are added to an fp32 copy"),
    ] = 2.0
    optimizer: Annotated[
        float, Field(ge=0, le=64), key("number", "8 for Adam's moments, 4 for an fp32 master copy")
    ] = _MASTER_AND_MOMENTS


def _bytes_per_parameter(value: Any) -> Any:
    if not _is_number(value):
        return value
    gradients = value - 2.0 - _MASTER_AND_MOMENTS
    if not 0 < gradients <= 64:
        raise ValueError(
            f"{value} bytes per parameter are not weights 2, gradients, and Adam's master and"
            " moments 12, as 16, 18 or 20 are;"
            " give the parts: {parameters: 2, gradients: 2, optimizer: 4}"
        )
    return {"gradients": gradients}


def _mode(text: str) -> str:
    recompute = Recompute.parse(text)
    if recompute.num_layers is not None:
        raise ValueError(
            f"{text!r} is of some layers; activations are those of one layer:"
            f" {text.partition(':')[0]}"
        )
    return str(recompute)


def _modes(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > MAX_MODES:
        raise ValueError(f"{len(value):,} modes; at most {MAX_MODES}")
    return value


def _none_among(value: Mapping[str, TracedModeSection]) -> Mapping[str, TracedModeSection]:
    if NO_RECOMPUTE not in value:
        raise ValueError(f"{NO_RECOMPUTE} is missing: what layers keep without recomputation")
    return value


def _profile(value: str) -> str:
    if value not in TRAINERS:
        raise ValueError(
            f"{value[:80]!r} is not one of {', '.join(TRAINERS)}{did_you_mean(value, TRAINERS)}"
        )
    return value


class TrainerSection(Section):
    """A known trainer to start from, and numbers that replace its own."""

    profile: Annotated[
        Annotated[str, AfterValidator(_profile), WithJsonSchema({"enum": list(TRAINERS)})] | None,
        key(
            ", ".join(f"`{name}`" for name in TRAINERS),
            "A known trainer. `trainer: nanotron` is short for `trainer: {profile: nanotron}`",
        ),
    ] = None
    bytes_per_parameter: Annotated[
        Annotated[BytesPerParameter, BeforeValidator(_bytes_per_parameter), _OrNumber] | None,
        key(
            "number or section",
            "In mixed precision, unsharded: 16, 18, 20, or its [parts](#bytes_per_parameter)",
        ),
    ] = None
    activations: Annotated[
        Annotated[
            Mapping[Annotated[str, AfterValidator(_mode)], TracedModeSection],
            BeforeValidator(_modes),
            AfterValidator(_none_among),
        ]
        | None,
        key(
            "mapping",
            "Memory of layers and head by recompute mode: [activations](#activations)."
            " `none` is required",
        ),
    ] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.profile is None and self.bytes_per_parameter is None and self.activations is None:
            raise ValueError(
                "trainer is empty; give a profile, bytes_per_parameter or activations,"
                " or leave it out"
            )
        return self

    def trainer(self, default: Trainer) -> Trainer:
        """Return the trainer described, which starts from a profile or else from the default."""
        known = TRAINERS[self.profile] if self.profile is not None else default
        if (states := self.bytes_per_parameter) is not None:
            known = replace(
                known,
                parameter_bytes=states.parameters,
                gradient_bytes=states.gradients,
                optimizer_bytes=states.optimizer,
            )
        if self.activations is not None:
            modes = tuple((name, mode.value) for name, mode in self.activations.items())
            known = replace(known, traced=TracedMemory(modes=modes))
        return known


TrainerChoice = Annotated[
    TrainerSection,
    BeforeValidator(lambda value: {"profile": value} if isinstance(value, str) else value),
    AlsoForm({"enum": list(TRAINERS)}),
]

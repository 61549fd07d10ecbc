"""The section `trainer` of a sweep file: what is known of the memory of a program before any of its trials, by name or by numbers.

`sweep trace` writes the numbers for a model of one's own. Predictions alone rest on them: they are no condition of a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from orchestrator.core.physics.traced_memory import (
    NO_RECOMPUTE,
    TracedBytes,
    TracedMemory,
    TracedMode,
)
from orchestrator.core.physics.trainer import TRAINERS, Trainer
from orchestrator.core.problem.layout import Recompute
from orchestrator.core.sweepfile.spec_values import Section, key

MAX_MODES = 16
_MASTER_AND_MOMENTS = 12.0  # bytes a parameter of Adam in mixed precision

_BYTES = "number (per token), or [bytes](#bytes)"
Bytes = Annotated[float, Field(ge=0, le=1e15)]


class _OrNumber:
    """Says in the JSON schema that a number may stand for the mapping."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number"}, handler(schema)]}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class TracedTerm(Section):
    """Bytes of one micro-batch; a number alone is per token."""

    per_token: Annotated[
        float, Field(ge=-1e15, le=1e15), key("number", "Times the tokens of a micro-batch")
    ] = 0.0  # below 0 where the square of the sequence length makes up for it
    per_token_and_position: Annotated[
        Bytes,
        key("number", "Times these, times the sequence length: attention that keeps its scores"),
    ] = 0.0
    fixed: Annotated[
        Bytes,
        key(
            "number",
            "Whatever the tokens: rounded copies of weights, a weight's gradient before it is added",
        ),
    ] = 0.0

    @property
    def value(self) -> TracedBytes:
        return TracedBytes(
            per_token=self.per_token,
            per_token_and_position=self.per_token_and_position,
            fixed=self.fixed,
        )


def _term(value: Any) -> Any:
    return {"per_token": value} if _is_number(value) else value


Term = Annotated[TracedTerm, BeforeValidator(_term), _OrNumber()]


class TracedModeSection(Section):
    """What a layer keeps that is recomputed so, and what the moments of the peak need beyond what all layers keep."""

    kept: Annotated[Term, key(_BYTES, "By one layer, for its backward pass")]
    backward: Annotated[
        Term,
        key(
            _BYTES,
            "Beyond what all layers keep, when the last layer's backward pass is at its fullest",
        ),
    ]
    head: Annotated[Term, key(_BYTES, "The same, when the head and the loss are")]
    end: Annotated[
        Term,
        key(
            _BYTES,
            "Above the states, when the backward pass of all layers is over: the embedding's gradient before it is added",
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
    """Bytes of a parameter in mixed precision, without sharding; a number alone is the sum of all three."""

    parameters: Annotated[
        float,
        Field(gt=0, le=64),
        key("number", "2 in bf16; 4 where weights are fp32 and rounded at each use"),
    ] = 2.0
    gradients: Annotated[
        float,
        Field(ge=0, le=64),
        key("number", "2 in bf16, 4 in fp32, 6 where bf16 ones are added to an fp32 copy"),
    ] = 2.0
    optimizer: Annotated[
        float, Field(ge=0, le=64), key("number", "Adam's moments, 8, and 4 of an fp32 master")
    ] = _MASTER_AND_MOMENTS


def _bytes_per_parameter(value: Any) -> Any:
    if not _is_number(value):
        return value
    gradients = value - 2.0 - _MASTER_AND_MOMENTS
    if not 0 < gradients <= 64:
        raise ValueError(
            f"{value} bytes per parameter are not weights 2, gradients, and Adam's master and moments 12, as 16, 18 or 20 are; "
            "give the parts: {parameters: 2, gradients: 2, optimizer: 4}"
        )
    return {"gradients": gradients}


def _mode(text: str) -> str:
    recompute = Recompute.parse(text)
    if recompute.num_layers is not None:
        raise ValueError(
            f"{text!r} is of some layers; activations are those of one layer: {text.partition(':')[0]}"
        )
    return str(recompute)


def _modes(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value) > MAX_MODES:
        raise ValueError(f"{len(value):,} modes; at most {MAX_MODES}")
    return value


def _none_among(value: Mapping[str, TracedModeSection]) -> Mapping[str, TracedModeSection]:
    if NO_RECOMPUTE not in value:
        raise ValueError(f"{NO_RECOMPUTE} is missing: what layers keep that are not recomputed")
    return value


def _profile(value: str) -> str:
    if value not in TRAINERS:
        close = get_close_matches(value[:80], TRAINERS, n=1)
        raise ValueError(
            f"{value[:80]!r} is not one of {', '.join(TRAINERS)}{f'; did you mean {close[0]}?' if close else ''}"
        )
    return value


class TrainerSection(Section):
    """A known trainer to start from, and what is known better."""

    profile: Annotated[
        Annotated[str, AfterValidator(_profile), WithJsonSchema({"enum": list(TRAINERS)})] | None,
        key(
            ", ".join(f"`{name}`" for name in TRAINERS),
            "A trainer that is known; `trainer: nanotron` alone says it too",
        ),
    ] = None
    bytes_per_parameter: Annotated[
        Annotated[BytesPerParameter, BeforeValidator(_bytes_per_parameter), _OrNumber()] | None,
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
            "What layers and head hold, by recompute mode: [activations](#activations); `none` is required",
        ),
    ] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.profile is None and self.bytes_per_parameter is None and self.activations is None:
            raise ValueError(
                "trainer says nothing; give a profile, bytes_per_parameter or activations, or leave it out"
            )
        return self

    def trainer(self, without: Trainer) -> Trainer:
        """The trainer meant; `without` is what would be believed without this section."""
        known = TRAINERS[self.profile] if self.profile is not None else without
        if (states := self.bytes_per_parameter) is not None:
            known = replace(
                known,
                parameter_bytes=states.parameters,
                gradient_bytes=states.gradients,
                optimizer_bytes=states.optimizer,
            )
        if self.activations is not None:
            known = replace(
                known,
                traced=TracedMemory(
                    modes=tuple((name, mode.value) for name, mode in self.activations.items())
                ),
            )
        return known


def _or_profile(value: Any) -> Any:
    return {"profile": value} if isinstance(value, str) else value


class _OrProfile:
    """Says in the JSON schema what `_or_profile` does."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(TRAINERS)}, handler(schema)]}


TrainerChoice = Annotated[TrainerSection, BeforeValidator(_or_profile), _OrProfile()]

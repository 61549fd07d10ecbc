"""Section `model` of a sweep file: a preset, or a model by its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetPydanticSchema, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.spec_values import FLAG_TAKES, Flag, Name, Section, key, whole
from orchestrator.core.sweepfile.suggestion import did_you_mean


class ModelSizes(Section):
    """A model by its sizes, or a preset with some sizes changed."""

    preset: Annotated[str | None, key("preset", "Take the sizes of this preset first")] = None
    name: Annotated[
        Name | None,
        key("text", "A label; generated if you give none. Two definitions need two names"),
    ] = None
    num_layers: Annotated[int | None, whole(1, 1024), key("number", "Transformer layers")] = None
    hidden_size: Annotated[
        int | None, whole(2, 1 << 20), key("number", "Width; a multiple of `num_attention_heads`")
    ] = None
    num_attention_heads: Annotated[
        int | None,
        whole(1, 1 << 14),
        key("number", "Query heads; a multiple of `num_key_value_heads`"),
    ] = None
    num_key_value_heads: Annotated[
        int | None, whole(1, 1 << 14), key("number", "Key and value heads")
    ] = None
    ffn_hidden_size: Annotated[
        int | None, whole(1, 1 << 22), key("number", "Width of the SwiGLU feed-forward")
    ] = None
    vocab_size: Annotated[
        int | None, whole(2, 1 << 24), key("number", "Size of the vocabulary")
    ] = None
    tied_embeddings: Annotated[
        Flag | None,
        key(
            FLAG_TAKES, "The output head is the input embedding. Default: the preset's, or `false`"
        ),
    ] = None

    def shape(self) -> ModelShape:
        """Return the model. Raises ValueError if sizes are missing or do not fit each other."""
        given = self.model_dump(exclude={"preset", "name"}, exclude_none=True)
        start = {} if self.preset is None else asdict(_preset(self.preset))
        sizes = {**start, **given}
        optional = ("preset", "name", "tied_embeddings")
        missing = [name for name in type(self).model_fields if name not in (*sizes, *optional)]
        if missing:
            raise ValueError(
                f"model lacks {', '.join(missing)}; give every size, or start from a preset:"
                " {preset: llama-3.1-8b, num_layers: 4}"
            )
        generated = f"{self.preset or 'llama'}-{sizes['num_layers']}x{sizes['hidden_size']}"
        name = self.name or (self.preset if self.preset and not given else generated)
        shape = ModelShape(**{**sizes, "name": name})
        if name in PRESETS and PRESETS[name] != shape:
            raise ValueError(
                f"name {name!r} is a preset of other sizes; two definitions need two names"
            )
        return shape


def _preset(name: str) -> ModelShape:
    if name not in PRESETS:
        raise ValueError(
            f"no model preset is called {name[:80]!r}; presets: {', '.join(PRESETS)};"
            f" or give the sizes{did_you_mean(name, PRESETS, cutoff=0.5)}"
        )
    return PRESETS[name]


def _as_sizes(value: Any) -> Any:
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, ModelShape):
        return asdict(value)
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{value!r} is no model; write a preset ({', '.join(PRESETS)}) or a mapping of sizes"
        )
    return value


def _model_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    sizes = core_schema.no_info_before_validator_function(
        _as_sizes, handler.generate_schema(ModelSizes)
    )
    return core_schema.no_info_after_validator_function(
        ModelSizes.shape,
        sizes,
        serialization=core_schema.plain_serializer_function_ser_schema(asdict),
    )


Model = Annotated[
    ModelShape,
    GetPydanticSchema(_model_schema),
    WithJsonSchema({"anyOf": [{"enum": list(PRESETS)}, ModelSizes.model_json_schema()]}),
]

"""The options of the workloads llama and replay, and what the options of all workloads share.

Sweep files are checked by these models, ranks read their requests with them, and documents are
generated from them. What an option does is up to the workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from orchestrator.core.sweepfile.spec_values import Flag, key

MAX_ENTRIES = 512  # of one list or mapping


class WorkloadOptions(BaseModel):
    """Options are stored as the file gives them.

    A default that the file does not give is not stored: it may change its name later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    MAY_VARY: ClassVar[frozenset[str] | None] = frozenset()
    """The options that may be axes, under `axes.options`: other ways to train the same model.

    None: the user invents the names.
    """

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}

    def as_written(self) -> dict[str, Any]:
        """The options that the file gives, in JSON's types."""
        return self.model_dump(mode="json")

    def conditions(self) -> dict[str, Any]:
        """The options that numbers depend on."""
        return self.as_written()


def few_entries(value: Any) -> Any:
    """Refuse a collection that is far too large before its entries are read."""
    if isinstance(value, (list, tuple, Mapping)) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value):,} entries; at most {MAX_ENTRIES}")
    return value


PositiveInt = Annotated[int, Field(strict=True, gt=0, le=1 << 50)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, le=1e9)]


class AttentionKind(StrEnum):
    SDPA = "sdpa"  # torch's scaled_dot_product_attention
    EAGER = "eager"  # stores the score matrix


class GradientDtype(StrEnum):
    BF16 = "bf16"  # 16 bytes per parameter in all
    FP32 = "fp32"  # 20 bytes per parameter in all


class TokenDtype(StrEnum):
    UINT16 = "uint16"
    UINT32 = "uint32"


class LlamaOptions(WorkloadOptions):
    """Options of workload llama."""

    MAY_VARY = frozenset({"attention", "gradient_dtype", "num_threads"})

    attention: Annotated[
        AttentionKind,
        key(
            "`sdpa`, `eager`",
            "`sdpa`: torch's scaled_dot_product_attention, which uses flash attention if the"
            " device has it. `eager`: the score matrix is stored",
        ),
    ] = AttentionKind.SDPA
    gradient_dtype: Annotated[
        GradientDtype,
        key(
            "`bf16`, `fp32`",
            "For training in bf16: keep gradients in bf16, or accumulate them in fp32"
            " (16 or 20 bytes per parameter in all)",
        ),
    ] = GradientDtype.BF16
    learning_rate: Annotated[PositiveFloat, key("number", "Learning rate of AdamW, constant")] = (
        3e-4
    )
    token_file: Annotated[
        str | None,
        Field(min_length=1),
        key("path", "A flat file of token ids. Default: synthetic tokens"),
    ] = None
    token_dtype: Annotated[
        TokenDtype, key("`uint16`, `uint32`", "Type of the ids in that file")
    ] = TokenDtype.UINT16
    num_threads: Annotated[
        PositiveInt, key("number", "Threads per rank on a machine without GPUs (a slot is a core)")
    ] = 1
    memory_limit_bytes: Annotated[
        PositiveInt | None,
        key("number", "On a CPU: run out of memory as a device of this size would"),
    ] = None


class ReplayOptions(WorkloadOptions):
    """Options of workload replay."""

    MAY_VARY = None  # they are columns of the table

    table: Annotated[str, Field(min_length=1), key("path", "A CSV file of measured runs")]
    table_id: Annotated[
        str, Field(min_length=1), key("text", "Which of its tables: a value of column `table_id`")
    ]
    through_ray: Annotated[
        Flag,
        key(
            "`true`, `false`", "Start a process per launch on Ray; otherwise launches take no time"
        ),
    ] = False

    def conditions(self) -> dict[str, Any]:
        """The path and the way to read it change no number; the fingerprint covers the content."""
        return {"table_id": self.table_id}

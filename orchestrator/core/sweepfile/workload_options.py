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
NotNegativeFloat = Annotated[float, Field(strict=True, ge=0, le=1e9)]


class AttentionKind(StrEnum):
    AUTO = "auto"  # by device and precision: workloads/llama/attention_kernel.py
    CUDNN = "cudnn"
    # FlashAttention 2; on a CPU torch's own flash kernel.
    FLASH = "flash"
    FLASH3 = "flash3"
    # xFormers' kernel, the only fused one for fp32 on a GPU.
    EFFICIENT = "efficient"
    EAGER = "eager"  # stores the score matrix


class GradientDtype(StrEnum):
    BF16 = "bf16"  # 16 bytes per parameter in all
    FP32 = "fp32"  # 20 bytes per parameter in all


class ReduceDtype(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


class Accumulate(StrEnum):
    # Reduce and shard the gradients of every micro-batch.
    SCATTER = "scatter"
    # Keep them whole, and reduce their sum.
    LAST = "last"


class TokenDtype(StrEnum):
    UINT16 = "uint16"
    UINT32 = "uint32"


class LlamaOptions(WorkloadOptions):
    """Options of workload llama."""

    MAY_VARY = frozenset(
        {
            "accumulate",
            "attention",
            "bucket_megabytes",
            "clip_gradients",
            "compile",
            "gradient_dtype",
            "loss",
            "num_threads",
            "reduce_dtype",
            "replicas",
        }
    )

    compile: Annotated[
        Flag | None,
        key("`true`, `false`", "Compile each layer with torch.compile. Default: on GPUs"),
    ] = None
    attention: Annotated[
        AttentionKind,
        key(
            "`auto`, `cudnn`, `flash`, `flash3`, `efficient`, `eager`",
            "The kernel of attention. `auto`: cuDNN from SM 9.0 on with a cuDNN newer than 9.15.0,"
            " else flash; in fp32 on a GPU efficient. `flash3`: where it is installed. `eager`: the"
            " score matrix is stored. No trial falls back to another kernel; the one that ran is"
            " stored as `attention_kernel`",
        ),
    ] = AttentionKind.AUTO
    loss: Annotated[
        str,
        Field(pattern=r"^(whole|chunked:[1-9]\d{0,3})$"),
        key(
            "`whole`, `chunked:N`",
            "`chunked:8`: the head and the loss in turn for at most 8 chunks of the tokens, of at"
            " least 128 each, forward and backward, so that only the logits of one chunk exist."
            " `whole`: all logits at once",
        ),
    ] = "chunked:8"
    gradient_dtype: Annotated[
        GradientDtype,
        key(
            "`bf16`, `fp32`",
            "For training in bf16 with `zero_stage: 0`: keep gradients in bf16, or accumulate them"
            " in fp32 (16 or 20 bytes per parameter in all)",
        ),
    ] = GradientDtype.BF16
    reduce_dtype: Annotated[
        ReduceDtype,
        key("`fp32`, `bf16`", "Average gradients over replicas in this precision"),
    ] = ReduceDtype.FP32
    bucket_megabytes: Annotated[
        PositiveInt | None,
        key(
            "number",
            "Gradients that DDP (`zero_stage: 0`) averages at once. Default: 200 on GPUs, else 25",
        ),
    ] = None
    accumulate: Annotated[
        Accumulate,
        key(
            "`scatter`, `last`",
            "With `zero_stage` above 0 and several micro-batches: `scatter`: average and shard the"
            " gradients of each. `last`: keep them whole, average after the last (only stage 1)",
        ),
    ] = Accumulate.SCATTER
    replicas: Annotated[
        PositiveInt,
        key(
            "number",
            "With `zero_stage` above 0: the number of groups of ranks; each shards the states"
            " among its own (HSDP). It divides `data_parallel_size`",
        ),
    ] = 1
    clip_gradients: Annotated[
        NotNegativeFloat,
        key("number", "The largest norm of the gradients; they are scaled down to it. 0: any"),
    ] = 1.0
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

    def compiles(self, *, on_gpu: bool) -> bool:
        """Return whether layers are compiled on such a device."""
        return on_gpu if self.compile is None else self.compile

    @property
    def loss_chunks(self) -> int | None:
        """The most parts of the tokens for which the loss is computed in turn; None: as a whole."""
        kind, _, number = self.loss.partition(":")
        return None if kind == "whole" else int(number)


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

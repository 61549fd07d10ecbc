"""The options of this workload, as a sweep file writes them under `workload.options`. Checked once, here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workloads.rank import ConfigRejected


class AttentionKind(StrEnum):
    SDPA = "sdpa"  # scaled_dot_product_attention: flash where the device has it
    EAGER = "eager"  # the score matrix is written out, as before FlashAttention


class GradientDtype(StrEnum):
    BF16 = "bf16"  # 16 bytes a parameter in all
    FP32 = "fp32"  # 20 bytes a parameter in all


class TokenDtype(StrEnum):
    UINT16 = "uint16"
    UINT32 = "uint32"


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    attention: AttentionKind = AttentionKind.SDPA
    gradient_dtype: GradientDtype = GradientDtype.BF16  # with precision bf16; fp32 training keeps fp32 gradients
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    token_file: Path | None = None  # flat file of token ids; None: synthetic tokens
    token_dtype: TokenDtype = TokenDtype.UINT16
    num_threads: Annotated[int, Field(ge=1)] = 1  # of one rank on a machine without GPUs, where a slot is a core
    memory_limit_bytes: Annotated[int, Field(gt=0)] | None = None  # on a CPU: act as a device of so much memory


def parse_options(options: Mapping[str, Any]) -> Options:
    """Raises ConfigRejected with every mistake and what is allowed."""
    try:
        return Options.model_validate(dict(options))
    except ValidationError as exc:
        mistakes = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors(include_url=False))
        raise ConfigRejected(f"workload.options: {mistakes}. Allowed are {', '.join(Options.model_fields)}") from exc

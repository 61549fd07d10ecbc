"""One way to run a cell: how the GPUs share the work, and what is recomputed.

Knows nothing of models or machines; whether a layout is legal or fits is said elsewhere (space, memory).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from string import ascii_letters, digits
from types import MappingProxyType

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dp": "data_parallel_size",
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "cp": "context_parallel_size",
        "mbs": "micro_batch_size",
        "ga": "grad_accum_steps",
    }
)


class RecomputeMode(StrEnum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class SelectivePolicy(StrEnum):
    """What selective recomputation drops: the attention core (Korthikanti et al. 2022), or every second matmul (torchtitan)."""

    ATTENTION = "attention"
    OPS = "ops"


class Precision(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


_RECOMPUTE_TEXT = re.compile(r"(none|full|selective(?:_(attention|ops))?)(?::([1-9]\d{0,4}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Activation recomputation: its mode, the policy where it is selective, and for how many layers from the first (None: all)."""

    mode: RecomputeMode = RecomputeMode.NONE
    policy: SelectivePolicy | None = None
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if (self.mode is RecomputeMode.SELECTIVE) != (self.policy is not None):
            raise ValueError(
                f"recompute {self.mode}: a policy belongs to selective, and only to it; got {self.policy}"
            )
        if self.num_layers is not None and (self.mode is RecomputeMode.NONE or self.num_layers < 1):
            raise ValueError(
                f"recompute {self.mode} for {self.num_layers} layers: expected a mode other than none and at least 1 layer"
            )

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Read `none`, `full`, `full:8` (first 8 layers), `selective` (= `selective_ops`), `selective_attention:4`.

        Raises ValueError with what is allowed.
        """
        match = _RECOMPUTE_TEXT.fullmatch(text)
        if match is None or (text.startswith("none") and text != "none"):
            raise ValueError(
                f"recompute {text!r} is not one of none, full, selective, selective_ops, selective_attention, each but none with an optional :LAYERS (full:8)"
            )
        mode = RecomputeMode(match[1].split("_")[0])
        policy = (
            SelectivePolicy(match[2] or SelectivePolicy.OPS)
            if mode is RecomputeMode.SELECTIVE
            else None
        )
        return cls(mode=mode, policy=policy, num_layers=int(match[3]) if match[3] else None)

    def __str__(self) -> str:
        text = f"{self.mode}_{self.policy}" if self.policy else str(self.mode)
        return f"{text}:{self.num_layers}" if self.num_layers is not None else text

    def layers_of(self, num_layers: int) -> int:
        """How many of a model's layers are recomputed."""
        if self.mode is RecomputeMode.NONE:
            return 0
        return num_layers if self.num_layers is None else min(self.num_layers, num_layers)


NO_RECOMPUTE = Recompute()

OptionValue = str | int | bool
Options = tuple[
    tuple[str, OptionValue], ...
]  # name, value: options of the workload that vary, sorted by name


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    micro_batch_size: int = 1  # sequences per replica per forward
    grad_accum_steps: int = 1
    recompute: Recompute = field(default=NO_RECOMPUTE)
    zero_stage: int = 0
    precision: Precision = Precision.BF16
    options: Options = ()

    def __post_init__(self) -> None:
        if not self.options:
            return
        names = [name for name, _ in self.options]
        if names != sorted(set(names)):
            raise ValueError(
                f"options {', '.join(names)}: expected each name once, in alphabetical order"
            )

    def option(self, name: str) -> OptionValue | None:
        """The value of an option of the layout; None where it has no such option."""
        return dict(self.options).get(name)

    @property
    def world_size(self) -> int:
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step: exact by construction."""
        return self.data_parallel_size * self.micro_batch_size * self.grad_accum_steps

    @property
    def key(self) -> str:
        """A readable, stable name: used in SQL, logs and on the command line."""
        options = "".join(f"-{name}={_option_text(value)}" for name, value in self.options)
        return (
            f"dp{self.data_parallel_size}_tp{self.tensor_parallel_size}_pp{self.pipeline_parallel_size}_cp{self.context_parallel_size}"
            f"_mbs{self.micro_batch_size}_ga{self.grad_accum_steps}_{str(self.recompute).replace(':', '.')}_z{self.zero_stage}_{self.precision}{options}"
        )

    @property
    def short(self) -> str:
        """The key without the parts that are at their neutral value, for tables meant for people."""
        parts = [f"dp{self.data_parallel_size}"]
        parts += [
            f"{name}{size}"
            for name, size in (
                ("tp", self.tensor_parallel_size),
                ("pp", self.pipeline_parallel_size),
                ("cp", self.context_parallel_size),
            )
            if size > 1
        ]
        parts += [f"mbs{self.micro_batch_size}", f"ga{self.grad_accum_steps}", str(self.recompute)]
        parts += [f"z{self.zero_stage}"] if self.zero_stage else []
        return " ".join(
            [*parts, str(self.precision), *([self.option_text] if self.options else [])]
        )

    @property
    def option_text(self) -> str:
        """The options alone, readable: `attention=eager fused=true`."""
        return " ".join(f"{name}={_option_text(value)}" for name, value in self.options)


def _option_text(value: OptionValue) -> str:
    """The value so that it can stand in a name, and be read back: a text that looks like a number or a truth value is escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "".join(
        chr(byte) if chr(byte) in _PLAIN else f"%{byte:02X}" for byte in str(value).encode()
    )
    if isinstance(value, str) and _LITERAL.fullmatch(text):
        return f"%{ord(text[0]):02X}{text[1:]}"
    return text


def _option_value(text: str) -> OptionValue:
    if _LITERAL.fullmatch(text):
        return text == "true" if text in ("true", "false") else int(text)
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), text.encode()).decode()


_PLAIN = frozenset(ascii_letters + digits + "_.+,:@~-")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_LITERAL = re.compile(r"true|false|-?\d{1,18}")
_OPTION = re.compile(r"-([A-Za-z_]\w*)=([^=]*?)(?=-[A-Za-z_]\w*=|$)", re.ASCII)
_KEY = re.compile(
    r"dp(\d+)_tp(\d+)_pp(\d+)_cp(\d+)_mbs(\d+)_ga(\d+)_([a-z_]+(?:\.\d+)?)_z([0-3])_(fp32|bf16|fp16|fp8)((?:-[A-Za-z_]\w*=[^=]*?)*)",
    re.ASCII,
)


def parse_key(key: str) -> Layout:
    """Read a `Layout.key` back. Raises ValueError when it is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(
            f"layout {key!r} is not of the form dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16, with -NAME=VALUE behind it for each option that varies"
        )
    dp, tp, pp, cp, mbs, ga = (int(match[i]) for i in range(1, 7))
    return Layout(
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        micro_batch_size=mbs,
        grad_accum_steps=ga,
        recompute=Recompute.parse(match[7].replace(".", ":")),
        zero_stage=int(match[8]),
        precision=Precision(match[9]),
        options=tuple((found[1], _option_value(found[2])) for found in _OPTION.finditer(match[10])),
    )

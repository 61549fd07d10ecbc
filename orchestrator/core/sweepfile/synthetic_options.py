"""The options of workload synthetic, with the faults and the drift that it can simulate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.problem.layout import SHORT_NAMES, Layout
from orchestrator.core.sweepfile.spec_values import Flag, key
from orchestrator.core.sweepfile.suggestion import did_you_mean
from orchestrator.core.sweepfile.workload_options import (
    PositiveFloat,
    PositiveInt,
    WorkloadOptions,
    few_entries,
)

LAYOUT_NAMES = (*(field.name for field in fields(Layout)), "world_size", "global_batch_size")
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class FaultKind(StrEnum):
    OOM = "oom"
    HOST_OOM = "host_oom"
    CONFIG_REJECTED = "config_rejected"
    CRASH = "crash"
    EXIT = "exit"
    SEGFAULT = "segfault"
    ABORT = "abort"
    NAN_LOSS = "nan_loss"
    PREEMPTED = "preempted"
    XID = "xid"
    LOST_RANK = "lost_rank"
    HANG = "hang"
    HANG_IN_C = "hang_in_c"
    HANG_IGNORING_SIGNALS = "hang_ignoring_signals"
    STOP = "stop"
    NCCL_NOISE = "nccl_noise"
    NCCL_ERROR = "nccl_error"
    PORT_CLASH = "port_clash"
    RUBBISH_RESULT = "rubbish_result"
    NO_RESULT = "no_result"
    LEAK_CHILDREN = "leak_children"
    LEAK_UNMARKED_CHILD = "leak_unmarked_child"
    LOG_FLOOD = "log_flood"


FAULTS: Mapping[FaultKind, str] = {
    FaultKind.OOM: "torch's out-of-memory error",
    FaultKind.HOST_OOM: "MemoryError",
    FaultKind.CONFIG_REJECTED: "the workload refuses the layout",
    FaultKind.CRASH: "an exception",
    FaultKind.EXIT: "exit code 1 without a message",
    FaultKind.SEGFAULT: "SIGSEGV",
    FaultKind.ABORT: "SIGABRT",
    FaultKind.NAN_LOSS: "the loss is NaN",
    FaultKind.PREEMPTED: "SIGTERM",
    FaultKind.XID: "the driver's Xid 79 in the log, and a CUDA error",
    FaultKind.LOST_RANK: "SIGKILL",
    FaultKind.HANG: "sleeps forever",
    FaultKind.HANG_IN_C: "hangs in C code and keeps the interpreter lock",
    FaultKind.HANG_IGNORING_SIGNALS: "hangs and ignores every signal that can be ignored",
    FaultKind.STOP: "SIGSTOP",
    FaultKind.NCCL_NOISE: "harmless NCCL messages in the log",
    FaultKind.NCCL_ERROR: "an NCCL error",
    FaultKind.PORT_CLASH: "an address already in use",
    FaultKind.RUBBISH_RESULT: "a result that cannot be read",
    FaultKind.NO_RESULT: "exit code 0 without a result",
    FaultKind.LEAK_CHILDREN: "leaves a child, a grandchild, daemons and loader workers running",
    FaultKind.LEAK_UNMARKED_CHILD: "leaves a child in its own session with an empty environment",
    FaultKind.LOG_FLOOD: "prints 30 MB",
}
_FAULT_AT = re.compile(r"init|forward|teardown|step_[1-9]\d{0,8}")


def _at(value: str) -> str:
    if not _FAULT_AT.fullmatch(value):
        places = ("init", "forward", "step_1", "teardown")
        raise ValueError(
            f"{value[:80]!r} is not one of init, forward, step_N (step_3), teardown"
            f"{did_you_mean(value, places)}"
        )
    return value


def _only_if(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(
            "only_if takes fields of a layout with their values:"
            " {micro_batch_size: 8, recompute: none}"
        )
    for name, wanted in value.items():
        if name not in LAYOUT_NAMES:
            short = SHORT_NAMES.get(name)
            hint = f"; did you mean {short}?" if short else did_you_mean(name, LAYOUT_NAMES)
            raise ValueError(
                f"{str(name)[:80]!r} is no field of a layout; the fields are"
                f" {', '.join(LAYOUT_NAMES)}{hint}"
            )
        if isinstance(wanted, bool) or not isinstance(wanted, (int, str)):
            raise ValueError(f"{name} takes one number or word, not {str(wanted)[:80]!r}")
    return value


class SyntheticFault(WorkloadOptions):
    """A fault of the layouts and ranks that it names."""

    fault: Annotated[FaultKind, key("a fault", "What fails: a word of the next table")]
    at: Annotated[
        str,
        AfterValidator(_at),
        WithJsonSchema({"type": "string", "pattern": f"^({_FAULT_AT.pattern})$"}),
        key("`init`, `forward`, `step_N`, `teardown`", "Where a rank fails"),
    ] = "forward"
    rank: Annotated[
        int | None, Field(strict=True, ge=0), key("number", "The rank. Default: every rank")
    ] = None
    only_if: Annotated[
        Mapping[str, int | str],
        BeforeValidator(_only_if),
        key("mapping", "Fields of a layout with the values that they must have. Default: any"),
    ] = {}
    probability: Annotated[Fraction, key("fraction", "Drawn once per attempt")] = 1.0
    first_attempt_only: Annotated[
        Flag, key("`true`, `false`", "Only in the first attempt of a trial")
    ] = False


class DriftKind(StrEnum):
    SLOW_START = "slow_start"
    STEP = "step"
    WAVE = "wave"
    SLOW_NODE = "slow_node"


DRIFTS: Mapping[DriftKind, str] = {
    DriftKind.SLOW_START: "for the first `seconds`, steps take `1 + size` times as long",
    DriftKind.STEP: "after `seconds`, steps take `1 + size` times as long; below 0 is faster",
    DriftKind.WAVE: "slower by up to `size` and back, once every `seconds`",
    DriftKind.SLOW_NODE: "gangs with this `node` always take `1 + size` times as long",
}


class SyntheticDrift(WorkloadOptions):
    """A change of the machine's speed."""

    kind: Annotated[DriftKind, key("a kind", "How speed changes: a word of the next table")]
    size: Annotated[
        float,
        Field(strict=True, gt=-0.9, le=10.0),
        key("number", "By how much, relative: 0.6 is 1.6 times as long"),
    ]
    seconds: Annotated[PositiveFloat, key("number", "Since `sweep run` was called")] = 600.0
    node: Annotated[
        str | None,
        Field(strict=True, min_length=1, max_length=255),
        key("a name", "The node that changes, as the scheduler calls it. Default: all nodes"),
    ] = None

    @model_validator(mode="after")
    def _has_its_node(self) -> Self:
        if self.kind is DriftKind.SLOW_NODE and self.node is None:
            raise ValueError(
                "slow_node needs the name of the slow node:"
                " {kind: slow_node, size: 0.3, node: node-1}"
            )
        return self


def _device_name(value: str) -> str:
    if value not in DEVICES:
        begun = next((name for name in DEVICES if name.startswith(value)), None)
        hint = f"; did you mean {begun}?" if begun else did_you_mean(value, DEVICES)
        raise ValueError(f"{value[:80]!r} is not one of {', '.join(DEVICES)}{hint}")
    return value


class SyntheticOptions(WorkloadOptions):
    """Options of workload synthetic."""

    MAY_VARY = frozenset({"time_scale", "sleep"})

    device_name: Annotated[
        str,
        AfterValidator(_device_name),
        WithJsonSchema({"enum": list(DEVICES)}),
        key("device", "The device to simulate, by its name in the table of devices"),
    ] = "h100-sxm"
    device_memory_bytes: Annotated[
        PositiveInt | None, key("number", "Memory of that device, in place of the data sheet's")
    ] = None
    noise: Annotated[
        Fraction, key("fraction", "Standard deviation of the logarithm of step times")
    ] = 0.02
    time_scale: Annotated[PositiveFloat, key("number", "Multiplies step times")] = 1.0
    sleep: Annotated[
        Flag,
        key("`true`, `false`", "Sleep for the time reported; otherwise a trial takes milliseconds"),
    ] = False
    one_rank_per_node: Annotated[
        Flag, key("`true`, `false`", "One process simulates all ranks of a node")
    ] = False
    faults: Annotated[
        tuple[SyntheticFault, ...], BeforeValidator(few_entries), key("list", "Faults: see below")
    ] = ()
    drift: Annotated[
        tuple[SyntheticDrift, ...],
        BeforeValidator(few_entries),
        key("list", "Changes of the machine's speed: see below"),
    ] = ()

    def conditions(self) -> dict[str, Any]:
        """The number of processes changes no number: all of them draw the same noise."""
        options = self.as_written()
        options.pop("one_rank_per_node", None)
        return options

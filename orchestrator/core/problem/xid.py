"""NVIDIA's error numbers ("Xid") in the kernel's log and NVML's events: what each means, whether it
ends programs, and whose fault it is.

Meanings and causes are from NVIDIA's catalogue,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class XidCause(StrEnum):
    # The hardware, its links or its firmware; programs on the device end.
    DEVICE = "device"
    # The device mended or noted something; no program ends.
    NOTICE = "notice"
    # A program did it: the device is well.
    PROGRAM = "program"
    # Cleaning up after another error: means nothing by itself.
    AFTERMATH = "aftermath"


@dataclass(frozen=True, slots=True)
class Xid:
    meaning: str
    cause: XidCause
    # A device's error that ends only the program that met it; others go on.
    is_contained: bool = False


_C = XidCause
XIDS: Mapping[int, Xid] = MappingProxyType(
    {
        13: Xid("graphics engine exception", _C.PROGRAM),
        31: Xid("GPU memory page fault", _C.PROGRAM),
        32: Xid("corrupted push buffer stream", _C.PROGRAM),
        43: Xid("GPU stopped processing", _C.PROGRAM),
        45: Xid("preemptive clean-up after an earlier error", _C.AFTERMATH),
        48: Xid("double-bit ECC error", _C.DEVICE),
        61: Xid("internal microcontroller breakpoint", _C.NOTICE),
        62: Xid("internal microcontroller halt", _C.DEVICE),
        63: Xid("memory row remapped", _C.NOTICE),
        64: Xid("memory row could not be remapped", _C.DEVICE),
        69: Xid("graphics engine class error", _C.PROGRAM),
        74: Xid("NVLink error", _C.DEVICE),
        79: Xid("GPU has fallen off the bus", _C.DEVICE),
        92: Xid("high rate of corrected ECC errors", _C.NOTICE),
        94: Xid("contained ECC error", _C.DEVICE, is_contained=True),
        95: Xid("uncontained ECC error", _C.DEVICE),
        119: Xid("GSP firmware does not answer", _C.DEVICE),
        120: Xid("GSP firmware error", _C.DEVICE),
        137: Xid("NVLink access without permission", _C.PROGRAM),
        140: Xid("unrecovered ECC error", _C.DEVICE),
    }
)

_LINE = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")


def named(number: int) -> str:
    """`Xid 79 (GPU has fallen off the bus)`."""
    known = XIDS.get(number)
    return f"Xid {number} ({known.meaning})" if known is not None else f"Xid {number}"


def xids_in(text: str) -> tuple[int, ...]:
    """The numbers in lines of the kernel's log, in order."""
    return tuple(int(number) for number in _LINE.findall(text))


def first_of(numbers: Iterable[int], cause: XidCause) -> int | None:
    """The first of these errors with such a cause."""
    return next(
        (number for number in numbers if number in XIDS and XIDS[number].cause is cause), None
    )

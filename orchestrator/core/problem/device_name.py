"""The names of devices: the driver's, and the shorter one that Ray makes of it.

`T4` is Ray's name of a `Tesla T4`. Several devices may have one name of Ray's.
"""

from __future__ import annotations

import re

# The maker, words in capitals, and the first of them that has a digit: `RTX PRO 6000`, `A100` of
# `A100-SXM4-80GB`.
_MODEL = re.compile(r"\w+ +((?:[A-Z]+ +)*[A-Z]*[0-9][A-Z0-9]*)")
# Older versions of Ray: the capitals and digits that the first word after the maker begins with.
_FIRST_WORD = re.compile(r"\w+ +([A-Z0-9]{2,})")


def ray_name_of(driver_name: str) -> str:
    """Return Ray's name of the GPU that its driver calls so, as Ray 2.60 makes it.

    It has no spaces (NvidiaGPUAcceleratorManager in ray/_private/accelerators/nvidia_gpu.py).
    """
    model = _MODEL.match(driver_name)
    name = model[1] if model is not None else driver_name.removeprefix("NVIDIA ")
    return "-".join(name.split())


def may_be_called(name: str, driver_name: str) -> bool:
    """Return whether a name is the driver's, or the one that some version of Ray makes of it."""
    first = _FIRST_WORD.match(driver_name)
    older = first[1] if first is not None else None
    return name in (driver_name, ray_name_of(driver_name), older)


def driver_name_of(name: str | None, *, among: str | None) -> str | None:
    """Return the driver's name of GPUs that Ray calls so; Ray's, if no driver tells.

    `among`: the name that a driver gives a GPU.
    """
    if name is not None and among is not None and may_be_called(name, among):
        return among
    return name

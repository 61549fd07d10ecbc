"""The cores that are near a GPU: those of its NUMA node, as the kernel tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def cores_near(
    addresses: Sequence[str | None],
    *,
    pci_devices: Path = PCI_DEVICES,
    allowed: frozenset[int] | None = None,
) -> list[tuple[int, ...]]:
    """The cores of each device's NUMA node that this process may use; empty: bind to none.

    `addresses`: the devices' places on the bus, `0000:3b:00.0`; None: unknown. On a machine with a
    single node there is nothing to bind. All or none: ranks must not differ.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    found = [_near(address, pci_devices) & allowed for address in addresses]
    if not found or not all(found) or all(cores == allowed for cores in found):
        return [() for _ in addresses]
    return [tuple(sorted(cores)) for cores in found]


def as_list(cores: Sequence[int]) -> str:
    """Cores as the kernel writes them: `0-3,8-11`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def _near(address: str | None, pci_devices: Path) -> frozenset[int]:
    if address is None:
        return frozenset()
    try:
        text = (pci_devices / address.lower() / "local_cpulist").read_text().strip()
        return frozenset(
            core
            for part in text.split(",")
            if part
            for core in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
        )
    except (OSError, ValueError):
        return frozenset()

"""Short texts of known numbers of bytes, the same in tables and in the reasons of a search."""

from __future__ import annotations

_GIB, _MIB = 1 << 30, 1 << 20


def memory_text(num_bytes: float) -> str:
    """`61.2 GiB`, `30.5 MiB`: the unit that fits."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    if 0 < num_bytes < _MIB:
        return f"{num_bytes / 1024:.1f} KiB"
    return f"{num_bytes / _MIB:.1f} MiB"


def memory_of_limit_text(num_bytes: float, limit_bytes: float) -> str:
    """Used memory and its limit: `61.2 of 79.1 GiB`, `0.016 of 79.1 GiB`."""
    unit, name = (_GIB, "GiB") if limit_bytes >= _GIB else (_MIB, "MiB")
    digits = 1 if num_bytes >= unit else 3
    return f"{num_bytes / unit:.{digits}f} of {limit_bytes / unit:.1f} {name}"

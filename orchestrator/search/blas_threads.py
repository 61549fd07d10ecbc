"""Keep numpy's linear algebra to one thread for a while.

Its matrices are small here, and with running trials on the same cores its threads wait for each
other. Measured on 2 busy cores, 150 asks of a search over 800 layouts: 2.3 to 3.0 s with threads,
0.7 s without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

# As numpy's wheels name OpenBLAS's functions, and as OpenBLAS itself does.
_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within the block use one thread, if numpy brought its own OpenBLAS; else change nothing."""
    library = _openblas()
    if library is None:
        yield
        return
    get_threads, set_threads = library
    before = get_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@cache
def _openblas() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    # The library that numpy has loaded: opening it by its path gives the same one.
    for path in sorted((Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))
        for name in _NAMES:
            if hasattr(library, name.format("set")):
                return library[name.format("get")], library[name.format("set")]
    return None

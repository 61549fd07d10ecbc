"""Exact bytes of live tensors, without an allocator to ask. Slow, so never on while timing.

A dispatch mode sees every tensor that an operation returns, and follows its storage until it is
freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Follows the bytes of live tensors while active: of those given, and of all that operations
    make.

    Raises torch.OutOfMemoryError in the operation that exceeds `limit_bytes`.
    """

    def __init__(self, alive: Iterable[Tensor] = (), *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.live_bytes = 0
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in alive:
            self._follow(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes()

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= num_bytes

        if self._limit_bytes is not None and self.live_bytes + num_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {_mib(num_bytes)}. "
                f"The limit is {_mib(self._limit_bytes)} (option memory_limit_bytes), "
                f"of which {_mib(self.live_bytes)} is held by live tensors"
            )
        self._storages[key] = weakref.ref(storage, forget)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.2f} MiB"

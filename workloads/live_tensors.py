"""Exact bytes of live tensors, without an allocator to ask. Slow, so never on while timing.

A dispatch mode sees every tensor that an operation returns, and follows its storage until it is
freed. Of a distributed tensor it follows this rank's part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Follows the bytes of live tensors while active: of those given, and of all that operations
    make. Compiled layers run in eager mode meanwhile: torch compiles nothing under such a mode.

    Raises torch.OutOfMemoryError in the operation that exceeds `limit_bytes`.
    """

    def __init__(self, alive: Iterable[Tensor] = (), *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.live_bytes = 0
        self.peak_bytes = 0
        self._limit_bytes = limit_bytes
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}
        self._active = ExitStack()
        for tensor in alive:
            self._follow(tensor.untyped_storage())

    def __enter__(self) -> LiveTensors:
        self._active.enter_context(torch.compiler.set_stance("force_eager"))
        self._active.enter_context(_resizes_told(self._resize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._active.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                own = leaf.to_local() if hasattr(leaf, "to_local") else leaf
                self._follow(own.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.live_bytes -= self._bytes.pop(key)

        self._add(storage.nbytes())
        self._storages[key] = weakref.ref(storage, forget)
        self._bytes[key] = storage.nbytes()

    def _resize(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            num_bytes = storage.nbytes()
            self._add(num_bytes - self._bytes[key])
            self._bytes[key] = num_bytes

    def _add(self, num_bytes: int) -> None:
        limit = self._limit_bytes
        if limit is not None and num_bytes > 0 and self.live_bytes + num_bytes > limit:
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {_mib(num_bytes)}. "
                f"The limit is {_mib(limit)} (option memory_limit_bytes), "
                f"of which {_mib(self.live_bytes)} is held by live tensors"
            )
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@contextmanager
def _resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """FSDP frees and takes the memory of gathered weights by resizing storages: no operation."""
    resize = torch.UntypedStorage.resize_

    def told(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        tell(storage)
        return result

    torch.UntypedStorage.resize_ = told  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.2f} MiB"

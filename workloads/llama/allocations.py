"""Records the allocations of tensors in steps: by tracking them on a CPU, by CUDA's allocator on
a GPU.

Backward passes and optimizers are told apart by torch's own calls, so this knows no model and no
schedule.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from orchestrator.core.trial.memory_timeline import (
    Allocation,
    Mark,
    MemoryKind,
    Moment,
    Note,
    allocations_of_history,
    timeline,
)
from orchestrator.core.trial.step_part import StepPart
from workloads.live_tensors import LiveTensors

# Entries that the allocator keeps: four steps of thousands of allocations each.
_HISTORY_ENTRIES = 1_000_000


class Recorder(Protocol):
    """Something that knows the allocations of tensors."""

    def now(self) -> float: ...

    def recording(self) -> AbstractContextManager[object]: ...

    def note(self, kind: MemoryKind, tensors: Iterable[Tensor]) -> None:
        """Note the kind of these tensors, which exist now."""
        ...

    def allocations(self) -> list[Allocation]: ...


class TrackedTensors(LiveTensors):  # type: ignore[no-untyped-call]  # as LiveTensors
    """The allocations of tensors on a CPU. Times count allocations and frees."""

    def __init__(self) -> None:
        super().__init__()
        self._allocations: list[Allocation] = []
        self._index_by_storage: dict[int, int] = {}  # of what is not freed
        # So that the end of a storage is noticed, and its key may be used again.
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._changes = 0

    def now(self) -> float:
        """Return the number of allocations and frees so far."""
        return self._changes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the allocations until the end of the context."""
        with self:
            yield

    def note(self, kind: MemoryKind, tensors: Iterable[Tensor]) -> None:
        """Note the kind of these tensors, which exist now, unless it is known."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # It may have been there before: only results of operations are seen.
            self._follow(storage)
            index = self._index_by_storage.get(storage._cdata)
            if index is not None and self._allocations[index].kind is None:
                self._allocations[index] = replace(self._allocations[index], kind=kind)

    def allocations(self) -> list[Allocation]:
        """Return what was recorded, in the order of the allocations."""
        return list(self._allocations)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        super()._follow(storage)
        key = storage._cdata
        if key in self._ends:
            return

        def forget(_: object) -> None:
            del self._ends[key]
            self._end(key)

        self._ends[key] = weakref.ref(storage, forget)
        self._begin(key, storage.nbytes())

    def _resize(self, storage: torch.UntypedStorage) -> None:
        """FSDP takes and frees the memory of gathered weights by resizing their storages."""
        super()._resize(storage)
        key = storage._cdata
        if key not in self._ends:
            return
        self._end(key, kind=MemoryKind.PARAMETERS)
        if storage.nbytes():
            self._begin(key, storage.nbytes(), kind=MemoryKind.PARAMETERS)

    def _begin(self, key: int, num_bytes: int, *, kind: MemoryKind | None = None) -> None:
        self._changes += 1
        self._index_by_storage[key] = len(self._allocations)
        self._allocations.append(Allocation(num_bytes=num_bytes, made_at=self._changes, kind=kind))

    def _end(self, key: int, *, kind: MemoryKind | None = None) -> None:
        index = self._index_by_storage.pop(key, None)
        if index is not None:
            self._changes += 1
            allocation = self._allocations[index]
            self._allocations[index] = replace(
                allocation, freed_at=self._changes, kind=allocation.kind or kind
            )


class AllocatorHistory:
    """The allocations of tensors on a CUDA device. Times are microseconds of the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[int, int] = {}
        self._notes: list[Note] = []
        self._entries: list[dict[str, Any]] = []
        self._records = False

    def now(self) -> float:
        """Return microseconds of the wall clock, as the allocator's history has them."""
        return time.time() * 1e6

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the allocations until the end of the context."""
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", max_entries=_HISTORY_ENTRIES
        )
        self._records = True
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            snapshot: Any = torch.cuda.memory._snapshot()
            self._entries = snapshot["device_traces"][self._device.index or 0]
            torch.cuda.memory._record_memory_history(None)
            self._records = False

    def note(self, kind: MemoryKind, tensors: Iterable[Tensor]) -> None:
        """Note the kind of these tensors, which exist now."""
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cuda]
        if not self._records:
            self._before |= {each.data_ptr(): each.nbytes() for each in storages}
        addresses = [each.data_ptr() for each in storages]
        self._notes.append(Note(at=self.now(), kind=kind, addresses=addresses))

    def allocations(self) -> list[Allocation]:
        """Return what was recorded, in the order of the allocations."""
        return allocations_of_history(self._entries, before=self._before, notes=self._notes)


@dataclass(eq=False, kw_only=True)
class StepMarks:
    """Marks the parts of steps, as torch's backward pass and optimizers are called."""

    recorder: Recorder
    step: int = 0
    marks: list[Mark] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Note that a step begins, with its forward pass."""
        self.step = step
        self._mark(StepPart.FORWARD)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark backward passes and optimizers until the end of the context."""
        backward = torch.autograd.backward

        def marked(*args: Any, **kwargs: Any) -> None:
            self._mark(StepPart.BACKWARD)
            try:
                backward(*args, **kwargs)
            finally:
                self._mark(StepPart.FORWARD)

        def before_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            gradients = [w.grad for w in weights if w.grad is not None]
            self.recorder.note(MemoryKind.GRADIENTS, map(local, gradients))
            # What followed the last backward pass prepared this: norms, and copies of gradients.
            self.marks[-1] = replace(self.marks[-1], part=StepPart.OPTIMIZER)

        handle = register_optimizer_step_pre_hook(before_optimizer)
        torch.autograd.backward = marked
        try:
            yield
        finally:
            torch.autograd.backward = backward
            handle.remove()

    def moments(self, end: float) -> list[Moment]:
        """Return the memory by kind over time, until `end` by the recorder's clock."""
        return timeline(self.recorder.allocations(), self.marks, end=end)

    def _mark(self, part: StepPart) -> None:
        self.marks.append(Mark(at=self.recorder.now(), step=self.step, part=part))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

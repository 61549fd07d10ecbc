"""A rank's peak memory by part: from CUDA's allocator, or the sum of live tensors on a CPU.

Both measure a whole optimizer step after all lazy allocations, and activations in a step that is
not timed. On a device that step may not find its memory: then the parts are unknown, and what was
measured before remains valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from workloads.live_tensors import LiveTensors

logger = logging.getLogger(__name__)

# An optimizer step that calls its argument at the end of its forward pass.
StepWithProbe = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, kw_only=True)
class States:
    """Tensors that live from step to step."""

    parameters: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    optimizer: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all of them."""
        return (*self.parameters, *self.gradients, *self.optimizer, *self.constants)

    def bytes_by_part(self) -> dict[str, int]:
        """Return the bytes of each part; views of one storage count once in a part."""
        return {part.name: storage_bytes(getattr(self, part.name)) for part in fields(self)}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind tensors; views of one storage count once."""
    storages = (t.untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The parts add up to the peak; temporaries are what is neither state nor activation.

    Without parts, only the peaks are known.
    """

    peak_allocated_bytes: int
    bytes_by_part: dict[str, int]
    peak_reserved_bytes: int | None = None
    peak_active_bytes: int | None = None
    inactive_split_bytes: int | None = None  # at most
    device_used_bytes: int | None = None  # by everything, after the timed steps
    device_bytes: int | None = None
    allocator_retries: int | None = None
    allocator_ooms: int | None = None


class LiveMemory:
    """The memory of a rank on a CPU, which may have the limit of a device."""

    def __init__(self, states: States, *, limit_bytes: int | None) -> None:
        self.states, self._limit_bytes = states, limit_bytes

    def first_step(self) -> AbstractContextManager[object]:
        """Return the context of the first step: it runs out of memory at the limit."""
        if self._limit_bytes is None:
            return nullcontext()
        return LiveTensors(self.states.tensors(), limit_bytes=self._limit_bytes)

    def after_first_step(self) -> None:
        """Do nothing: the peak is that of a step of its own."""

    def peaks(self) -> MemoryReport | None:
        """Return None: only the untimed step of `report` shows the peaks."""
        return None

    def report(self, step: StepWithProbe) -> MemoryReport:
        """Take a step, and return its peak and its parts, in bytes."""
        tracker = LiveTensors(self.states.tensors())
        bytes_before = tracker.live_bytes
        activations: list[int] = []
        with tracker:
            step(lambda: activations.append(tracker.live_bytes - bytes_before))
        return MemoryReport(
            peak_allocated_bytes=tracker.peak_bytes,
            bytes_by_part=_by_part(self.states, max(activations), tracker.peak_bytes),
            device_bytes=self._limit_bytes,
        )


class DeviceMemory:
    """The memory of a rank on a CUDA device, as torch's allocator counts it."""

    def __init__(self, states: States, *, device: torch.device) -> None:
        self.states, self._device = states, device
        self._retries_before = 0
        # Remains of building the model would count as reserved, and fragment the first step.
        torch.cuda.empty_cache()

    def first_step(self) -> AbstractContextManager[object]:
        """Return the context of the first step, which needs nothing here."""
        return nullcontext()

    def after_first_step(self) -> None:
        """Let the peaks begin with the next step."""
        # The first step makes workspaces and communication buffers; the peak of later steps counts.
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries_before = self._num_retries()

    def peaks(self) -> MemoryReport:
        """Return the peaks since the first step, without a step of its own."""
        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReport(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            bytes_by_part={},
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            peak_active_bytes=stats.get("active_bytes.all.peak"),
            inactive_split_bytes=stats.get("inactive_split_bytes.all.peak"),
            device_used_bytes=total - free,
            device_bytes=torch.cuda.get_device_properties(self._device).total_memory,
            allocator_retries=self._num_retries() - self._retries_before,
            allocator_ooms=stats.get("num_ooms"),
        )

    def report(self, step: StepWithProbe) -> MemoryReport:
        """Return the peaks so far, with the parts of a step that is taken for them.

        If the step finds no memory, the parts are unknown.
        """
        peaks = self.peaks()
        bytes_before = torch.cuda.memory_allocated(self._device)
        activations: list[int] = []
        try:
            step(
                lambda: activations.append(torch.cuda.memory_allocated(self._device) - bytes_before)
            )
        except torch.OutOfMemoryError as exc:
            # A layout at the edge of memory was measured, and this step finds the memory in pieces.
            logger.warning("The memory by part is unknown: %s", str(exc).partition("\n")[0])
            return peaks
        parts = _by_part(self.states, max(activations), peaks.peak_allocated_bytes)
        return replace(peaks, bytes_by_part=parts)

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _by_part(states: States, activation_bytes: int, peak_bytes: int) -> dict[str, int]:
    parts = {**states.bytes_by_part(), "activations": activation_bytes}
    return {**parts, "temporaries": max(0, peak_bytes - sum(parts.values()))}

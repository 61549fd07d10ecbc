"""A trial's memory on a GPU, with simulated counters of torch's allocator: needs no GPU.

Tests marked `gpu` run the whole program on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from workloads.llama.memory import DeviceMemory, States

DEVICE_BYTES = 10_000
NOTHING = States(parameters=(), gradients=(), optimizer=(), constants=())


class Counters:
    """Bytes allocated and reserved, and their peaks since the last reset, as in torch.cuda."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0
        self.retries = self.ooms = 0

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        self.peak, self.peak_reserved = (
            max(self.peak, self.allocated),
            max(self.peak_reserved, self.reserved),
        )
        yield
        self.allocated -= num_bytes

    def reset_peak_memory_stats(self, device: object) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Counters:
    counters = Counters()
    answers: dict[str, Callable[..., object]] = {
        "memory_allocated": lambda _: counters.allocated,
        "max_memory_allocated": lambda _: counters.peak,
        "max_memory_reserved": lambda _: counters.peak_reserved,
        "memory_stats": lambda _: {
            "num_alloc_retries": counters.retries,
            "num_ooms": counters.ooms,
            "active_bytes.all.peak": counters.peak + 7,
            "inactive_split_bytes.all.peak": 70,
        },
        # A context and communication buffers of 900 bytes are outside of the allocator.
        "mem_get_info": lambda _: (DEVICE_BYTES - counters.reserved - 900, DEVICE_BYTES),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=DEVICE_BYTES),
        "reset_peak_memory_stats": counters.reset_peak_memory_stats,
        "empty_cache": counters.empty_cache,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return counters


def test_the_peak_is_that_of_steady_steps_not_of_building_the_first_step_or_looking(
    cuda: Counters,
) -> None:
    with cuda.holding(5000):
        pass  # temporary memory of building
    with cuda.holding(1000):  # the states
        memory = DeviceMemory(NOTHING, device=torch.device("cuda", 0))
        with memory.first_step(), cuda.holding(4000):
            cuda.retries += 2
        memory.after_first_step()
        with cuda.holding(2500):
            cuda.retries += 1

        def untimed_step(after_forward: Callable[[], None]) -> None:
            with cuda.holding(2000):
                after_forward()
                with cuda.holding(3000):
                    pass

        report = memory.report(untimed_step)
    assert report.peak_allocated_bytes == 3500
    assert report.allocator_retries == 1
    assert report.bytes_by_part["activations"] == 2000
    assert report.bytes_by_part["temporaries"] == 1500
    assert report.device_bytes == DEVICE_BYTES


def test_memory_that_building_the_model_left_reserved_does_not_count(cuda: Counters) -> None:
    with cuda.holding(5000):
        pass
    with cuda.holding(1000):
        memory = DeviceMemory(NOTHING, device=torch.device("cuda", 0))
        memory.after_first_step()
        with cuda.holding(500):
            pass
        report = memory.report(lambda after_forward: after_forward())
    assert report.peak_reserved_bytes == 1500


def test_what_the_device_holds_beyond_the_allocator_is_known(cuda: Counters) -> None:
    with cuda.holding(1000):
        memory = DeviceMemory(NOTHING, device=torch.device("cuda", 0))
        memory.after_first_step()
        with cuda.holding(500):
            pass
        peaks = memory.peaks()
    assert (peaks.peak_active_bytes, peaks.inactive_split_bytes) == (1507, 70)
    assert (peaks.device_used_bytes, peaks.allocator_ooms) == (1500 + 900, 0)
    assert not peaks.bytes_by_part, "only a step of its own shows them"


def test_a_step_that_finds_no_memory_to_be_looked_at_costs_the_parts_and_nothing_else(
    cuda: Counters,
) -> None:
    with cuda.holding(1000):
        memory = DeviceMemory(NOTHING, device=torch.device("cuda", 0))
        memory.after_first_step()
        with cuda.holding(2500):
            pass

        def untimed_step(after_forward: Callable[[], None]) -> None:
            after_forward()
            cuda.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        report = memory.report(untimed_step)
    assert report.peak_allocated_bytes == 3500
    assert not report.bytes_by_part
    assert report.allocator_ooms == 0, "of the timed steps"

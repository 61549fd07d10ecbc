from __future__ import annotations

import time

import torch
from torch import Tensor

from workloads.llama.compile_time import CompileTime, timed_compilations


def slow_backend(module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
    time.sleep(0.2)
    return module


def test_compilations_add_up() -> None:
    ticks = iter([10.0, 12.5, 20.0, 20.5])
    found = CompileTime(clock=lambda: next(ticks))
    for _ in range(2):
        found.start()
        found.end()
    assert found.seconds == 3.0


def test_the_time_is_that_of_compiling_and_not_of_the_compiled_program() -> None:
    def slow(x: Tensor) -> Tensor:
        return x + 1

    compiled = torch.compile(slow, backend=slow_backend, dynamic=False)
    begin = time.perf_counter()
    with timed_compilations() as found:
        compiled(torch.ones(3))
        first = found.seconds
        time.sleep(0.3)
        compiled(torch.ones(3))
        assert found.seconds == first
        # Another shape is compiled again.
        compiled(torch.ones(4))
    assert 0.2 <= first < found.seconds
    assert 0.4 <= found.seconds <= time.perf_counter() - begin - 0.3


def test_a_backward_pass_that_is_compiled_when_it_runs_counts() -> None:
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: (x * x).sin().sum(), backend="aot_eager")
    with timed_compilations() as found:
        loss = compiled(x)
        forward = found.seconds
        loss.backward()
    assert 0 < forward <= found.seconds


def test_after_its_end_nothing_counts() -> None:
    with timed_compilations() as found:
        pass
    torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
    assert found.seconds == 0

"""The allocations of tensors in steps of a plain torch model, whose sizes are known."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.trial.memory_timeline import MemoryKind, Moment
from orchestrator.core.trial.step_part import StepPart, step_part
from workloads.live_tensors import LiveTensors
from workloads.llama.allocations import AllocatorHistory, StepMarks, TrackedTensors

# Bytes of a square weight, and of a batch, in fp32.
WIDTH, BATCH, LAYERS = 64, 256, 6
WEIGHT, HIDDEN = WIDTH * WIDTH * 4, BATCH * WIDTH * 4


def model() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def four_steps() -> list[Moment]:
    network, recorder = model(), TrackedTensors()
    optimizer = torch.optim.AdamW(network.parameters())
    recorder.note(MemoryKind.PARAMETERS, network.parameters())
    marks = StepMarks(recorder=recorder)
    x = torch.randn(BATCH, WIDTH)
    with recorder.recording(), marks.watching():
        for step in range(1, 5):
            marks.begin(step)
            network(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [v for each in optimizer.state.values() for v in each.values()]
            recorder.note(MemoryKind.OPTIMIZER, states)
        end = recorder.now()
    return marks.moments(end)


def of(moments: list[Moment], step: int, part: StepPart, kind: MemoryKind) -> list[int]:
    return [one.num_bytes[kind] for one in moments if (one.step, one.part) == (step, part)]


def test_activations_rise_gradients_build_up_and_states_come_in_step_1_and_stay() -> None:
    moments = four_steps()
    for step in (1, 2, 3, 4):
        activations = of(moments, step, StepPart.FORWARD, MemoryKind.ACTIVATIONS)
        # Each layer keeps its output for its backward pass.
        assert activations == sorted(activations)
        assert activations[0] <= 2 * HIDDEN
        assert activations[-1] == pytest.approx(LAYERS * HIDDEN, abs=1024)
        assert of(moments, step, StepPart.BACKWARD, MemoryKind.ACTIVATIONS)[-1] <= 2 * HIDDEN
        gradients = of(moments, step, StepPart.BACKWARD, MemoryKind.GRADIENTS)
        assert gradients == sorted(gradients)
        assert gradients[0] <= 2 * WEIGHT
        # The fullest moment of the last share may precede the last gradient.
        assert gradients[-1] >= (LAYERS - 1) * WEIGHT
        built = of(moments, step, StepPart.OPTIMIZER, MemoryKind.GRADIENTS)
        assert max(built) == LAYERS * WEIGHT
        assert set(of(moments, step, StepPart.FORWARD, MemoryKind.GRADIENTS)) == {0}
    for part in (StepPart.FORWARD, StepPart.BACKWARD):
        assert set(of(moments, 1, part, MemoryKind.OPTIMIZER)) == {0}
    states = of(moments, 1, StepPart.OPTIMIZER, MemoryKind.OPTIMIZER)
    # Two moments, and a counter of 4 bytes for each weight.
    kept = 2 * LAYERS * WEIGHT + 4 * LAYERS
    assert states[-1] == kept
    later = {one.num_bytes[MemoryKind.OPTIMIZER] for one in moments if one.step > 1}
    assert later == {kept}
    assert {one.num_bytes[MemoryKind.PARAMETERS] for one in moments} == {LAYERS * WEIGHT}


def test_torchs_own_backward_is_in_place_again_afterwards() -> None:
    before = torch.autograd.backward, torch.UntypedStorage.resize_
    four_steps()
    assert (torch.autograd.backward, torch.UntypedStorage.resize_) == before


def test_memory_that_is_taken_by_resizing_is_that_of_gathered_weights() -> None:
    recorder = TrackedTensors()
    marks = StepMarks(recorder=recorder)
    gathered = torch.empty(1000)
    recorder.note(MemoryKind.TEMPORARIES, [])
    recorder.note(MemoryKind.PARAMETERS, [gathered])
    with recorder.recording(), marks.watching():
        gathered.untyped_storage().resize_(0)
        marks.begin(1)
        gathered.untyped_storage().resize_(4000)
        gathered.untyped_storage().resize_(0)
        end = recorder.now()
    sizes = [one.num_bytes[MemoryKind.PARAMETERS] for one in marks.moments(end)]
    assert (max(sizes), recorder.allocations()[-1].freed_at) == (4000, end)


@pytest.mark.parametrize(
    ("batch", "limit", "part"),
    [
        # Weights and some of the outputs; then all of them and a gradient or two.
        (BATCH, LAYERS * WEIGHT + 3 * HIDDEN, StepPart.FORWARD),
        (BATCH, LAYERS * WEIGHT + (LAYERS + 1) * HIDDEN + WEIGHT, StepPart.BACKWARD),
        # Weights, gradients and a part of the states, with a batch that needs next to nothing.
        (1, LAYERS * WEIGHT * 5 // 2, StepPart.OPTIMIZER),
    ],
)
def test_a_real_out_of_memory_tells_its_part(batch: int, limit: int, part: StepPart) -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    x = torch.randn(batch, WIDTH)
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        LiveTensors(network.parameters(), limit_bytes=limit),
    ):
        _train(network, x, optimizer)
    text = "".join(traceback.format_exception(caught.value))
    assert step_part(text, phase="first_step") is part


def _train(network: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    network(x).mean().backward()
    optimizer.step()


def test_the_history_of_cudas_allocator_becomes_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot in torch's form, without a device: weights, an activation and a gradient."""
    times = iter(float(at) for at in range(10, 100, 10))
    at = {"now": 0.0}

    def now(_: AllocatorHistory) -> float:
        at["now"] = next(times)
        return at["now"]

    def entry(action: str, addr: int, size: int, time_us: float) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us}

    entries = [
        # In the forward pass, from 20 on.
        entry("alloc", 2000, 70, 25),
        # In the backward pass, from 30 on.
        entry("alloc", 3000, 30, 35),
        entry("free_completed", 2000, 70, 36),
    ]
    monkeypatch.setattr(AllocatorHistory, "now", now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: None)
    snapshot = {"device_traces": [[], entries]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)

    class OnDevice:
        is_cuda = True

        def __init__(self, address: int, num_bytes: int) -> None:
            self._place = address, num_bytes

        def untyped_storage(self) -> OnDevice:
            return self

        def data_ptr(self) -> int:
            return self._place[0]

        def nbytes(self) -> int:
            return self._place[1]

    def on_device(address: int, num_bytes: int) -> Any:
        return OnDevice(address, num_bytes)

    recorder = AllocatorHistory(torch.device("cuda", 1))
    marks = StepMarks(recorder=recorder)
    recorder.note(MemoryKind.PARAMETERS, [on_device(1000, 500)])  # at 10
    with recorder.recording():
        marks.begin(1)  # at 20
        marks._mark(StepPart.BACKWARD)  # at 30
        recorder.note(MemoryKind.GRADIENTS, [on_device(3000, 30)])  # at 40
        end = recorder.now()
    moments = marks.moments(end)
    forward = [one for one in moments if one.part is StepPart.FORWARD]
    backward = [one for one in moments if one.part is StepPart.BACKWARD]
    assert {one.num_bytes[MemoryKind.PARAMETERS] for one in moments} == {500}
    assert max(one.num_bytes[MemoryKind.ACTIVATIONS] for one in forward) == 70
    assert backward[-1].num_bytes[MemoryKind.GRADIENTS] == 30
    assert backward[-1].num_bytes[MemoryKind.ACTIVATIONS] in (0, 70)

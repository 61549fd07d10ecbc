"""Runs a step of a user's own model on tensors that have shapes but no memory, and counts bytes."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from workloads.live_tensors import LiveTensors
from workloads.stand_ins import StandIns

Loss = Callable[[int, int], Tensor]  # micro-batch size, sequence length -> scalar
# Number of layers, and keywords that it names -> module, or module and loss
Build = Callable[..., Any]


class TraceRefused(Exception):
    """The model cannot be traced. The message names the reason, and what to change."""


class ModeRefused(Exception):
    """The function raises ValueError for a recompute mode."""


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A forward and a backward pass: bytes kept in between, live bytes after each operation."""

    kept: int
    operations: list[Any]
    live: list[int]
    left: int  # still alive at the end

    def same_at_the_end(self, other: TracedRun) -> int:
        """Return how many operations are the same, counted from the last."""
        pairs = zip(reversed(self.operations), reversed(other.operations), strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a is not b),
            min(len(self.live), len(other.live)),
        )


@dataclass(frozen=True, kw_only=True)
class ModelMaker:
    """Builds the model in one way, and runs it as a training step would."""

    build: Build
    recompute: str
    dtype: torch.dtype | None
    autocast: bool
    sequence_length: int

    @contextmanager
    def fakes(self) -> Iterator[None]:
        """Tensors without memory, with replacements for operations that only CUDA has fused."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Its weak references to new fakes would keep Module.to() from exchanging parameters
        # (torch 2.13).
        mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        with mode, StandIns():
            yield

    @contextmanager
    def warnings_noted(self) -> Iterator[list[str]]:
        notes: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield notes
        if any("CUDA is not available" in str(w.message) for w in caught):
            notes.append(
                "torch.autocast('cuda') does nothing where there is no GPU, so it was traced "
                "without: give --autocast"
            )

    def make(self, num_layers: int) -> MadeModel:
        parameters = inspect.signature(self.build).parameters
        known = {"recompute": self.recompute, "sequence_length": self.sequence_length} | (
            {"dtype": self.dtype} if self.dtype else {}
        )
        keywords = {name: value for name, value in known.items() if name in parameters}
        try:
            made = self.build(num_layers, **keywords)
        except ValueError as exc:
            raise ModeRefused(str(exc)) from exc
        module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
            raise TraceRefused(
                f"the function returns {type(made).__name__}; return the torch.nn.Module, or it "
                "and a function loss(micro_batch_size, sequence_length) that calls it"
            )
        _renew(module, None if "dtype" in parameters else self.dtype)
        for weight in module.parameters():
            if weight.requires_grad:
                # As in every micro-batch but the first.
                weight.grad = torch.zeros_like(weight)
        return MadeModel(module=module, loss=loss or _loss_of_ids(module), autocast=self.autocast)


@dataclass(frozen=True, kw_only=True)
class MadeModel:
    module: nn.Module
    loss: Loss
    autocast: bool

    def run(self, micro_batch_size: int, sequence_length: int) -> TracedRun:
        tracker = _Tracker()
        before = tracker.live_bytes
        # Garbage that a collector would find at some moment counts as alive.
        gc.disable()
        try:
            with tracker:
                with (
                    torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext()
                ):
                    loss = self.loss(micro_batch_size, sequence_length)
                _check_scalar(loss)
                kept = tracker.live_bytes - before
                tracker.begin_backward()
                _backward(loss)
                del loss
        finally:
            gc.enable()
        operations, live = tracker.timeline()
        return TracedRun(
            kept=kept,
            operations=operations,
            live=[bytes_ - before for bytes_ in live],
            left=tracker.live_bytes - before,
        )


class _Tracker(LiveTensors):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Live bytes after each operation, beginning with every existing tensor."""

    def __init__(self) -> None:
        gc.collect()
        super().__init__(
            t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.layout is torch.strided
        )
        self._operations: list[Any] = []
        self._live: list[int] = []

    def begin_backward(self) -> None:
        self._operations, self._live = [], []

    def timeline(self) -> tuple[list[Any], list[int]]:
        return self._operations, self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise TraceRefused(
                    f"{func} makes a tensor on {leaf.device}; leave devices out of the function: "
                    "the trace chooses them"
                )
        self._operations.append(func)
        self._live.append(self.live_bytes)
        return result


def _backward(loss: Tensor) -> None:
    """loss.backward() without its wrapper, in which torch would call no replacement."""
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise TraceRefused(
            f"the loss is {found}, not one number; reduce it, as with "
            "F.cross_entropy(logits.flatten(0, 1), targets.flatten())"
        )
    if not loss.requires_grad:
        raise TraceRefused(
            "the loss depends on no weight: it was computed without gradients; leave out no_grad, "
            "detach and .item()"
        )


def _loss_of_ids(module: nn.Module) -> Loss:
    def loss(micro_batch_size: int, sequence_length: int) -> Any:
        tokens, targets = (
            torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64) for _ in range(2)
        )
        return module(tokens, targets)

    return loss


def _renew(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast real weights and buffers; complex ones, as of rotary embeddings, would lose their
    imaginary part. Tied weights stay tied.

    Also replace weights that copy.deepcopy made: views of such fakes have other storages than
    themselves, and would count as new memory.
    """
    renewed: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is None or not (
                (dtype is not None and weight.is_floating_point()) or _lies_elsewhere(weight)
            ):
                continue
            if weight not in renewed:
                data = torch.empty_like(weight, dtype=dtype if weight.is_floating_point() else None)
                renewed[weight] = nn.Parameter(data, requires_grad=weight.requires_grad)
            part._parameters[name] = renewed[weight]
        for name, buffer in part._buffers.items():
            if buffer is not None and dtype is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def _lies_elsewhere(weight: Tensor) -> bool:
    return bool(weight.detach().untyped_storage()._cdata != weight.untyped_storage()._cdata)

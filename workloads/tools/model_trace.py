"""What a step of somebody's own model holds, found by tracing 2 and 3 of its layers on tensors that
have shapes and no memory.

Bytes are exact where memory is a straight line in layers and in tokens, and it is said where it is
not. A GPU's allocator and streams are not seen.
"""

from __future__ import annotations

import gc
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from orchestrator.core.physics.traced_memory import NO_RECOMPUTE, TracedBytes, TracedMode
from workloads.llama.live_tensors import LiveTensors
from workloads.stand_ins import StandIns

Loss = Callable[[int, int], Tensor]  # micro-batch size, sequence length -> scalar
Build = Callable[
    ..., Any
    # Number of layers, and keywords that it names -> module, or module and loss
]

RECOMPUTES = (NO_RECOMPUTE, "selective_attention", "selective_ops", "full")
FEW, MANY = (
    4,
    8,
    # Sequences of a micro-batch: lines are drawn through these two, where gradients of weights no
    # longer show
)
TOLERANCE = 0.01  # of the check
NEGLIGIBLE_BYTES = 4096  # scalars


class TraceRefused(Exception):
    """The model cannot be traced as it is. The message says what it does, and what to change."""


class _ModeRefused(Exception):
    """The function raises ValueError for a recompute mode."""


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    modes: dict[str, TracedMode]
    check: dict[
        str, float
        # By mode: predicted over traced peak, less 1, of another depth, micro-batch and sequence length
    ]
    parameters_per_layer: int
    parameters_besides: int
    bytes_per_parameter: dict[str, float]
    cpu_seconds: dict[str, float]
    notes: tuple[str, ...]


def trace_model(
    build: Build,
    *,
    sequence_length: int,
    recomputes: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
) -> TracedModel:
    """Trace every recompute mode that is asked for, or that the function takes.

    Raises TraceRefused.

    `dtype` is what weights are made or cast to; with `autocast` they stay as they are and products
    run in bf16.
    """
    asked = recomputes or (
        RECOMPUTES if "recompute" in inspect.signature(build).parameters else (NO_RECOMPUTE,)
    )
    if NO_RECOMPUTE not in asked:
        asked = (NO_RECOMPUTE, *asked)
    modes, check, seconds, notes = {}, {}, {}, []
    sizes: _Sizes | None = None
    for recompute in asked:
        start = time.process_time()
        maker = _Maker(
            build=build,
            recompute=recompute,
            dtype=dtype,
            autocast=autocast,
            sequence_length=sequence_length,
        )
        try:
            traced = _trace_mode(maker)
        except _ModeRefused as exc:
            if recomputes is not None or recompute == NO_RECOMPUTE:
                raise TraceRefused(f"the function refuses recompute={recompute!r}: {exc}") from exc
            notes.append(f"{recompute}: not traced, the function refuses it: {exc}")
            continue
        seconds[recompute] = time.process_time() - start
        modes[recompute], check[recompute] = traced.mode, traced.check
        sizes = sizes or traced.sizes
        notes += [f"{recompute}: {note}" for note in traced.notes]
    # `none` is among them, or was refused
    assert sizes is not None
    return TracedModel(
        modes=modes,
        check=check,
        parameters_per_layer=sizes.per_layer,
        parameters_besides=sizes.besides,
        bytes_per_parameter=sizes.bytes_per_parameter(),
        cpu_seconds=seconds,
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    per_layer: int
    besides: int
    weight_bytes: float
    gradient_bytes: float
    trained_share: float

    def bytes_per_parameter(self) -> dict[str, float]:
        """Adam's moments, and a master of weights that are not fp32 themselves."""
        return {
            "parameters": round(self.weight_bytes, 3),
            "gradients": round(self.gradient_bytes, 3),
            "optimizer": round((8.0 if self.weight_bytes >= 4 else 12.0) * self.trained_share, 3),
        }


@dataclass(frozen=True, kw_only=True)
class _TracedOnce:
    mode: TracedMode
    check: float
    sizes: _Sizes
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _PeakMemory:
    """Bytes of one micro-batch above the states: kept by a layer, and beyond what all layers keep
    at the three moments of the peak.
    """

    kept: float
    backward: float
    head: float
    end: float


@dataclass(frozen=True, kw_only=True)
class _TracedRun:
    """One forward and backward pass: what was alive in between, and after each operation of the
    second.
    """

    kept: int
    operations: list[Any]
    live: list[int]
    left: int  # still alive at the end

    def same_at_the_end(self, other: _TracedRun) -> int:
        """How many operations, counted from the last, are the same."""
        pairs = zip(reversed(self.operations), reversed(other.operations), strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a is not b),
            min(len(self.live), len(other.live)),
        )


def _trace_mode(maker: _Maker) -> _TracedOnce:
    length, half = maker.sequence_length, maker.sequence_length // 2
    with maker.fakes(), maker.warnings_noted() as notes:
        two, three = maker.make(2), maker.make(3)
        runs = _Pair(two, three)
        one = runs.peaks(1, length)
        few, many, shorter = (
            runs.peaks(FEW, length),
            runs.peaks(MANY, length),
            runs.peaks(MANY, half),
        )

        def line(part: str) -> TracedBytes:
            return _line(
                *(getattr(peaks, part) for peaks in (one, few, many, shorter)), length=length
            )

        mode = TracedMode(
            kept=line("kept"), backward=line("backward"), head=line("head"), end=line("end")
        )
        five, three_again = maker.make(5).run(2, half), three.run(2, half)
    check = _check(mode, three_again, five, micro_batch_size=2, length=half)
    if abs(check) > TOLERANCE:
        notes.append(
            f"5 layers on 2 x {half} tokens are predicted {check:+.1%} off: layers differ, or memory is no straight line in tokens; "
            "let the number of layers count groups that are alike, and trace at the sequence length that you train with"
        )
    if mode.kept.per_token_and_position:
        notes.append(
            f"attention keeps {mode.kept.per_token_and_position:g} bytes per token and position, the square of the sequence length: "
            "flash attention keeps none; see that the model takes F.scaled_dot_product_attention without a mask, if yours does on the GPU"
        )
    if runs.left > TOLERANCE * one.kept:
        notes.append(
            f"{runs.left:,} bytes outlive the backward pass: reference cycles, or results that the model keeps"
        )
    return _TracedOnce(mode=mode, check=check, sizes=_sizes(two.module, three.module), notes=notes)


def _check(
    mode: TracedMode, three: _TracedRun, five: _TracedRun, *, micro_batch_size: int, length: int
) -> float:
    """How far off another depth, batch and length are: what two more layers keep, or the peak,
    whichever is worse.
    """
    tokens = micro_batch_size * length
    of_layers = (
        mode.kept.of(tokens=tokens, sequence_length=length) / max((five.kept - three.kept) / 2, 1)
        - 1.0
    )
    of_peak = (
        mode.peak_bytes(num_layers=5, tokens=tokens, sequence_length=length)
        / max(max(five.live), 1)
        - 1.0
    )
    return max(of_layers, of_peak, key=abs)


def _line(one: float, few: float, many: float, shorter: float, *, length: int) -> TracedBytes:
    """The bytes as a line in tokens whose slope may grow with the sequence; exact for one sequence
    and for many.
    """
    slope = max(0.0, (many - few) / ((MANY - FEW) * length))
    # At the least: what of many sequences does not show may be the peak of one
    fixed = max(0.0, one - slope * length)
    slope_of_half = (shorter - (many - slope * MANY * length)) / (MANY * length // 2)
    per_position = max(0.0, slope - slope_of_half) / (length / 2)
    if per_position * length < 2e-3 * slope:  # rounding
        per_position = 0.0
    return TracedBytes(
        per_token=round(slope - per_position * length, 2),
        per_token_and_position=round(per_position, 4),
        fixed=round(fixed) if fixed > NEGLIGIBLE_BYTES else 0.0,
    )


class _Pair:
    """The same model with 2 and with 3 layers: where their operations part tells a layer's backward
    pass from the head's.
    """

    def __init__(self, two: _Made, three: _Made) -> None:
        self._two, self._three = two, three
        self._starts: dict[
            int, tuple[int, int]
            # By number of operations: where the last layer's begin, and how many they are
        ] = {}
        self.left = 0

    def peaks(self, micro_batch_size: int, sequence_length: int) -> _PeakMemory:
        three = self._three.run(micro_batch_size, sequence_length)
        self.left = max(self.left, three.left)
        if len(three.live) not in self._starts:
            self._starts[len(three.live)] = self._find(
                three, self._two.run(micro_batch_size, sequence_length)
            )
        start, period = self._starts[len(three.live)]
        kept = (
            three.live[start + period - 1] - three.live[start + 2 * period - 1]
        )  # one layer's backward pass apart
        below = 3 * kept
        return _PeakMemory(
            kept=kept,
            backward=max(three.live[start : start + period]) - below,
            head=max(three.live[:start], default=0) - below,
            end=max(three.live[start + 3 * period :], default=0),
        )

    @staticmethod
    def _find(three: _TracedRun, two: _TracedRun) -> tuple[int, int]:
        period = len(three.live) - len(two.live)
        # head, layer, [layer,] first layer, embedding: from the end on they agree as far as the
        # head, and part of the layer put in.
        start = len(three.live) - three.same_at_the_end(two) - period
        if period <= 0:
            raise TraceRefused(
                "2 and 3 layers do the same operations: the function must build as many layers as its first argument says"
            )
        if start < 0:
            raise TraceRefused(
                "the third layer does other operations than the first two: let the number of layers count groups that are alike, as "
                "build(2) with 2 dense and 2 sparse layers"
            )
        return start, period


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Builds the model in one way, and runs it as a training step would."""

    build: Build
    recompute: str
    dtype: torch.dtype | None
    autocast: bool
    sequence_length: int

    @contextmanager
    def fakes(self) -> Iterator[None]:
        """Tensors without memory; what only CUDA has fused stands for what a CPU would do in
        pieces.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # A new fake would be remembered by a weak reference, which keeps Module.to() from
        # exchanging parameters (torch 2.13).
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
                "torch.autocast('cuda') does nothing where there is no GPU, so it was traced without: give --autocast"
            )

    def make(self, num_layers: int) -> _Made:
        parameters = inspect.signature(self.build).parameters
        known = {"recompute": self.recompute, "sequence_length": self.sequence_length} | (
            {"dtype": self.dtype} if self.dtype else {}
        )
        keywords = {name: value for name, value in known.items() if name in parameters}
        try:
            made = self.build(num_layers, **keywords)
        except ValueError as exc:
            raise _ModeRefused(str(exc)) from exc
        module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
            raise TraceRefused(
                f"the function returns {type(made).__name__}; return the torch.nn.Module, or it and a function "
                "loss(micro_batch_size, sequence_length) that calls it"
            )
        _renew(module, None if "dtype" in parameters else self.dtype)
        for weight in module.parameters():
            if weight.requires_grad:
                # As in every micro-batch but the first
                weight.grad = torch.zeros_like(weight)
        return _Made(module=module, loss=loss or _loss_of_ids(module), autocast=self.autocast)


@dataclass(frozen=True, kw_only=True)
class _Made:
    module: nn.Module
    loss: Loss
    autocast: bool

    def run(self, micro_batch_size: int, sequence_length: int) -> _TracedRun:
        tracker = _Tracker()
        before = tracker.live_bytes
        # What a collector would find at some moment counts as alive
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
        return _TracedRun(
            kept=kept,
            operations=operations,
            live=[bytes_ - before for bytes_ in live],
            left=tracker.live_bytes - before,
        )


class _Tracker(LiveTensors):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Live bytes after each operation, beginning with every tensor that there is."""

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
                    f"{func} makes a tensor on {leaf.device}; leave devices out of the function: the trace chooses them"
                )
        self._operations.append(func)
        self._live.append(self.live_bytes)
        return result


def _backward(loss: Tensor) -> None:
    """As loss.backward() does, which is itself a function of torch, in which no stand-in would be
    called for what is recomputed.
    """
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
            f"the loss is {found}, not one number; reduce it, as with F.cross_entropy(logits.flatten(0, 1), targets.flatten())"
        )
    if not loss.requires_grad:
        raise TraceRefused(
            "the loss depends on no weight: it was computed without gradients; leave out no_grad, detach and .item()"
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

    Also make those anew that copy.deepcopy made: views of such fakes lie in other storages than
    themselves, and would count as made by them.
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


def _sizes(two: nn.Module, three: nn.Module) -> _Sizes:
    of_two, of_three = (sum(w.numel() for w in module.parameters()) for module in (two, three))
    weights = list(three.parameters())
    trained = [w for w in weights if w.requires_grad]
    return _Sizes(
        per_layer=of_three - of_two,
        besides=3 * of_two - 2 * of_three,
        weight_bytes=sum(w.numel() * w.element_size() for w in weights) / of_three,
        gradient_bytes=sum(w.numel() * w.element_size() for w in trained) / of_three,
        trained_share=sum(w.numel() for w in trained) / of_three,
    )

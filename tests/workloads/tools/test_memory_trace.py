"""A trace without memory agrees with closed forms, and with the memory of real steps."""

from __future__ import annotations

import copy
import dataclasses
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.physics.memory import predict_memory
from orchestrator.core.physics.traced_memory import TracedMemory, TracedMode
from orchestrator.core.physics.trainer import llama_trainer
from orchestrator.core.problem.cell import Cell
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.layout_table import LayoutTable
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.workload_options import AttentionKind
from tests.workloads.llama.test_memory import report
from tests.workloads.llama.test_memory import trainer as real_trainer
from workloads.live_tensors import LiveTensors
from workloads.llama.model import Llama
from workloads.tools.memory_trace import document, parser
from workloads.tools.model_trace import RECOMPUTES, TracedModel, trace_model
from workloads.tools.traced_run import TraceRefused

SHAPE = ModelShape(
    name="grouped",
    num_layers=6,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=352,
    vocab_size=4096,
)
LENGTH = 256
DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> Iterator[None]:
    """Unfreeze in the end what the tests have frozen."""
    torch.set_num_threads(1)  # waiting threads crawl when busy
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen_before(little_to_collect: None) -> None:
    """Freeze the objects of other tests, as the command does: a trace searches all objects.

    Those of the test before, too: the first trace imports and fills caches.
    """
    gc.collect()
    gc.freeze()


def llama(
    shape: ModelShape = SHAPE, attention: AttentionKind = AttentionKind.FLASH
) -> Callable[..., nn.Module]:
    def build(
        num_layers: int, recompute: str, dtype: torch.dtype, sequence_length: int
    ) -> nn.Module:
        device = torch.get_default_device()
        model = Llama(
            dataclasses.replace(shape, num_layers=num_layers),
            sequence_length=sequence_length,
            attention=attention,
            recompute=Recompute.parse(recompute),
            loss_chunk_tokens=None,
            dtype=dtype,
            device=device,
        )
        model.materialise(device, seed=0)
        return model

    return build


@cache
def trace_of_llama(
    precision: Precision, attention: AttentionKind, recomputes: tuple[str, ...]
) -> TracedModel:
    """Trace it once for all tests that ask: a mode takes a second."""
    return trace_model(
        llama(attention=attention),
        sequence_length=LENGTH,
        recomputes=recomputes,
        dtype=DTYPES[precision],
    )


BF16 = (Precision.BF16, AttentionKind.FLASH, RECOMPUTES)
BF16_EAGER = (Precision.BF16, AttentionKind.EAGER, ("none", "selective_ops"))
FP32 = (Precision.FP32, AttentionKind.FLASH, ("none", "full"))


@pytest.mark.parametrize(
    ("precision", "attention", "recomputes"),
    [*(pytest.param(*longer, marks=pytest.mark.long) for longer in (BF16, BF16_EAGER)), FP32],
)
def test_a_trace_predicts_what_the_closed_forms_of_a_llama_do(
    precision: Precision, attention: AttentionKind, recomputes: tuple[str, ...]
) -> None:
    traced = trace_of_llama(precision, attention, recomputes)
    assert set(traced.modes) == set(recomputes)
    assert traced.parameters_per_layer == SHAPE.parameters_per_layer
    assert all(abs(error) < 1e-3 for error in traced.check.values())
    known = llama_trainer({"loss": "whole", "attention": attention}, on_gpu=False)
    layouts = [
        Layout(
            recompute=Recompute.parse(text),
            precision=precision,
            micro_batch_size=size,
            grad_accum_steps=8 // size,
        )
        for text in (*recomputes, f"{recomputes[-1]}:2")
        for size in (1, 8)
    ]
    cell = Cell(model=SHAPE, num_gpus=1, sequence_length=LENGTH, global_batch_size=8)
    table = LayoutTable.of(layouts)
    closed = predict_memory(table, cell, known)
    by_trace = predict_memory(
        table,
        cell,
        dataclasses.replace(known, traced=TracedMemory(modes=tuple(traced.modes.items()))),
    )
    assert by_trace.activations == pytest.approx(closed.activations, rel=1e-3)
    assert by_trace.total == pytest.approx(closed.total, rel=0.005)
    above = [prediction.activations + prediction.temporaries for prediction in (by_trace, closed)]
    assert above[0] == pytest.approx(above[1], rel=0.03)


@pytest.mark.long
def test_a_trace_is_what_a_real_step_of_the_llama_holds() -> None:
    shape = dataclasses.replace(SHAPE, num_layers=4)
    layout = Layout(recompute=Recompute.parse("full"), precision=Precision.BF16, micro_batch_size=2)
    parts = report(real_trainer(layout, shape=shape, length=LENGTH)).bytes_by_part
    predicted = (
        trace_of_llama(*BF16)
        .modes["full"]
        .peak_bytes(num_layers=4, tokens=2 * LENGTH, sequence_length=LENGTH)
    )
    assert parts["activations"] + parts["temporaries"] == pytest.approx(predicted, rel=2e-3)


class Block(nn.Module):
    """A GPT's: LayerNorm, GELU, biases, dropout; one of its layers may be wider than the others."""

    def __init__(self, width: int, *, inner: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            y.unflatten(-1, (-1, 32)).transpose(1, 2)
            for y in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        ]
        attended = (
            F.scaled_dot_product_attention(*heads, dropout_p=self.dropout.p, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        x = x + self.dropout(self.out(attended))
        down: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + down


class GPT(nn.Module):
    def __init__(
        self, num_layers: int, *, dropout: float = 0.0, wider: bool = False, width: int = 128
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(2048, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            Block(width, inner=width * (8 if wider and i % 2 else 4), dropout=dropout)
            for i in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2048, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(
    model: nn.Module, *, device: str | torch.device = "cpu"
) -> Callable[[int, int], Tensor]:
    def loss(micro_batch_size: int, sequence_length: int) -> Tensor:
        tokens = torch.zeros(micro_batch_size, sequence_length, dtype=torch.int64, device=device)
        return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

    return loss


def gpt(num_layers: int) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
    model = GPT(num_layers)
    return model, loss_of(model)


@cache
def plain(build: Callable[..., Any]) -> TracedMode:
    return trace_model(build, sequence_length=LENGTH).modes["none"]


def test_a_trace_of_a_model_without_closed_form_is_what_its_real_step_holds() -> None:
    model, loss = gpt(5)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    tracker = LiveTensors([t for w in model.parameters() for t in (w, w.grad) if t is not None])
    held = tracker.live_bytes
    with tracker:
        loss(3, LENGTH).backward()  # type: ignore[no-untyped-call]
    traced = plain(gpt)
    assert traced.peak_bytes(
        num_layers=5, tokens=3 * LENGTH, sequence_length=LENGTH
    ) == pytest.approx(tracker.peak_bytes - held, rel=1e-3)


def test_layers_that_are_copies_of_one_are_traced_as_any_others() -> None:
    def build(num_layers: int) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
        model = GPT(1)
        model.blocks.extend(copy.deepcopy(model.blocks[0]) for _ in range(num_layers - 1))
        return model, loss_of(model)

    assert plain(build) == plain(gpt)


def test_weights_that_are_cast_stay_tied() -> None:
    traced = trace_model(gpt, sequence_length=LENGTH, dtype=torch.bfloat16)
    model = GPT(2)
    assert 2 * traced.parameters_per_layer + traced.parameters_besides == sum(
        weight.numel() for weight in model.parameters()
    )
    assert traced.bytes_per_parameter == {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0}


def test_autocast_keeps_a_rounded_copy_of_each_layer_s_matrices() -> None:
    traced = trace_model(gpt, sequence_length=LENGTH, autocast=True)
    assert (
        traced.modes["none"].kept.fixed == 2 * 12 * 128 * 128
    )  # its backward pass needs no biases
    assert traced.bytes_per_parameter == {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}


def test_what_is_made_for_a_gpu_is_traced_as_on_a_gpu() -> None:
    def build(num_layers: int) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
        model = GPT(num_layers, dropout=0.1).to("cuda")
        return model, loss_of(model, device=torch.device("cuda", 0))

    # A mask of one byte per element is kept for dropout, and no scores by attention, though it
    # drops some of them.
    assert plain(build).kept.per_token - plain(gpt).kept.per_token == 128


def test_a_fused_norm_keeps_its_input_and_one_number_per_token() -> None:
    def build(num_layers: int, recompute: str) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
        if recompute not in ("none", "full"):
            raise ValueError("no such mode here")
        layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 128, bias=False))
            for _ in range(num_layers)
        )

        def loss(micro_batch_size: int, sequence_length: int) -> Tensor:
            x = torch.zeros(micro_batch_size, sequence_length, 128)
            for layer in layers:
                x = x + (
                    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                    if recompute == "full"
                    else layer(x)
                )
            return x.mean()

        return layers, loss

    traced = trace_model(build, sequence_length=LENGTH)
    # The norm's input, its scale, the product's input.
    assert traced.modes["none"].kept.per_token == 4 * 128 + 4 + 4 * 128
    assert traced.modes["full"].kept.per_token == 4 * 128
    assert {note.partition(":")[0] for note in traced.notes} == {
        "selective_attention",
        "selective_ops",
    }


@pytest.mark.long
def test_the_square_of_the_sequence_length_is_found_and_told() -> None:
    traced = trace_of_llama(*BF16_EAGER)
    assert (
        traced.modes["none"].kept.per_token_and_position == 6 * SHAPE.num_attention_heads
    )  # fp32 weights and their rounded copy
    assert any("square of the sequence length" in note for note in traced.notes)


def test_layers_that_are_not_alike_are_told() -> None:
    def build(num_layers: int) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
        model = GPT(num_layers, wider=True)
        return model, loss_of(model)

    assert any("layers differ" in note for note in trace_model(build, sequence_length=LENGTH).notes)


def test_layers_of_70b_are_traced_without_their_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced: TracedModel = trace_model(
        llama(PRESETS["llama-3.1-70b"]),
        sequence_length=8192,
        recomputes=["none"],
        dtype=torch.bfloat16,
    )
    # By another tool, in widths.
    assert traced.modes["none"].kept.per_token == pytest.approx(40.53 * 8192, rel=1e-3)
    # KiB; three layers' weights: 9 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


def of_a_vector(num_layers: int) -> tuple[nn.Module, Any]:
    model, loss = gpt(num_layers)
    return model, lambda *sizes: loss(*sizes).expand(3)


def without_gradients(num_layers: int) -> tuple[nn.Module, Any]:
    model, loss = gpt(num_layers)
    return model, lambda *sizes: loss(*sizes).detach()


def of_one_depth(num_layers: int) -> tuple[nn.Module, Any]:
    return gpt(2)


def of_nothing(num_layers: int) -> None:
    return None


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (of_a_vector, r"the loss is a tensor of shape \(3,\), not one number"),
        (without_gradients, "the loss depends on no weight"),
        (of_one_depth, "must build as many layers as its first argument says"),
        (of_nothing, "the function returns NoneType; return the torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_traced_is_told_what_to_change(
    build: Callable[..., Any], said: str
) -> None:
    with pytest.raises(TraceRefused, match=said):
        trace_model(build, sequence_length=64)


PROGRAM = """
import torch
from tests.workloads.tools.test_memory_trace import GPT, loss_of

def build(num_layers):
    model = GPT(num_layers)
    loss = loss_of(model)
    return model, lambda *sizes: found if (found := loss(*sizes)) > 10 else 2 * found

def model_alone(num_layers):
    return GPT(num_layers)

def broken(num_layers):
    return GPT(num_layers, depth=num_layers)
"""


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("looking", "'looking' is not MODULE:FUNCTION; write it as mine:build"),
        ("nothing_there:build", "no module nothing_there: neither in "),
        ("looking.py:build", "write the module: looking:build"),
        ("looking:bild", "looking has no function bild; did you mean build?"),
        ("half:build", "half needs nothing_there, which is not installed"),
        ("wrong:build", "wrong cannot be imported: ZeroDivisionError: division by zero at "),
        ("looking:build", "asks for the value of a tensor at "),
        (
            "looking:model_alone",
            "a model alone is called with token ids and targets, or return (model, loss)",
        ),
        ("looking:broken", "the model cannot be run at "),
    ],
)
def test_what_is_wrong_with_a_program_is_one_line_with_its_place(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "looking": PROGRAM,
        "half": "import nothing_there",
        "wrong": "1 / 0",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    error = document(parser().parse_args([target, "--sequence-length", "64"]))["error"]
    assert said in error
    assert "\n" not in error
    if said.endswith(" at "):
        assert str(tmp_path) in error  # a place in the program itself

"""`sweep trace`: its output fits into a sweep file, and a bad model is one line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from orchestrator.cli import trace
from tests.acceptance.command import CommandHere

pytestmark = pytest.mark.acceptance

PROGRAM = """
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 128), nn.Linear(128, 512)
        self.layers = nn.ModuleList(self.layer() for _ in range(num_layers))

    @staticmethod
    def layer():
        return nn.Sequential(
            nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)
        )

    def forward(self, tokens, targets):
        print("a model may print")
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())

def build(num_layers):
    return Model(num_layers)

def looking(num_layers):
    model = Model(num_layers)
    return model, lambda b, s: model(*torch.zeros(2, b, s, dtype=torch.int64)).item()
"""


@pytest.fixture
def traced(here: CommandHere) -> CommandHere:
    (here.folder / "traced.py").write_text(PROGRAM)
    return here


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, ...], Any]:
    """What the process of a trace has answered, which takes seconds to import torch."""
    return {}


@pytest.fixture(autouse=True)
def _each_is_traced_once(
    answers: dict[tuple[str, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = trace._trace

    def once(target: str, options: list[str]) -> Any:
        asked = (target, *options)
        if asked not in answers:
            answers[asked] = really(target, options)
        return answers[asked]

    monkeypatch.setattr(trace, "_trace", once)


ASKED = ("traced:build", "--precision=bf16", "--sequence-length=1024", "--layers=12")


@pytest.mark.long
def test_what_is_traced_goes_into_a_sweep_file_as_it_stands(traced: CommandHere) -> None:
    shown = traced.ok("trace", *ASKED).stdout
    assert "12 layers" in shown
    section = shown[shown.index("trainer:") :]
    lines = [
        "name: mine",
        "model: llama-tiny",
        "gpus: 1",
        "device: h100-sxm",
        "sequence_length: 1024",
        "global_batch_size: 8",
    ]
    file = traced.folder / "mine.yaml"
    file.write_text(
        "\n".join(
            [*lines, "workload: {name: command, options: {argv: [python, train.py]}}", section]
        )
    )
    spec = traced.json("validate", file)["spec"]
    # In bf16: LayerNorm's input and its two numbers, and the inputs of the products and of GELU.
    assert spec["trainer"]["activations"]["none"]["kept"]["per_token"] == pytest.approx(
        2 * (128 + 128 + 512 + 512) + 2 * 4, abs=8
    )
    assert spec["trainer"]["bytes_per_parameter"] == {
        "parameters": 2,
        "gradients": 2,
        "optimizer": 12,
    }


@pytest.mark.long
def test_json_holds_what_adds_up(traced: CommandHere) -> None:
    found = traced.json("trace", *ASKED)
    per_layer = 128 * 512 * 2 + 512 + 128 + 2 * 128
    besides = 512 * 128 * 2 + 512
    assert (found["parameters_per_layer"], found["parameters_besides"]) == (per_layer, besides)
    assert found["totals"]["state_bytes"] == 16 * (12 * per_layer + besides)
    mode = found["modes"]["none"]
    assert found["totals"]["modes"]["none"]["kept_bytes"] == 12 * 1024 * mode["kept"]["per_token"]
    assert abs(found["check"]["none"]) < 1e-3


@pytest.mark.long
def test_what_keeps_a_model_from_being_traced_is_one_line(traced: CommandHere) -> None:
    done = traced.run("trace", "traced:looking", "--sequence-length", "64")
    assert done.returncode == 2, done.stderr
    assert "asks for the value of a tensor" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_driver_without_torch_is_told_how_to_get_it(
    traced: CommandHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = traced.run("trace", "traced:build")
    assert done.returncode == 2
    assert "pip install '.[train]' in the cloned folder" in done.stderr

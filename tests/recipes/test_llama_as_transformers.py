"""Workload llama trains as the Llama of transformers, from the same weights on the same tokens."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.trainer_arm import llama_config
from orchestrator.core.problem.layout import Layout, Precision, Recompute
from orchestrator.core.problem.model_shape import PRESETS, ModelShape
from orchestrator.core.sweepfile.workload_options import LlamaOptions
from orchestrator.core.trial.protocol import Device, MeasurementPlan, PhaseLimits, TrialRequest
from tests.recipes.environments import answer
from workloads.llama.optimizer import BETAS, EPSILON, WEIGHT_DECAY
from workloads.llama.training_loop import TrainingLoop

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]

LENGTH = 64
NUM_STEPS = 8

# The weights of our modules in transformers.
NAMES = {
    "tok_embeddings": "model.embed_tokens.weight",
    "attention_norm": "{layer}.input_layernorm.weight",
    "wo": "{layer}.self_attn.o_proj.weight",
    "ffn_norm": "{layer}.post_attention_layernorm.weight",
    "w1": "{layer}.mlp.gate_proj.weight",
    "w2": "{layer}.mlp.down_proj.weight",
    "w3": "{layer}.mlp.up_proj.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
}

# Trains with AdamW and clipped gradients, and prints each step's loss and norm.
PROGRAM = """
import json, sys
import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

file, settings = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(**settings["config"])).train()
saved = np.load(file)
theirs = dict(model.named_parameters())
with torch.no_grad():
    for name, weight in theirs.items():
        weight.copy_(torch.from_numpy(saved[name]))
optimizer = torch.optim.AdamW(model.parameters(), **settings["adamw"])
found = []
for micro_batches in torch.from_numpy(saved["tokens"]):
    loss = torch.zeros(())
    for ids in micro_batches:
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        part = F.cross_entropy(logits, ids[:, 1:].flatten()) / len(micro_batches)
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
    optimizer.step()
    optimizer.zero_grad()
    found.append([float(loss), float(norm)])
print(json.dumps(found))
"""


@pytest.mark.parametrize("recompute", ["none", "selective_ops", "full"])
def test_losses_and_gradient_norms_are_those_of_transformers(
    recompute: str, tmp_path: Path
) -> None:
    shape, options = PRESETS["llama-tiny"], LlamaOptions()
    torch.set_num_threads(1)
    loop = TrainingLoop(request(shape, recompute), options, device=torch.device("cpu"))
    steps = [loop.micro_batches(step) for step in range(NUM_STEPS)]
    ids = [
        [torch.cat([inputs, targets[:, -1:]], dim=1).numpy() for inputs, targets in step]
        for step in steps
    ]
    file = tmp_path / "weights.npz"
    np.savez(file, tokens=np.array(ids), **weights_of(loop, shape))
    settings = {
        "config": llama_config(asdict(shape), LENGTH),
        "adamw": {
            "lr": options.learning_rate,
            "betas": BETAS,
            "eps": EPSILON,
            "weight_decay": WEIGHT_DECAY,
        },
        "clip": options.clip_gradients,
    }
    theirs = answer("transformers", PROGRAM, str(file), json.dumps(settings))
    ours = [[float(loop.step(step)), loop.gradient_norm()] for step in steps]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def request(shape: ModelShape, recompute: str) -> TrialRequest:
    return TrialRequest(
        sweep="same",
        trial_id=1,
        attempt=1,
        workload="llama",
        model=shape,
        sequence_length=LENGTH,
        layout=Layout(
            micro_batch_size=2,
            grad_accum_steps=2,
            recompute=Recompute.parse(recompute),
            precision=Precision.FP32,
        ),
        device=Device.CPU,
        measurement=MeasurementPlan(
            warmup_steps=1, min_steps=2, max_steps=2, relative_confidence=0.02
        ),
        limits=PhaseLimits(
            start=60, rendezvous=60, first_step=60, steady=60, teardown=60, total=60
        ),
        seed=7,
    )


def weights_of(loop: TrainingLoop, shape: ModelShape) -> dict[str, np.ndarray[Any, Any]]:
    """Our weights by the names in transformers, where queries, keys and values are apart."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in loop.named_weights():
        values = weight.detach().numpy()
        *_, module, _ = name.split(".")
        layer = f"model.{'.'.join(name.split('.')[:2])}"
        if module == "wqkv":
            bounds = np.cumsum([shape.hidden_size, shape.kv_size])
            parts = np.split(values, bounds)
            for part, kind in zip(parts, "qkv", strict=True):
                found[f"{layer}.self_attn.{kind}_proj.weight"] = part
            continue
        found[NAMES[module].format(layer=layer)] = values
    return found

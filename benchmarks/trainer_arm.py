"""Trains a Llama for some steps with the model of one program, and prints what it took, as JSON.

    python -P benchmarks/trainer_arm.py JOB.json

The job names the arm: `llama` (workloads/llama), `transformers` or `torchtitan`. Each arm has the
same sizes, tokens, micro-batches, AdamW and clipping. It runs in an environment with torch and that
program; only arm `llama` needs this project. The others train as they do on one device: weights in
fp32, under autocast if the precision is bf16.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIP_NORM = 1.0
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
NORM_EPSILON, ROPE_THETA = 1e-5, 500_000.0
INITIAL_STANDARD_DEVIATION = 0.02
PACKAGES = ("torch", "transformers", "torchtitan")

# Imported before memory is measured: it is counted above them.
IMPORTS = {
    "llama": "workloads.llama.training_loop",
    "transformers": "transformers.models.llama.modeling_llama",
    "torchtitan": "torchtitan.models.llama3",
}

# Modules of torchtitan that need Triton: mixtures of experts, in 0.2 and 0.3.
EXPERT_KERNELS = (
    "torchtitan.models.moe.kernels",
    "torchtitan.distributed.minimal_async_ep.kernels",
)

# The micro-batches of a step: inputs and targets.
Batches = list[tuple[Tensor, Tensor]]


class Loop(Protocol):
    """Trains one optimizer step after the other."""

    num_parameters: int

    def micro_batches(self, step: int) -> Batches: ...

    def step(self, micro_batches: Batches) -> Tensor:
        """Take an optimizer step; return the mean loss."""


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(job["num_threads"])
    else:
        torch.set_float32_matmul_precision("high")
    stub_expert_kernels()
    import_module(IMPORTS[job["arm"]])
    forget_peak()
    resident_before = peak_resident_bytes()
    make = {"llama": our_loop, "transformers": transformers_model, "torchtitan": torchtitan_model}
    made = make[job["arm"]](job, device)
    loop = ForeignLoop(made, job, device) if isinstance(made, nn.Module) else made
    found = train(loop, job, device)
    print(json.dumps({**found, "peak_resident_bytes": peak_resident_bytes() - resident_before}))


def train(loop: Loop, job: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Take the warm-up and then steps until there are `num_steps`, and `seconds` have passed."""
    losses: list[Tensor] = []
    stopwatch = Stopwatch(device, synchronised=job["synchronised"])
    cpu_seconds: list[float] = []
    number = began = 0
    while True:
        batches = loop.micro_batches(number)
        if number == job["num_warmup"]:
            stopwatch = Stopwatch(device, synchronised=job["synchronised"])
            cpu_seconds.clear()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        cpu_before = time.process_time()
        stopwatch.start()
        losses.append(loop.step(batches).detach())
        stopwatch.stop()
        cpu_seconds.append(time.process_time() - cpu_before)
        number += 1
        num_timed = number - job["num_warmup"]
        if num_timed >= job["num_steps"] and time.perf_counter() - began >= job["seconds"]:
            break
    seconds = stopwatch.seconds()
    step_tokens = sum(tokens.numel() for tokens, _ in batches)
    found = {
        "arm": job["arm"],
        "step_seconds": [round(s, 6) for s in seconds],
        "wall_seconds": time.perf_counter() - began,
        "tokens_per_second": step_tokens / statistics.median(seconds),
        "cpu_seconds_per_step": statistics.median(cpu_seconds),
        "tokens_per_cpu_second": step_tokens / statistics.median(cpu_seconds),
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-1]),
        "losses": [round(float(loss), 4) for loss in losses],
        "num_parameters": loop.num_parameters,
        "packages": {name: found for name in PACKAGES if (found := installed(name)) is not None},
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device_name": torch.cuda.get_device_name(),
            "device_used_bytes": total - free,
            "peak_memory_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return found


class Stopwatch:
    """Times steps: on a GPU by events in its queue, or with the host waiting for each step."""

    def __init__(self, device: torch.device, *, synchronised: bool) -> None:
        self._device = device
        self._by_events = device.type == "cuda" and not synchronised
        self._starts: list[Any] = []
        self._ends: list[Any] = []

    def start(self) -> None:
        self._starts.append(self._mark())

    def stop(self) -> None:
        self._ends.append(self._mark())

    def seconds(self) -> list[float]:
        pairs = zip(self._starts, self._ends, strict=True)
        if not self._by_events:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _mark(self) -> Any:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def our_loop(job: Mapping[str, Any], device: torch.device) -> Loop:
    """The loop that workload llama trains with, for the request of the job."""
    from orchestrator.core.trial.protocol import decode_request
    from workloads.llama.refusals import check
    from workloads.llama.training_loop import TrainingLoop

    request = decode_request(json.dumps(job["request"]).encode())
    loop: Any = TrainingLoop(request, check(request), device=device)
    loop.num_parameters = sum(weight.numel() for weight in loop.replica.weights)
    return loop  # type: ignore[no-any-return]


class ForeignLoop:
    """A training loop as small as users write it, around a model that returns logits."""

    def __init__(self, model: nn.Module, job: Mapping[str, Any], device: torch.device) -> None:
        self._model, self._job, self._device = model, job, device
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self._tokens = np.load(job["tokens"], mmap_mode="r")

    def micro_batches(self, step: int) -> Batches:
        ids = torch.from_numpy(np.array(self._tokens[step % len(self._tokens)]))
        ids = ids.to(self._device)
        return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]

    def step(self, micro_batches: Batches) -> Tensor:
        losses = []
        for tokens, targets in micro_batches:
            with torch.autocast(
                self._device.type, torch.bfloat16, enabled=self._job["precision"] == "bf16"
            ):
                loss = self._loss(tokens, targets) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
            del loss
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self._model(tokens)
        # transformers returns an object of which the logits are a part.
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def llama_config(sizes: Mapping[str, Any], sequence_length: int) -> dict[str, Any]:
    """The arguments of transformers' LlamaConfig for a model of these sizes."""
    return {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["ffn_hidden_size"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"],
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": sizes["tied_embeddings"],
        "attention_bias": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def transformers_model(job: Mapping[str, Any], device: torch.device) -> nn.Module:
    """LlamaForCausalLM with scaled_dot_product_attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config(job["model"], job["sequence_length"]))
    with device:
        model = LlamaForCausalLM(config)
    model.train()
    if job["recompute"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job["compile"]:
        for layer in model.model.layers:
            layer.compile()
    return model  # type: ignore[no-any-return]


def torchtitan_model(job: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The Llama 3 of torchtitan with its SDPA module: of 0.2, or of 0.3 and newer."""
    import torchtitan.models.llama3 as llama3

    make = torchtitan_0_2 if hasattr(llama3, "TransformerModelArgs") else torchtitan_0_3
    model = make(llama3, job, device)
    layers: Any = model.layers
    if job["recompute"] == "full":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for name, layer in layers.named_children():
            layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    if job["compile"]:
        for _, layer in layers.named_children():
            layer.compile(fullgraph=True)
    return model


def torchtitan_0_2(llama3: Any, job: Mapping[str, Any], device: torch.device) -> nn.Module:
    sizes = job["model"]
    arguments = llama3.TransformerModelArgs(
        dim=sizes["hidden_size"],
        n_layers=sizes["num_layers"],
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        vocab_size=sizes["vocab_size"],
        # Its feed-forward width is 8/3 of the hidden size times this, rounded up to a multiple.
        multiple_of=1,
        ffn_dim_multiplier=(sizes["ffn_hidden_size"] + 0.5) / int(8 * sizes["hidden_size"] / 3),
        norm_eps=NORM_EPSILON,
        rope_theta=ROPE_THETA,
        max_seq_len=job["sequence_length"],
    )
    with device:
        model: nn.Module = llama3.Transformer(arguments)
    width = model.layers["0"].feed_forward.w1.out_features  # type: ignore[index]
    if width != sizes["ffn_hidden_size"]:
        raise RuntimeError(f"torchtitan's feed-forward width is {width}, not the model's")
    with torch.no_grad():
        model.init_weights(buffer_device=device)  # type: ignore[operator]
    if sizes["tied_embeddings"]:
        model.output.weight = model.tok_embeddings.weight  # type: ignore[union-attr]
    return model


def torchtitan_0_3(llama3: Any, job: Mapping[str, Any], device: torch.device) -> nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    sizes, length = job["model"], job["sequence_length"]
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    tied = sizes["tied_embeddings"]
    layers = llama3._build_llama3_layers(
        fuse_qkv=True,
        n_layers=sizes["num_layers"],
        dim=hidden,
        n_heads=sizes["num_attention_heads"],
        n_kv_heads=sizes["num_key_value_heads"],
        hidden_dim=sizes["ffn_hidden_size"],
        rope=llama3.ComplexRoPE.Config(
            dim=hidden // sizes["num_attention_heads"],
            max_seq_len=length,
            theta=ROPE_THETA,
            scaling="llama",
        ),
        attn_backend="varlen",
    )
    # Its language models offer no SDPA any more, and varlen needs a GPU.
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=hidden,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocab,
            embedding_dim=hidden,
            param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=hidden, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=hidden, out_features=vocab, param_init=llama3._output_linear_init(hidden)
        ),
        layers=layers,
    )
    with device:
        model: nn.Module = llama3.Llama3Model(config)
    with torch.no_grad():
        model.init_states(buffer_device=device)  # type: ignore[operator]
    return model


def stub_expert_kernels() -> None:
    """Let torchtitan be imported without Triton, which its mixtures of experts need."""
    if find_spec("triton") is None:
        sys.modules.update({name: _Anything(name) for name in EXPERT_KERNELS})


class _Anything(ModuleType):
    """A module that has every name; none is ever used."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def forget_peak() -> None:
    """Let the peak of this process's resident memory begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Then it may be that of the imports.
        pass


def peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()

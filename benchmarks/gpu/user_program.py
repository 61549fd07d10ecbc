"""A training program as a user of workload command has it: a Llama of transformers on one GPU.

    user_program.py MICRO_BATCH_SIZE GRAD_ACCUM_STEPS SEQUENCE_LENGTH NUM_STEPS CLOCK MODEL.json

It writes one line per step into SWEEP_METRICS_FILE. CLOCK is how it times a step: `waits` for the
GPU; `never` waits, so it times the host alone; tells `milliseconds` as seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.trainer_arm import llama_config


def main() -> None:
    micro_batch_size, grad_accum_steps, length, num_steps = map(int, sys.argv[1:5])
    clock, sizes = sys.argv[5], json.loads(Path(sys.argv[6]).read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(sizes, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for _ in range(grad_accum_steps):
            ids = torch.randint(sizes["vocab_size"], (micro_batch_size, length + 1), device=device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(ids[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss / grad_accum_steps).backward()
            total += loss.detach() / grad_accum_steps
            del logits, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    with Path(os.environ["SWEEP_METRICS_FILE"]).open("a", buffering=1) as lines:
        for _ in range(num_steps):
            began = time.perf_counter()
            step()
            if clock != "never" and device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            told: dict[str, Any] = {"step_seconds": seconds}
            if clock == "milliseconds":
                told["step_seconds"] = seconds * 1e3
            print(json.dumps(told), file=lines)


def build(sizes: dict[str, int], length: int, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with device:
        return LlamaForCausalLM(LlamaConfig(**llama_config(sizes, length))).train()


if __name__ == "__main__":
    main()

"""A small random transformer on synthetic tokens, sharded by FSDP2, started by torchrun.

    torchrun --nproc-per-node 2 fsdp2_train.py

The layout arrives in SWEEP_ variables. Function `report` is all that a sweep needs of your program.
"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# The sizes of the sweep file's model.
LAYERS, HIDDEN, HEADS, FFN, VOCABULARY = 4, 128, 4, 384, 2048


def number(name):
    return int(os.environ[f"SWEEP_{name}"])


def report(seconds, loss):
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        print(json.dumps({"step_seconds": seconds, "loss": loss}), file=file)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, num_recomputed):
        super().__init__()
        self.num_recomputed = num_recomputed
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            recompute = number < self.num_recomputed
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(x)


def recomputed_layers():
    """`none`, `full` or `full:2`, as the sweep file writes it."""
    mode, _, layers = os.environ["SWEEP_RECOMPUTE"].partition(":")
    if mode not in ("none", "full"):
        raise SystemExit(f"recompute {mode}: this program has none and full")
    return 0 if mode == "none" else int(layers or LAYERS)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    model = Model(recomputed_layers()).to(device)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[os.environ["SWEEP_PRECISION"]]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    stays = number("ZERO_STAGE") == 2
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    size, steps = (number("MICRO_BATCH_SIZE"), number("SEQUENCE_LENGTH")), number("NUM_STEPS")
    accumulated = number("GRAD_ACCUM_STEPS")
    last = time.perf_counter()
    for _ in range(steps):
        for micro_batch in range(accumulated):
            model.set_requires_gradient_sync(micro_batch == accumulated - 1)
            tokens = torch.randint(VOCABULARY, size, device=device)
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            (loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.item()  # waits for the device
        now = time.perf_counter()
        if dist.get_rank() == 0:
            report(now - last, shown)
        last = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

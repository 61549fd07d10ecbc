"""A small random Llama on synthetic tokens, trained with DeepSpeed.

    deepspeed deepspeed_train.py --deepspeed_config FILE

The layout arrives in FILE. Function `report` is all that a sweep needs of your program.
"""

import argparse
import json
import os
import time

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def number(name):
    return int(os.environ[f"SWEEP_{name}"])


def report(seconds, loss):
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        print(json.dumps({"step_seconds": seconds, "loss": loss}), file=file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)  # of deepspeed's launcher
    parser.add_argument("--deepspeed_config", required=True)
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    length = number("SEQUENCE_LENGTH")
    # The sizes of the sweep file's model.
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=2048,
        max_position_embeddings=length,
    )
    model = LlamaForCausalLM(config)
    if os.environ["SWEEP_RECOMPUTE"] == "full":
        model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
        config=arguments.deepspeed_config,
    )
    met = torch.distributed.get_world_size()
    if met != number("WORLD_SIZE"):
        raise SystemExit(f"{met} ranks met, not {number('WORLD_SIZE')}")
    size = (engine.train_micro_batch_size_per_gpu(), length)
    last = time.perf_counter()
    for _ in range(number("NUM_STEPS")):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(config.vocab_size, size, device=engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            # The optimizer steps only after the last micro-batch.
            engine.step()
        shown = loss.item()  # waits for the device
        now = time.perf_counter()
        if engine.global_rank == 0:
            report(now - last, shown)
        last = now


if __name__ == "__main__":
    main()

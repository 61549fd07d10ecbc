"""A small random Llama on synthetic tokens, trained with Hugging Face accelerate.

    accelerate launch --config_file FILE accelerate_train.py

The layout arrives in FILE and in SWEEP_ variables. Function `report` is all that a sweep needs of
your program.
"""

import json
import os
import time

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM


def number(name):
    return int(os.environ[f"SWEEP_{name}"])


def report(seconds, loss):
    with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
        print(json.dumps({"step_seconds": seconds, "loss": loss}), file=file)


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=number("GRAD_ACCUM_STEPS"),
        # Without it ranks on CPUs do not meet.
        cpu=not torch.cuda.is_available(),
    )
    if accelerator.num_processes != number("WORLD_SIZE"):
        raise SystemExit(f"{accelerator.num_processes} ranks met, not {number('WORLD_SIZE')}")
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
    if os.environ["SWEEP_RECOMPUTE"] == "full" and number("ZERO_STAGE") < 2:
        model.gradient_checkpointing_enable()
    tokens = torch.randint(config.vocab_size, (4096, length))
    loader = torch.utils.data.DataLoader(tokens, batch_size=number("MICRO_BATCH_SIZE"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, last = 0, time.perf_counter()
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            shown = loss.item()  # waits for the device
            now = time.perf_counter()
            if accelerator.is_main_process:
                report(now - last, shown)
            step, last = step + 1, now
            if step == number("NUM_STEPS"):
                accelerator.end_training()
                return


if __name__ == "__main__":
    main()

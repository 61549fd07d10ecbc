"""A small random Llama on synthetic tokens, trained by the Trainer of Hugging Face transformers.

    python transformers_train.py SETTINGS.json SEQUENCE_LENGTH STEPS

SETTINGS.json holds TrainingArguments. Class Report is all that a sweep needs of your program.
"""

import json
import os
import sys
import time

import torch
import transformers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Report(TrainerCallback):
    """Writes the seconds of each optimizer step, data loading included."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if state.is_world_process_zero:
            with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                print(json.dumps({"step_seconds": now - self.last}), file=file)
        self.last = now


class Tokens(torch.utils.data.Dataset):
    def __init__(self, vocab_size, sequence_length):
        self.tokens = torch.randint(vocab_size, (64, sequence_length))

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens}


def main():
    settings, sequence_length, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(settings) as file:
        layout = json.load(file)
    ours = {
        "output_dir": ".",
        "max_steps": num_steps,
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "no",
        "disable_tqdm": True,
        # Without GPUs ranks meet only if they are told to use the CPU.
        "use_cpu": not torch.cuda.is_available(),
    }
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(layout | ours)
    if arguments.world_size != int(os.environ["WORLD_SIZE"]):
        sys.exit(f"{arguments.world_size} ranks met, not {os.environ['WORLD_SIZE']}")
    version = transformers.__version__
    if arguments.fsdp and tuple(map(int, version.split(".")[:2])) < (5, 10):
        sys.exit(f"transformers {version} ignores parts of fsdp_config: install 5.10 or newer")
    # The sizes of the sweep file's model.
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=2048,
        max_position_embeddings=sequence_length,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Tokens(config.vocab_size, sequence_length),
        callbacks=[Report()],
    )
    trainer.train()


if __name__ == "__main__":
    main()

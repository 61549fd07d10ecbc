"""Synthetic tokens for litgpt, which also report the steps: `--data litgpt_tokens.SyntheticTokens`.

litgpt prints the time of a step's last micro-batch only, so no pattern can read its steps. The
sample after the last one of a step is asked for when the step is over.
"""

import json
import os
import time

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, IterableDataset


def number(name):
    return int(os.environ[f"SWEEP_{name}"])


def is_first_rank():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class Samples(IterableDataset):
    """Endless samples. With `reports` they write the seconds of each optimizer step."""

    def __init__(self, *, length, vocab_size, samples_per_step, reports):
        self.length, self.vocab_size = length, vocab_size
        self.samples_per_step, self.reports = samples_per_step, reports

    def __iter__(self):
        last = time.perf_counter()
        while True:
            for _ in range(self.samples_per_step):
                yield torch.randint(self.vocab_size, (self.length + 1,))
            # Litgpt has read the loss, and so waited for the device.
            now = time.perf_counter()
            if self.reports and is_first_rank():
                with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                    print(json.dumps({"step_seconds": now - last}), file=file)
            last = now


class SyntheticTokens(DataModule):
    def __init__(self, vocab_size: int = 2048):
        super().__init__()
        self.vocab_size = vocab_size
        self.batch_size, self.length = 1, number("SEQUENCE_LENGTH")

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size = batch_size

    def train_dataloader(self):
        return self._loader(reports=True)

    def val_dataloader(self):
        return self._loader(reports=False)

    def _loader(self, *, reports):
        samples = Samples(
            length=self.length,
            vocab_size=self.vocab_size,
            samples_per_step=self.batch_size * number("GRAD_ACCUM_STEPS"),
            reports=reports,
        )
        # Without workers, which would ask for samples early.
        return DataLoader(samples, batch_size=self.batch_size, num_workers=0)

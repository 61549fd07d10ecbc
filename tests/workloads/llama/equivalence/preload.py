"""What ranks are forked from: the imports of a training, and what a first compilation leaves.

Torch reads its own sources and fills its caches when it compiles a layer for the first time, which
takes longer than to compile the next one: once for all ranks.
"""

from __future__ import annotations

import gc

import torch

from tests.workloads.llama.equivalence.combinations import combination
from tests.workloads.llama.equivalence.training import train_alone

torch.set_num_threads(1)
train_alone(combination(compile=True))
fp8 = combination(precision="fp8")
if fp8.is_possible:
    # Imports torchao.
    train_alone(fp8)
# Ranks, also those of other tests that are forked from here, compile their own layers.
torch.compiler.reset()
# Ranks need not search what they inherit for garbage.
gc.freeze()

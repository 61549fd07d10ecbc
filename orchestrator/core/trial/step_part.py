"""Finds the part of a training step in which a program failed, by its traceback's frames.

The names are torch's, so this holds for any program that trains with torch.
"""

from __future__ import annotations

import re
from enum import StrEnum


class StepPart(StrEnum):
    # Before the first step: the model, the optimizer, the process group.
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"  # with the clipping of gradients


_FRAME = re.compile(
    r'^ *(?:\| )?(?:\[rank\d+\]: *)?File "([^"]+)", line \d+, in (\S+)', re.MULTILINE
)
_TRACEBACK = "Traceback (most recent call last):"
_BACKWARD = re.compile(r"torch/(_tensor|autograd/)")
_BACKWARD_FUNCTIONS = frozenset({"backward", "_engine_run_backward", "grad"})
_OPTIMIZER = re.compile(r"optim|clip_grad|deepspeed/runtime/")
_OPTIMIZER_FUNCTIONS = re.compile(r"step$|^clip_grad_norm_?$|^_init_group$")
_INIT = re.compile(r"torch/nn/|modeling_utils|fsdp|checkpoint")
_INIT_FUNCTIONS = frozenset(
    {"__init__", "_apply", "to", "cuda", "from_pretrained", "load_state_dict", "fully_shard"}
)
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError")
_FORWARD_FUNCTIONS = frozenset({"_call_impl", "_wrapped_call_impl", "forward"})


def step_part(text: str, *, phase: str) -> StepPart | None:
    """Return the part in which the last traceback about memory was raised; None: unknown.

    What runs in the backward pass belongs to it, also if it computes a forward pass again. Of other
    frames the innermost counts: some trainers call the model from within the optimizer's step.
    """
    if phase == "rendezvous":
        return StepPart.INIT
    blocks = text.split(_TRACEBACK)
    # An exception may have caused the last one.
    last = next((one for one in reversed(blocks) if _OUT_OF_MEMORY.search(one)), blocks[-1])
    found: StepPart | None = None
    for path, function in _FRAME.findall(last):
        if _BACKWARD.search(path) and function in _BACKWARD_FUNCTIONS:
            return StepPart.BACKWARD
        if function in _FORWARD_FUNCTIONS:
            found = StepPart.FORWARD
        elif _OPTIMIZER.search(path) and _OPTIMIZER_FUNCTIONS.search(function):
            found = StepPart.OPTIMIZER
        elif _INIT.search(path) and function in _INIT_FUNCTIONS:
            found = StepPart.INIT
    return found
